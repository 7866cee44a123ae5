"""Fine-tuning equals a plain loop over transformers' own model in every layout: packed and unpacked, full and with adapters.

The loop here is one process of transformers (and peft's formula for the adapters): a mask of its own between tokens of the same
document, and the loss summed over the counted targets of the whole batch and divided by their number.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from tiny_models import LAYERS, ROWS
from torch import Tensor, nn

from strata.platform import recipe_file
from strata.platform.recipe import PROJECTIONS, ModelSection, Recipe
from strata.training.checkpoint import adapter, format, resharding, starting_weights
from strata.training.checkpoint.storage import folder
from strata.training.data.rows import RowBatch, TrainingData
from strata.training.data.sampler import Indices, step_indices
from strata.training.evaluation.samples import Prompts
from strata.training.loop import Job, Worker
from strata.training.model.llama import Llama, initialize
from strata.training.model.lora import LoraLinear
from strata.training.parallel import optimizer_state
from strata.training.targets import IGNORED

from ..conftest import SMALL
from ..model.families.folders import save
from ..plain import scheduled_rate, scheduled_windows
from .ranks import on_ranks

pytestmark = pytest.mark.slow

STEPS = 20
MORE = 3
CONTEXT = 32
ROWS_OF_A_SPLIT = 24
VOCAB = 96
STEP = ("train.batch=8", "train.micro_batch=2", "train.steps=40", f"model.context={CONTEXT}")
RATES = ("train.lr=1e-3", "train.embedding_lr_ratio=1")
MODELS = {
    "qwen3": replace(ROWS["qwen3"], values=ROWS["qwen3"].values | LAYERS | {"tie_word_embeddings": True}),
    "llama": replace(ROWS["llama-biases"], values=ROWS["llama-biases"].values | LAYERS | {"tie_word_embeddings": False}),
    "gemma3": ROWS["gemma3"],
    "olmo2": replace(ROWS["olmo2"], values=ROWS["olmo2"].values | LAYERS),
    "qwen3_moe": replace(ROWS["qwen3_moe"], values=ROWS["qwen3_moe"].values | LAYERS),
    "gpt_oss": replace(ROWS["gpt_oss"], values=ROWS["gpt_oss"].values | LAYERS),
}
LAYOUTS = {
    "one worker": "workers=1",
    "data": "workers=2 zero=0",
    "ZeRO-1": "workers=2 zero=1",
    "ZeRO-2": "workers=2 zero=2",
    "ZeRO-3": "workers=2 zero=3",
    "ZeRO-3, recompute all": "workers=2 zero=3 train.recompute=full",
    "tensor": "workers=2 tensor=2 zero=0",
    "pipeline": "workers=2 pipeline=2 zero=0",
    "DualPipeV": "workers=2 pipeline=2 schedule=dualpipev zero=0",
    "tensor x pipeline": "workers=4 tensor=2 pipeline=2 zero=0",
    "sequence": "workers=2 sequence=2 zero=0",
    "data x sequence, ZeRO-3": "workers=4 sequence=2 zero=3",
}
ALWAYS = (("qwen3", "ZeRO-3", True, "LoRA"),)
ADAPTERS = {"LoRA": "", "DoRA": ", dora: true", "QLoRA": ", base: nf4", "QDoRA": ", base: nf4, dora: true"}
EVERYWHERE = "q_proj, v_proj, o_proj, up_proj, down_proj"
TARGETS = {"gpt_oss": "q_proj, o_proj", "qwen3_moe": "q_proj, o_proj"}  # transformers holds experts as one tensor
PROMPTS = Prompts(("a", "b", "c"), ((5, 9, 70), (44,), tuple(range(20, 40))), 8, (), Path())
SMALL_TRAINING = [key for key in SMALL if key.startswith("train.")]


@dataclass(frozen=True)
class Documents:
    """Rows of random documents, of which some targets count. Packed, a row has several; unpacked, one and padding. Rows differ in
    the number of counted targets, so a mean of means would not be the mean over tokens."""

    packed: bool
    seed: int

    def __len__(self) -> int:
        return ROWS_OF_A_SPLIT

    def documents(self, row: int) -> list[tuple[list[int], list[int]]]:
        """(tokens, targets) of each document of a row; the last one is padding, whose targets do not count."""
        draw = np.random.default_rng([self.seed, row])
        lengths = []
        while sum(lengths) < CONTEXT:
            lengths.append(int(draw.integers(1, CONTEXT // 2 if self.packed else CONTEXT)))
            if not self.packed and len(lengths) == 1:
                lengths.append(CONTEXT - lengths[0])
        lengths[-1] -= sum(lengths) - CONTEXT
        found = []
        for number, length in enumerate(lengths):
            tokens = draw.integers(0, VOCAB, length + 1)
            counts = draw.random(length) < (0.3 if row % 2 else 0.9)
            if number == len(lengths) - 1:
                counts[:] = False
            elif number == 0:
                counts[-1] = True
            found.append((tokens[:-1].tolist(), np.where(counts, tokens[1:], IGNORED).tolist()))
        return found

    def read(self, indices: Indices) -> RowBatch:
        every = [self.documents(int(index)) for index in indices]
        tokens = [[token for ids, _ in row for token in ids] for row in every]
        targets = [[target for _, wanted in row for target in wanted] for row in every]
        positions = [[at for ids, _ in row for at in range(len(ids))] for row in every]
        return RowBatch(np.array(tokens), np.array(targets), np.array(positions))

    def loss_tokens(self, indices: Indices) -> NDArray[np.int64]:
        return (self.read(indices).targets != IGNORED).sum(axis=1)

    def evenly(self, count: int) -> Indices:
        return np.arange(min(count, ROWS_OF_A_SPLIT))


def data(packed: bool) -> TrainingData:
    def order(step: int, batch: int, rank: int, world: int, seed: int) -> Indices:
        return step_indices(step, batch, rank, world, ROWS_OF_A_SPLIT, seed)

    return TrainingData(Documents(packed, 1), Documents(packed, 2), order)


@dataclass(frozen=True)
class Tuned:
    """Losses of `STEPS` + `MORE` steps, and of the last `MORE` again from two checkpoints: another layout's, if there is one, and
    its own."""

    losses: list[float]
    val_loss: float
    samples: list[list[int]]  # continuations after `STEPS`; none with DualPipeV
    from_other: list[float] | None
    from_own: list[float]


def train_on_this_rank(job: Job, packed: bool, other: Path | None, own: Path) -> Tuned:
    worker = Worker(job, data(packed))
    begin = partial(starting_weights.load, worker.engine, job.model, job.train, job.parallel)

    def resume(source: Path) -> list[float]:
        found = format.examine(folder(source))
        optimizer_state.load(worker.engine, job.model, job.parallel, resharding.Reader(found), found.step)
        begin(found.step)
        return take(STEPS, MORE)

    def take(first: int, count: int) -> list[float]:
        return [worker.step(step)[0] for step in range(first, first + count)]

    from_other = resume(other) if other else None
    begin(0)
    losses, val_loss = take(0, STEPS), worker.evaluate()
    samples = [] if job.parallel.schedule == "dualpipev" else worker.continuations(PROMPTS)
    parts = [replace(p, values=p.values.cpu()) for p in optimizer_state.fragments(worker.engine, job.model, job.parallel)]
    format.write(folder(own), worker.rank, worker.world, STEPS, job.origin, None, parts)
    dist.barrier()
    losses += take(STEPS, MORE)
    return Tuned(losses, val_loss, samples, from_other, resume(own))


class Jobs:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._plain: dict[Any, tuple[list[float], float, list[list[int]]]] = {}
        self._newest: dict[Any, Path] = {}  # checkpoint of the layout that was trained last, by model and kind of training

    def tuned(self, model: str, name: str, packed: bool, *more: str) -> Tuned:
        job, own = self.job(model, LAYOUTS[name], *more), self._home / f"{model}-{name}-{packed}-{crc32(str(more).encode())}"
        results = on_ranks(job.parallel.workers, train_on_this_rank, job, packed, self._newest.get((model, packed, more)), own)
        assert len(set(map(str, results))) == 1, "all ranks report the same losses"
        self._newest[model, packed, more] = own
        tuned: Tuned = results[0]
        return tuned

    def recipe(self, model: str, layout: str, *more: str) -> Recipe:
        source = self._home / model
        if not source.exists():
            save(MODELS[model], source)
        overrides = [key if "." in key else f"parallel.{key}" for key in layout.split()]
        # A token near the border between two experts changes sides by a rounding error, which jumps in the loss. Small steps do
        # not let these errors grow to where such tokens are many.
        moe = ["model.moe.balance=0", "train.lr=1e-4"] if "num_experts_per_tok" in MODELS[model].values else []
        return recipe_file.load("laptop", [*SMALL_TRAINING, f"model.from={source}", *STEP, *RATES, *moe, *overrides, *more])

    def job(self, model: str, layout: str, *more: str) -> Job:
        recipe = self.recipe(model, layout, *more)
        return Job(self._home / "run", self._home, recipe.model, recipe.train, recipe.parallel)

    def plain(self, model: str, packed: bool, *more: str) -> tuple[list[float], float, list[list[int]]]:
        if (model, packed, more) not in self._plain:
            self._plain[model, packed, more] = train_plainly(self.recipe(model, "workers=1", *more), packed)
        return self._plain[model, packed, more]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("finetuning"))


def cases() -> list[Any]:
    """Every layout with one model, and every model in one layout. A few of them in each run of the tests, the rest in
    rotation."""
    found = [("qwen3", name, True, "") for name in LAYOUTS]
    found += [("qwen3", name, True, "LoRA") for name in ("ZeRO-3", "tensor", "pipeline", "sequence")]
    found += [("qwen3", name, True, "DoRA") for name in ("data", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor", "sequence")]
    found += [("qwen3", name, True, "QLoRA") for name in ("data", "ZeRO-1", "ZeRO-2", "pipeline", "sequence")]
    found += [("qwen3", "data", False, ""), ("llama", "sequence", True, ""), ("gemma3", "tensor x pipeline", True, "")]
    found += [
        ("olmo2", "pipeline", True, ""),
        ("qwen3_moe", "ZeRO-3", True, "LoRA"),
        ("gpt_oss", "tensor x pipeline", True, ""),
        ("llama", "tensor x pipeline", True, "DoRA"),
        ("llama", "pipeline", True, "QDoRA"),
    ]
    params = []
    for model, name, packed, adapters in sorted(found):
        label = f"{model}, {name}, {'packed' if packed else 'unpacked'}{f', {adapters}' if adapters else ''}"
        marks = () if (model, name, packed, adapters) in ALWAYS else pytest.mark.rotation
        params.append(pytest.param(model, name, packed, adapters, id=label, marks=marks))
    return params


@pytest.mark.parametrize(("model", "name", "packed", "adapters"), cases())
def test_losses_equal_a_plain_loop(model: str, name: str, packed: bool, adapters: str, jobs: Jobs) -> None:
    if adapters.startswith("Q"):
        pytest.importorskip("bitsandbytes")
    targets = TARGETS.get(model, EVERYWHERE)
    more = (f"train.lora={{rank: 4, alpha: 12, targets: [{targets}]{ADAPTERS[adapters]}}}",) if adapters else ()
    losses, val_loss, samples = jobs.plain(model, packed, *more)
    tuned = jobs.tuned(model, name, packed, *more)
    assert tuned.losses == pytest.approx(losses, rel=1e-4)
    assert tuned.val_loss == pytest.approx(val_loss, rel=1e-4)
    assert tuned.samples == (samples if name != "DualPipeV" else [])
    assert tuned.from_own == tuned.losses[STEPS:]
    assert tuned.from_other is None or tuned.from_other == pytest.approx(losses[STEPS:], rel=1e-4)


def train_plainly(recipe: Recipe, packed: bool) -> tuple[list[float], float, list[list[int]]]:
    from transformers import AutoModelForCausalLM

    section, train = recipe.model, recipe.train
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(section.source, **options).train()
    if train.lora:
        model.requires_grad_(False)
        scale, rank = train.lora.alpha / train.lora.rank, train.lora.rank
        for path, module in list(model.named_modules()):
            parent, _, last = path.rpartition(".")
            if isinstance(module, nn.Linear) and last in PROJECTIONS and train.lora.base == "nf4":
                quantize_and_dequantize(module)
            if isinstance(module, nn.Linear) and last in train.lora.targets:
                kind = Dora if train.lora.dora else Peft
                setattr(model.get_submodule(parent), last, kind(module, scale, rank, path, section, train.seed))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    tables = [p for name, p in named if "embed_tokens" in name or "lm_head" in name]
    vectors = [p for name, p in named if name.endswith(("norm.weight", "bias", "sinks", "magnitude"))]
    others = [p for _, p in named if not any(p is other for other in (*tables, *vectors))]
    optimizer = torch.optim.AdamW(
        [
            {"params": others, "weight_decay": train.weight_decay, "ratio": 1.0},
            {"params": tables, "weight_decay": 0.0, "ratio": train.embedding_lr_ratio},
            {"params": vectors, "weight_decay": 0.0, "ratio": 1.0},
        ],
        betas=(0.9, 0.95),
    )
    rows, losses, val_loss, samples = Documents(packed, 1), [], 0.0, list[list[int]]()
    for step in range(STEPS + MORE):
        if step == STEPS:
            val_loss = evaluate(model, packed, train.eval_sequences)
            samples = [continuation(model, ids) for ids in PROMPTS.ids]
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(step, train) * group["ratio"]
        loss = batch_loss(model, rows, scheduled_windows(step, train.batch, ROWS_OF_A_SPLIT, train.seed))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in named], train.clip)
        optimizer.step()
    return losses, val_loss, samples


def continuation(model: Any, ids: tuple[int, ...]) -> list[int]:
    """Tokens of transformers' own greedy generation, with its KV cache."""
    tokens_bt = model.generate(torch.tensor([ids]), max_new_tokens=PROMPTS.tokens, do_sample=False, eos_token_id=None)
    tokens: list[int] = tokens_bt[0, len(ids) :].tolist()
    return tokens


@torch.no_grad()
def evaluate(model: nn.Module, packed: bool, sequences: int) -> float:
    return batch_loss(model, Documents(packed, 2), list(range(min(sequences, ROWS_OF_A_SPLIT)))).item()


def batch_loss(model: nn.Module, rows: Documents, indices: list[int]) -> Tensor:
    every = [rows.documents(index) for index in indices]
    tokens_bt = torch.tensor([[token for ids, _ in row for token in ids] for row in every])
    targets_bt = torch.tensor([[target for _, wanted in row for target in wanted] for row in every])
    positions_bt = torch.tensor([[at for ids, _ in row for at in range(len(ids))] for row in every])
    document_bt = torch.tensor([[number for number, (ids, _) in enumerate(row) for _ in ids] for row in every])
    same = document_bt[:, None, :, None] == document_bt[:, None, None, :]
    full = same & torch.ones(CONTEXT, CONTEXT).tril().bool()
    window = model.config.sliding_window if getattr(model.config, "sliding_window", None) else CONTEXT
    sliding = full & torch.ones(CONTEXT, CONTEXT).triu(1 - window).bool()
    masks = [torch.zeros(same.shape).masked_fill(~seen, torch.finfo().min) for seen in (full, sliding)]
    slides = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    mask = dict(zip(("full_attention", "sliding_attention"), masks, strict=True)) if slides else masks[0]
    logits_btv = model(input_ids=tokens_bt, position_ids=positions_bt, attention_mask=mask, use_cache=False).logits
    total = F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (targets_bt != IGNORED).sum()


class Peft(nn.Module):
    """peft's LoRA layer without dropout, written again, with Strata's start."""

    def __init__(self, base: nn.Linear, scale: float, rank: int, path: str, section: ModelSection, seed: int) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = nn.Parameter(torch.empty(rank, base.in_features)), nn.Parameter(torch.empty(base.out_features, rank))
        for part, weight in (("A", self.a), ("B", self.b)):
            initialize(f"{path}.lora_{part}.weight", weight, section, seed)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.scale * (x @ self.a.T) @ self.b.T
        return y


class Dora(Peft):
    """peft's DoRA layer without dropout, written again."""

    def __init__(self, base: nn.Linear, *rest: Any) -> None:
        super().__init__(base, *rest)
        self.magnitude = nn.Parameter(base.weight.norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.scale * self.b @ self.a
        factor = self.magnitude / weight.norm(dim=1).detach()
        y: Tensor = F.linear(x, factor[:, None] * weight, self.base.bias)
        return y


@torch.no_grad()
def quantize_and_dequantize(module: nn.Linear) -> None:
    """The weight as bitsandbytes' NF4 with double quantization represents it."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(module.weight, quant_type="nf4", compress_statistics=True, blocksize=64)
    module.weight.copy_(functional.dequantize_4bit(packed, state))


@pytest.mark.rotation
def test_training_starts_from_a_given_dora_adapter(jobs: Jobs, tmp_path: Path) -> None:
    """On tensor-parallel ranks, the given adapter computes what the merged model of transformers does."""
    from transformers import AutoModelForCausalLM

    targets = "q_proj, o_proj, down_proj"
    words = f"train.lora={{rank: 4, alpha: 12, targets: [{targets}], dora: true, from: {tmp_path}}}"
    job = jobs.job("qwen3", LAYOUTS["tensor"], words)
    lora, section = job.train.lora, job.model
    assert lora
    model = AutoModelForCausalLM.from_pretrained(section.source, attn_implementation="eager", dtype=torch.float32)
    base = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    names, own = adapter.adapted(section, lora), {}
    torch.manual_seed(2)
    for name in names:
        path, (outputs, inputs) = name.removesuffix(".weight"), base[name].shape
        own[f"{path}.lora_A.weight"] = 0.1 * torch.randn(4, inputs)
        own[f"{path}.lora_B.weight"] = 0.1 * torch.randn(outputs, 4)
        own[f"{path}.lora_magnitude_vector"] = base[name].norm(dim=1) * (0.5 + torch.rand(outputs))
    adapter.write(tmp_path, own.__getitem__, section, lora)
    whole = adapter.merging((own | base).__getitem__, names, lora)
    model.load_state_dict({name: whole(name) for name in base}, strict=False)
    found = on_ranks(2, loss_at_the_start, job)
    assert found == pytest.approx([evaluate(model, True, job.train.eval_sequences)] * 2, rel=1e-5)


def loss_at_the_start(job: Job) -> float:
    worker = Worker(job, data(True))
    starting_weights.load(worker.engine, job.model, job.train, job.parallel, 0)
    return worker.evaluate()


def test_adapters_start_as_pefts(jobs: Jobs) -> None:
    """A is uniform within 1 / sqrt(inputs), B is zero, and nothing else is trained."""
    recipe = jobs.recipe("qwen3", "workers=1", f"train.lora={{rank: 4, targets: [{EVERYWHERE}]}}")
    model = Llama(recipe.model, 0, "torch", recipe.train.lora)
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert len(adapted) == 5 * recipe.model.layers
    for module in adapted:
        bound = 1 / math.sqrt(module.base.in_features)
        assert 0.9 * bound < module.lora_A.weight.abs().max() <= bound and not module.lora_B.weight.any()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora" in name}
