"""Reference training for every layout: one process, plain torch, no DeepSpeed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from strata.platform.recipe import Recipe
from strata.training.checkpoint import format
from strata.training.checkpoint.storage import folder
from strata.training.data.sampler import step_indices
from strata.training.data.windows import Windows
from strata.training.model.balance import sequence_balance
from strata.training.model.llama import Llama, token_losses
from strata.training.parallel.optimizer_state import KINDS, Fragment
from strata.training.parallel.shard_map import Shard
from strata.training.schedule import learning_rate


@dataclass(frozen=True)
class Reference:
    losses: list[float]
    before: dict[str, Tensor]  # the weights
    after: dict[str, Tensor]


def train_plainly(recipe: Recipe, tokens: Path, steps: int, more: int, save: Path) -> Reference:
    """Trains for `steps` + `more` steps. `after` and the checkpoint in `save` are the state after `steps`."""
    section, train = recipe.model, recipe.train
    torch.set_float32_matmul_precision(train.matmul)
    windows = Windows(tokens, "train", section.context)
    model = Llama(section, train.seed)
    tables = [p for name, p in model.named_parameters() if "embed_tokens" in name or "lm_head" in name]
    norms = [p for name, p in model.named_parameters() if p.dim() < 2]
    others = [p for p in model.parameters() if not any(p is q for q in tables + norms)]
    optimizer = torch.optim.AdamW(
        [
            {"params": others, "weight_decay": train.weight_decay, "ratio": 1.0},
            {"params": tables, "weight_decay": 0.0, "ratio": train.embedding_lr_ratio},
            {"params": norms, "weight_decay": 0.0, "ratio": 1.0},
        ],
        betas=(0.9, 0.95),
    )
    logits_of_routers: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, logits: logits_of_routers.append(logits))

    losses = []
    before, after = weights_of(model), {}
    for step in range(steps + more):
        if step == steps:
            after = weights_of(model)
            origin = format.Origin(section.model_dump(), tokens.name, train.batch, train.seed)
            format.write(folder(save), 0, 1, steps, origin, None, list(_fragments(model, optimizer)))
        for group in optimizer.param_groups:
            rate = learning_rate(step, train.steps, train.lr, train.warmup, train.min_lr_ratio)
            group["lr"] = rate * group["ratio"]
        indices = step_indices(step, train.batch, 0, 1, len(windows), train.seed)
        batch_bt = torch.from_numpy(windows.read(indices))
        logits_of_routers.clear()
        loss = token_losses(model(batch_bt[:, :-1]), batch_bt[:, 1:]).mean()
        losses.append(loss.item())
        if section.moe:
            balances = [sequence_balance(logits, section.moe.top_k) for logits in logits_of_routers]
            loss = loss + section.moe.balance * torch.stack(balances).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        optimizer.step()
    return Reference(losses, before, after)


def weights_of(model: Llama) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def _fragments(model: Llama, optimizer: torch.optim.Optimizer) -> Iterator[Fragment]:
    for name, weight in model.named_parameters():
        for kind in KINDS:
            values = weight.detach() if kind == "weight" else optimizer.state[weight][kind]
            yield Fragment(Shard(name, tuple(weight.shape), None, 0), kind, 0, values.flatten())
