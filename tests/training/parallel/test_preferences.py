"""Preference optimization equals a plain loop over transformers' own model in every layout, full and LoRA.

The loop here computes each document alone: its log-probability under the policy and under a frozen copy of the start, and the
loss by the formula of the paper.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import LAYERS, ROWS
from torch import Tensor, nn

from strata.platform import recipe_file
from strata.platform.recipe import Recipe
from strata.training.checkpoint import starting_weights
from strata.training.data.finetuning import prepare
from strata.training.data.finetuning.rows import Rows
from strata.training.loop import Job, Worker
from strata.training.preferences.mismatched import MismatchedRows
from strata.training.targets import IGNORED

from ..data.finetuning.tiny import CHATML, assistant, save_tokenizer, user, write_jsonl
from ..model.families.folders import save
from ..plain import scheduled_rate, scheduled_windows
from .ranks import on_ranks
from .test_finetuning import EVERYWHERE, LAYOUTS, RATES, SMALL_TRAINING, Peft

pytestmark = pytest.mark.slow

STEPS = 20
CONTEXT = 64
VOCAB = 430
LOSSES = {
    "dpo": "train.preference={loss: dpo, beta: 0.5, label_smoothing: 0.1, sft_weight: 0.2}",
    "ipo": "train.preference={loss: ipo, beta: 0.3}",
    "simpo": "train.preference={loss: simpo}",
    "orpo": "train.preference={loss: orpo, beta: 0.7}",
    "kto": "train.preference={loss: kto, beta: 0.5, desirable_weight: 1.5, undesirable_weight: 0.8}",
    "kto on pairs": "train.preference={loss: kto}",
}
ADAPTERS = f"train.lora={{rank: 4, alpha: 12, targets: [{EVERYWHERE}]}}"


def train_on_this_rank(job: Job) -> tuple[list[float], float, dict[str, float]]:
    worker = Worker(job)
    worker.prepare_reference()
    starting_weights.load(worker.engine, job.model, job.train, job.parallel, 0)
    losses = [worker.step(step)[0] for step in range(STEPS)]
    return losses, worker.evaluate(), worker.record(STEPS, losses[-1], 1.0)["preference"]


class Jobs:
    def __init__(self, home: Path) -> None:
        self._home = home
        self.model, self.pairs, self.labelled = home / "model", home / "pairs.jsonl", home / "labelled.jsonl"
        row = ROWS["qwen3"]
        save(replace(row, values=row.values | LAYERS | {"vocab_size": VOCAB, "tie_word_embeddings": True}), self.model)
        save_tokenizer(self.model, CHATML, eos_token="<|im_end|>")
        pairs = [
            {"prompt": f"What is {n} + 1?", "chosen": f"It is {n + 1}.", "rejected": f"It is {'the cat ' * (n % 4)}{n}"}
            for n in range(60)
        ]
        write_jsonl(self.pairs, pairs)
        answers = [(f"How are you? What is {n} + 1?", f"It is {n + 1}{', the cat' * (n % 6)}.", n % 3 > 0) for n in range(60)]
        strings = [{"prompt": prompt, "completion": answer, "label": label} for prompt, answer, label in answers[:40]]
        chats = [{"messages": [user(prompt), assistant(answer)], "label": label} for prompt, answer, label in answers[40:]]
        write_jsonl(self.labelled, [*strings, *chats])
        self._plain: dict[tuple[str, ...], tuple[list[float], float]] = {}

    def recipe(self, layout: str, *more: str) -> Recipe:
        overrides = [key if "." in key else f"parallel.{key}" for key in layout.split()]
        path = self.labelled if LOSSES["kto"] in more else self.pairs
        data = [f"data.path={path}", "data.kind=preference", "data.holdout=0.2", f"model.context={CONTEXT}"]
        steps = ["train.batch=8", "train.micro_batch=2", "train.steps=40", *RATES]
        return recipe_file.load("laptop", [*SMALL_TRAINING, f"model.from={self.model}", *data, *steps, *overrides, *more])

    def job(self, layout: str, *more: str) -> Job:
        recipe = self.recipe(layout, *more)
        rows = prepare.prepare(recipe.data, self.model, CONTEXT, print)
        return Job(self._home / "run", rows, recipe.model, recipe.train, recipe.parallel, mix=(1.0,))

    def plain(self, *more: str) -> tuple[list[float], float]:
        if more not in self._plain:
            job = self.job("workers=1", *more)
            self._plain[more] = train_plainly(job)
        return self._plain[more]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The plain loop's products are so small that a second thread doubles its time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("preferences"))


def cases() -> list[Any]:
    found = [("dpo", name, False) for name in ("data", "tensor", "pipeline", "DualPipeV", "tensor x pipeline", "sequence")]
    found += [("dpo", "ZeRO-3", True)]
    found += [("ipo", "data", False), ("simpo", "sequence", False), ("orpo", "tensor x pipeline", False)]
    found += [("kto", name, False) for name in ("data", "ZeRO-1", "tensor", "pipeline", "DualPipeV", "tensor x pipeline")]
    found += [("kto", "ZeRO-3", True), ("kto on pairs", "sequence", False)]
    always = ("dpo", "tensor", False)
    params = []
    for loss, name, lora in found:
        label = f"{loss}, {name}{', LoRA' if lora else ''}"
        params.append(
            pytest.param(loss, name, lora, id=label, marks=() if (loss, name, lora) == always else pytest.mark.rotation)
        )
    return params


@pytest.mark.parametrize(("loss", "name", "lora"), cases())
def test_losses_equal_a_plain_loop(loss: str, name: str, lora: bool, jobs: Jobs) -> None:
    more = (LOSSES[loss], *((ADAPTERS,) if lora else ()))
    losses, val_loss = jobs.plain(*more)
    job = jobs.job(LAYOUTS[name], *more)
    results = on_ranks(job.parallel.workers, train_on_this_rank, job)
    assert len(set(map(str, results))) == 1, "all ranks report the same"
    assert results[0][0] == pytest.approx(losses, rel=1e-4)
    assert results[0][1] == pytest.approx(val_loss, rel=1e-4)
    assert 0 <= results[0][2]["accurate"] <= 1 and losses[-1] < losses[0]
    assert loss not in ("kto", "kto on pairs") or results[0][2]["kl"] > 0, "a reference point of 0 could hide errors"


def documents(rows: Rows, index: int) -> list[tuple[Tensor, Tensor]]:
    """(tokens, targets) of each document of a row, of pairs chosen and rejected in turn, without the padding."""
    read = rows.read(torch.tensor([index]).numpy())
    assert read.positions is not None and read.documents is not None
    starts = [at for at, position in enumerate(read.positions[0].tolist()) if position == 0] + [CONTEXT]
    return [
        (torch.tensor(read.tokens[0, first:last]), torch.tensor(read.targets[0, first:last]))
        for first, last in list(pairwise(starts))[: read.documents[0]]
    ]


def logp(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    counted = targets != IGNORED
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    each = F.log_softmax(logits, dim=-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return (each * counted).sum(), int(counted.sum())


def pair_loss(section: Any, policy: list[Tensor], reference: list[Tensor], counts: list[int]) -> Tensor:
    (chosen, rejected), beta = policy, section.scale
    mean_chosen, mean_rejected = chosen / counts[0], rejected / counts[1]
    margin = (chosen - reference[0]) - (rejected - reference[1])
    if section.loss == "dpo":
        smooth = section.label_smoothing
        loss = -(1 - smooth) * F.logsigmoid(beta * margin) - smooth * F.logsigmoid(-beta * margin)
    elif section.loss == "ipo":
        loss = ((chosen - reference[0]) / counts[0] - (rejected - reference[1]) / counts[1] - 1 / (2 * beta)) ** 2
    elif section.loss == "simpo":
        loss = -F.logsigmoid(beta * (mean_chosen - mean_rejected) - section.gamma)
    else:
        odds = [torch.log(mean.exp() / (1 - mean.exp())) for mean in (mean_chosen, mean_rejected)]
        return -mean_chosen - beta * F.logsigmoid(odds[0] - odds[1])
    return loss - section.sft_weight * mean_chosen


def answer_loss(section: Any, ratio: Tensor, z: Tensor, desirable: bool) -> Tensor:
    above = section.scale * (ratio - z)
    if desirable:
        return section.desirable_weight * (1 - torch.sigmoid(above))
    return section.undesirable_weight * (1 - torch.sigmoid(-above))


def train_plainly(job: Job) -> tuple[list[float], float]:
    from transformers import AutoModelForCausalLM

    section, train = job.model, job.train
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(section.source, **options)
    start = AutoModelForCausalLM.from_pretrained(section.source, **options).requires_grad_(False)
    if train.lora:
        model.requires_grad_(False)
        for path, module in list(model.named_modules()):
            parent, _, last = path.rpartition(".")
            if isinstance(module, nn.Linear) and last in train.lora.targets:
                scale, rank = train.lora.alpha / train.lora.rank, train.lora.rank
                setattr(model.get_submodule(parent), last, Peft(module, scale, rank, path, section, train.seed))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    undecayed = [p for name, p in named if "embed_tokens" in name or name.endswith("norm.weight")]
    others = [p for _, p in named if not any(p is other for other in undecayed)]
    groups = [{"params": others, "weight_decay": train.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    known: dict[bytes, Tensor] = {}

    @torch.no_grad()
    def reference(tokens: Tensor, targets: Tensor) -> Tensor:
        key = tokens.numpy().tobytes()
        if key not in known:
            known[key] = logp(start, tokens, targets)[0]
        return known[key]

    def mean_answer_loss(rows: Rows, mismatched: Rows, indices: list[int]) -> Tensor:
        def ratios(rows: Rows) -> list[Tensor]:
            found = [document for index in indices for document in documents(rows, index)]
            return [logp(model, *document)[0] - reference(*document) for document in found]

        with torch.no_grad():
            z = torch.stack(ratios(mismatched)).mean().clamp(min=0)
        labels = rows.read(torch.tensor(indices).numpy()).labels
        assert labels is not None
        flat = [label for row in labels for label in row]
        losses = [answer_loss(train.preference, ratio, z, label) for ratio, label in zip(ratios(rows), flat, strict=True)]
        return torch.stack(losses).mean()

    def mean_loss(split: Any, indices: list[int]) -> Tensor:
        rows = Rows(job.tokens, split)
        assert train.preference
        if train.preference.loss == "kto":
            return mean_answer_loss(rows, MismatchedRows(job.tokens, split), indices)
        losses = []
        for index in indices:
            found = documents(rows, index)
            for pair in zip(found[0::2], found[1::2], strict=True):
                policy = [logp(model, *document) for document in pair]
                before = [reference(*document) for document in pair]
                losses.append(pair_loss(train.preference, [p for p, _ in policy], before, [n for _, n in policy]))
        return torch.stack(losses).mean()

    rows, validation = Rows(job.tokens, "train"), Rows(job.tokens, "validation")
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = scheduled_rate(step, train)
        loss = mean_loss("train", scheduled_windows(step, train.batch, len(rows), train.seed))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for _, p in named], train.clip)
        optimizer.step()
    with torch.no_grad():
        return losses, mean_loss("validation", validation.evenly(train.eval_sequences).tolist()).item()
