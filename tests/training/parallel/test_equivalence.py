"""Every layout trains like one process of plain torch, loads the checkpoint of any other layout, and is reproducible.

Ranks are plain processes on gloo (see ranks.py): real DeepSpeed, without Ray's startup time.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.platform import recipe_file
from strata.platform.recipe import Recipe
from strata.training.checkpoint import format, resharding
from strata.training.checkpoint.storage import folder
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.evaluation import samples
from strata.training.evaluation.samples import Prompts
from strata.training.loop import Job
from strata.training.model.llama import Llama

from ..conftest import SMALL, VOCAB
from .ranks import Trained, train
from .reference import Reference, train_plainly

pytestmark = pytest.mark.slow

STEPS = 20
MORE = 3
SHAPE = ("model.layers=4", "model.kv_heads=4", "train.batch=8", "train.micro_batch=2", "train.steps=40")
# A token near the border between two experts changes sides by a rounding error, which jumps in the loss: small steps do not let
# these errors grow to where such tokens are many.
MIXTURE = ("model.moe.experts=4", "model.moe.top_k=2", "model.moe.shared_ffn=32", "train.lr=1e-3")
UNTIED = ("model.tie_embeddings=false",)

# Every layout accumulates gradients: 8 sequences per step, 2 per micro-batch (1 in pipelines that would have too few of them), at
# most 2 data-parallel workers.
SINGLY = "train.micro_batch=1"
DENSE = {
    "ZeRO-0": "workers=2 zero=0",
    "ZeRO-1": "workers=2 zero=1",
    "ZeRO-2": "workers=2 zero=2",
    "ZeRO-3": "workers=2 zero=3",
    "tensor": "workers=2 tensor=2 zero=0",
    "data x tensor, ZeRO-3": "workers=4 tensor=2 zero=3",
    "pipeline": "workers=2 pipeline=2 zero=0",
    "pipeline of 3, data, ZeRO-1": f"workers=6 pipeline=3 zero=1 {SINGLY}",
    "DualPipeV": "workers=2 pipeline=2 schedule=dualpipev zero=0",
    "tensor x pipeline": "workers=4 tensor=2 pipeline=2 zero=0",
    "data x tensor x pipeline": f"workers=8 tensor=2 pipeline=2 zero=1 {SINGLY}",
    "data x tensor x DualPipeV": f"workers=8 tensor=2 pipeline=2 schedule=dualpipev zero=1 {SINGLY}",
    "sequence": "workers=2 sequence=2 zero=0",
    "data x sequence, ZeRO-3": "workers=4 sequence=2 zero=3",
    "ZeRO-1, recompute all": "workers=2 zero=1 train.recompute=full",
    "ZeRO-3, recompute some": "workers=2 zero=3 train.recompute=selective",
    "tensor, recompute some": "workers=2 tensor=2 zero=1 train.recompute=selective",
    "tensor x pipeline, recompute all": "workers=4 tensor=2 pipeline=2 zero=1 train.recompute=full",
    "ZeRO-2, offloaded optimizer": "workers=2 zero=2 offload=optimizer",
    "ZeRO-3, offloaded parameters": "workers=2 zero=3 offload=all",
}
SPARSE = {
    "mixture, data": "workers=2 zero=1",
    "mixture, tensor": "workers=2 tensor=2 zero=1",
    "mixture, pipeline": f"workers=2 pipeline=2 zero=1 {SINGLY}",
    "expert": "workers=2 expert=2 zero=0",
    "data x expert, ZeRO-2": "workers=4 expert=2 zero=2",
    "expert, ZeRO-3, recompute all": "workers=2 expert=2 zero=3 train.recompute=full",
}
UNSHARED = {"untied, pipeline": "workers=2 pipeline=2 zero=1", "untied, tensor": "workers=2 tensor=2 zero=1"}

LAYOUTS = {
    **{name: (SHAPE, layout) for name, layout in DENSE.items()},
    **{name: (SHAPE + MIXTURE, layout) for name, layout in SPARSE.items()},
    **{name: (SHAPE + UNTIED, layout) for name, layout in UNSHARED.items()},
}
PROMPTS = Prompts(("a", "b", "c"), ((300, 301, 302, 303), (290,), tuple(range(260, 280))), 12, (), Path())

# In every run of the tests; ZeRO-1 and 2, the rest of the mixtures, more workers and rarer combinations in rotation.
ALWAYS = ("ZeRO-0", "ZeRO-3", "tensor", "pipeline", "DualPipeV", "sequence", "expert")


class Jobs:
    """Jobs on one corpus. The reference of each model shape and each layout are trained once. A layout's first resume is from
    the checkpoint of the layout of the same shape that was trained before it, or from the reference's checkpoint."""

    def __init__(self, corpus: Path, home: Path) -> None:
        self._corpus, self._home = corpus, home
        self._references: dict[tuple[str, ...], Reference] = {}
        self._trained: dict[str, Trained] = {}
        self._newest: dict[tuple[str, ...], Path] = {}

    def recipe(self, shape: tuple[str, ...], layout: str) -> Recipe:
        overrides = [key if "." in key else f"parallel.{key}" for key in layout.split()]
        return recipe_file.load("laptop", [*SMALL, *shape, f"data.path={self._corpus}", *overrides])

    def job(self, shape: tuple[str, ...], layout: str) -> Job:
        recipe = self.recipe(shape, layout)
        prompts = None if "dualpipev" in layout else PROMPTS
        return Job(self._home / "run", self.tokens(recipe), recipe.model, recipe.train, recipe.parallel, prompts=prompts)

    def reference(self, shape: tuple[str, ...]) -> Reference:
        if shape not in self._references:
            recipe = self.recipe(shape, "workers=1")
            self._references[shape] = train_plainly(recipe, self.tokens(recipe), STEPS, MORE, self._plain(shape))
        return self._references[shape]

    def trained(self, name: str) -> Trained:
        if name not in self._trained:
            job, shape = self.job(*LAYOUTS[name]), LAYOUTS[name][0]
            self.reference(shape)
            source = self._newest.get(shape, self._plain(shape))
            self._trained[name] = train(job, STEPS, MORE, source, self.saved(name))
            self._newest[shape] = self.saved(name) / "end"
        return self._trained[name]

    def __contains__(self, name: str) -> bool:
        return name in self._trained

    def saved(self, name: str) -> Path:
        return self._home / name

    def tokens(self, recipe: Recipe) -> Path:
        return shards.prepare(open_corpus(recipe.data), VOCAB, 0.1)

    def _plain(self, shape: tuple[str, ...]) -> Path:
        return self._home / "plain" / "-".join(shape)


@pytest.fixture(scope="module")
def jobs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(corpus, tmp_path_factory.mktemp("layouts"))


def whole_weights(path: Path) -> dict[str, Tensor]:
    reader = resharding.Reader(format.examine(folder(path)))
    return {name: reader.whole(name) for name in reader.names()}


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.rotation) for name in LAYOUTS])
def test_layout_equals_plain_torch_and_resumes_from_any_other(name: str, jobs: Jobs) -> None:
    reference, trained = jobs.reference(LAYOUTS[name][0]), jobs.trained(name)
    assert_weights(whole_weights(jobs.saved(name) / "start"), reference.before, tolerance=0)
    assert trained.losses == pytest.approx(reference.losses, rel=1e-4)
    assert_weights(whole_weights(jobs.saved(name) / "end"), reference.after, tolerance=1e-3)
    assert trained.from_other == pytest.approx(reference.losses[STEPS:], rel=1e-4)
    assert trained.from_own == trained.losses[STEPS:]


def test_samples_of_trained_layouts_are_those_of_one_process(jobs: Jobs) -> None:
    """A rank has neither the whole sequence nor the whole model in most layouts."""
    for name, (shape, layout) in LAYOUTS.items():
        if name not in jobs or "dualpipev" in layout:
            continue
        section = jobs.recipe(shape, layout).model
        model = Llama(section, jobs.recipe(shape, layout).train.seed, "torch")

        @torch.no_grad()
        def greedy(tokens_bt: Tensor, last_b: Tensor, model: Llama = model) -> Tensor:
            found: Tensor = model(tokens_bt, last_b=last_b).argmax(-1)
            return found

        expected = samples.generate(greedy, PROMPTS.ids, PROMPTS.tokens, PROMPTS.ends, section.context)
        assert jobs.trained(name).samples == expected, name
        assert len({token for ids in expected for token in ids}) > 2


def test_trained_layouts_have_the_same_validation_loss(jobs: Jobs) -> None:
    for names in (DENSE, SPARSE, UNSHARED):
        losses = [jobs.trained(name).val_loss for name in names if name in jobs]
        assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-4)
