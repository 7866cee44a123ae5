"""Reference training for every layout: one process, plain torch, no DeepSpeed.

Of Strata it uses the model and the checkpoint format. Schedule, data order, optimizer groups, balance loss and clipping are plain
code of their own, so an error in any of them makes the layouts differ from the reference.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.platform.recipe import Recipe
from strata.training.checkpoint import format
from strata.training.checkpoint.storage import folder
from strata.training.model.llama import Llama
from strata.training.parallel.optimizer_state import KINDS, Fragment
from strata.training.parallel.shard_map import Shard

from ..plain import all_windows, balance_loss, scheduled_rate, scheduled_windows


@dataclass(frozen=True)
class Reference:
    losses: list[float]
    before: dict[str, Tensor]  # the weights
    after: dict[str, Tensor]


def train_plainly(
    recipe: Recipe, tokens: Path, steps: int, more: int, save: Path, teacher: Callable[[Tensor], Tensor] | None = None
) -> Reference:
    """Trains for `steps` + `more` steps. `after` and the checkpoint in `save` are the state after `steps`. The targets are the
    probabilities that a teacher gives for tokens [b, t], or the text's next tokens."""
    section, train = recipe.model, recipe.train
    torch.set_float32_matmul_precision(train.matmul)
    windows = all_windows(tokens, "train", section.context)
    model = Llama(section, train.seed, kernels="torch")
    named = dict(model.named_parameters())
    tables = [p for name, p in named.items() if "embed_tokens" in name or "lm_head" in name]
    norms = [p for name, p in named.items() if "norm" in name]
    others = [p for name, p in named.items() if not any(word in name for word in ("embed_tokens", "lm_head", "norm"))]
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
            rate = scheduled_rate(step, train)
            group["lr"] = rate * group["ratio"]
        batch_bt = torch.tensor([windows[at] for at in scheduled_windows(step, train.batch, len(windows), train.seed)])
        logits_of_routers.clear()
        targets = batch_bt[:, 1:] if teacher is None else teacher(batch_bt[:, :-1])
        loss = F.cross_entropy(model(batch_bt[:, :-1]).flatten(0, 1), targets.flatten(0, 1))
        losses.append(loss.item())
        if section.moe:
            balances = [balance_loss(logits, section.moe.top_k) for logits in logits_of_routers]
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
