"""Distillation in every layout equals a plain loop with transformers' model as the teacher, and resumes with equal losses."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from strata.platform import recipe_file
from strata.platform.recipe import Recipe
from strata.training.checkpoint import format, resharding
from strata.training.checkpoint.storage import folder
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.data.windows import Windows
from strata.training.loop import Job, Worker
from strata.training.model.llama import Llama
from strata.training.parallel import optimizer_state

from ..conftest import SMALL, VOCAB
from ..distillation.teachers import write_teacher
from .ranks import on_ranks
from .reference import Reference, train_plainly
from .test_equivalence import DENSE, MORE, SHAPE, STEPS

pytestmark = pytest.mark.slow

LAYOUTS = {"one worker": "workers=1"}
LAYOUTS |= {name: DENSE[name] for name in ("ZeRO-0", "ZeRO-1", "ZeRO-3", "tensor", "sequence", "pipeline", "DualPipeV")}
LAYOUTS |= {name: DENSE[name] for name in ("data x tensor x pipeline", "data x sequence, ZeRO-3", "ZeRO-1, recompute all")}
LAYOUTS |= {"ZeRO-3, offloaded parameters": DENSE["ZeRO-3, offloaded parameters"]}
ALWAYS = ("DualPipeV",)


@dataclass(frozen=True)
class Distilled:
    val_loss: float  # of the initial state
    compared: dict[str, float]
    losses: list[float]
    resumed: list[float]  # from the plain loop's checkpoint after `STEPS`


def distil_on_this_rank(job: Job, other: Path) -> Distilled:
    worker = Worker(job)
    val_loss, compared = worker.evaluate(), worker.compared_with_teacher()
    losses = [worker.step(step)[0] for step in range(STEPS)]
    found = format.examine(folder(other))
    optimizer_state.load(worker.engine, job.model, job.parallel, resharding.Reader(found), found.step)
    return Distilled(val_loss, compared, losses, [worker.step(step)[0] for step in range(STEPS, STEPS + MORE)])


class Jobs:
    def __init__(self, corpus: Path, home: Path) -> None:
        self._corpus, self._home = corpus, home
        recipe = self.recipe("workers=1")
        self.tokens = shards.prepare(open_corpus(recipe.data), VOCAB, 0.1)
        self.teacher = write_teacher(home / "teacher", self.tokens)
        self._plain = AutoModelForCausalLM.from_pretrained(self.teacher, attn_implementation="eager", dtype=torch.float32)
        self.checkpoint = home / "plain"
        self._reference: Reference | None = None

    def recipe(self, layout: str) -> Recipe:
        overrides = [key if "." in key else f"parallel.{key}" for key in layout.split()]
        shape = (*SHAPE, f"data.path={self._corpus}", f"train.distill={self._home / 'teacher'}")
        return recipe_file.load("laptop", [*SMALL, *shape, *overrides])

    def job(self, layout: str) -> Job:
        recipe = self.recipe(layout)
        return Job(self._home / "run", self.tokens, recipe.model, recipe.train, recipe.parallel)

    @torch.no_grad()
    def logits(self, tokens_bt: Tensor) -> Tensor:
        logits: Tensor = self._plain(input_ids=tokens_bt, use_cache=False).logits
        return logits

    def _probabilities(self, tokens_bt: Tensor) -> Tensor:
        return self.logits(tokens_bt).softmax(-1)

    def reference(self) -> Reference:
        if self._reference is None:
            recipe = self.recipe("workers=1")
            self._reference = train_plainly(recipe, self.tokens, STEPS, MORE, self.checkpoint, self._probabilities)
        return self._reference

    def evaluated(self) -> tuple[float, float, float]:
        """Cross entropy with the text, KL divergence and agreement of the initial model on held-out windows."""
        recipe = self.recipe("workers=1")
        windows = Windows(self.tokens, "validation", recipe.model.context)
        rows = torch.from_numpy(windows.read(windows.evenly(recipe.train.eval_sequences)))
        with torch.no_grad():
            mine = Llama(recipe.model, recipe.train.seed, "torch")(rows[:, :-1]).flatten(0, 1)
        theirs = self.logits(rows[:, :-1]).flatten(0, 1)
        kl = F.kl_div(mine.log_softmax(-1), theirs.log_softmax(-1), reduction="batchmean", log_target=True)
        agreement = (mine.argmax(-1) == theirs.argmax(-1)).double().mean()
        return float(F.cross_entropy(mine, rows[:, 1:].flatten())), float(kl), float(agreement)


@pytest.fixture(scope="module")
def jobs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(corpus, tmp_path_factory.mktemp("distillation"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.rotation) for name in LAYOUTS])
def test_layout_equals_a_plain_loop_and_resumes(name: str, jobs: Jobs) -> None:
    reference, job = jobs.reference(), jobs.job(LAYOUTS[name])
    results = on_ranks(job.parallel.workers, distil_on_this_rank, job, jobs.checkpoint)
    assert len(set(map(str, results))) == 1, "all ranks report the same"
    found = results[0]
    assert found.losses == pytest.approx(reference.losses[:STEPS], rel=1e-4) and found.losses[-1] < found.losses[0]
    assert found.resumed == pytest.approx(reference.losses[STEPS:], rel=1e-4)
    assert (found.val_loss, found.compared["kl"], found.compared["agreement"]) == pytest.approx(jobs.evaluated(), rel=1e-4)
    assert found.compared["kl"] > 0.1
