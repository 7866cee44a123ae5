"""A decoder: Llama, and the families that differ from it by the switches of `model.architecture`.

Parameters have Hugging Face's names, so an export is nearly a copy. The model is independent of devices, precision and
parallelism: the engine wraps it. `ops` has everything but the matrix products. Shapes in names: b batch, t tokens, d hidden,
h heads, k key/value heads, v vocabulary; `e` is the width of one head, or half of it in rotary tables. In `MoE`, which has no
heads, n is all tokens of the batch, e experts and k experts per token.
"""

import hashlib
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.platform.recipe import Kernels, LoraSection, ModelSection
from strata.training.model import lora
from strata.training.model import ops as makers
from strata.training.model.adapters import adapt
from strata.training.model.attention import Attention
from strata.training.model.feed_forward import feed_forward
from strata.training.model.norms import norm
from strata.training.model.ops import Ops
from strata.training.model.rope import Positions, positions
from strata.training.targets import IGNORED


class Layer(nn.Module):
    """Attention and feed-forward block, each added to the residual stream, with norms before them, after them, or both."""

    def __init__(self, section: ModelSection, ops: Ops, layer: int) -> None:
        super().__init__()
        norms = section.architecture.norms
        self.norms = norms
        if norms != "post":
            self.input_layernorm = norm(section, section.hidden, ops)
        self.self_attn = Attention(section, ops, layer)
        self.post_attention_layernorm = norm(section, section.hidden, ops)
        if norms == "both":
            self.pre_feedforward_layernorm = norm(section, section.hidden, ops)
        if norms != "pre":
            self.post_feedforward_layernorm = norm(section, section.hidden, ops)
        self.mlp = feed_forward(section, layer, ops)

    def forward(self, x_btd: Tensor, at: Positions) -> Tensor:
        if self.norms == "pre":
            x_btd = x_btd + self.self_attn(self.input_layernorm(x_btd), at)
            y_btd: Tensor = x_btd + self.mlp(self.post_attention_layernorm(x_btd))
            return y_btd
        before = self.norms == "both"
        attended = self.self_attn(self.input_layernorm(x_btd) if before else x_btd, at)
        x_btd = x_btd + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x_btd) if before else x_btd)
        y_btd = x_btd + self.post_feedforward_layernorm(fed)
        return y_btd


class Embedding(nn.Embedding):
    """Input embedding, which some families scale."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__(section.vocab, section.hidden)
        self.scale = section.architecture.embedding_scale

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd = super().forward(tokens_bt)
        return x_btd if self.scale is None else x_btd * torch.tensor(self.scale, dtype=x_btd.dtype, device=x_btd.device)


class Decoder(nn.Module):
    def __init__(self, section: ModelSection, ops: Ops) -> None:
        super().__init__()
        self.section = section
        self.embed_tokens = Embedding(section)
        self.layers = nn.ModuleList(Layer(section, ops, layer) for layer in range(section.layers))
        self.norm = norm(section, section.hidden, ops)

    def forward(self, tokens_bt: Tensor, positions_t: Tensor | None = None, bounds: Tensor | None = None) -> Tensor:
        x_btd = self.embed_tokens(tokens_bt)
        if positions_t is None:
            positions_t = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        at = positions(self.section, positions_t, bounds)
        for layer in self.layers:
            x_btd = layer(x_btd, at)
        y_btd: Tensor = self.norm(x_btd)
        return y_btd


class Objective(Protocol):
    """Loss other than that of the next token, from the output layer's input and matrix and further tensors of the batch."""

    def loss(
        self,
        x_btd: Tensor,
        weight_vd: Tensor,
        targets_bt: Tensor,
        count: float | Tensor,
        softcap: float | None,
        *more: Tensor,
    ) -> Tensor: ...


class Head(nn.Linear):
    """Output layer: logits or, with targets, the sum of their losses over `count`, or that of an objective.

    The loss is computed in a module because an engine that shards parameters gathers them when a module is called.
    """

    def __init__(self, section: ModelSection, ops: Ops) -> None:
        super().__init__(section.hidden, section.vocab, bias=False)
        self.softcap = section.architecture.logit_softcap
        self.ops = ops
        self.objective: Objective | None = None

    def forward(
        self,
        x_btd: Tensor,
        targets_bt: Tensor | None = None,
        count: float | Tensor | None = None,
        *more: Tensor,
    ) -> Tensor:
        if targets_bt is None:
            return bounded(super().forward(x_btd), self.softcap)
        if self.objective is not None and more and count is not None:
            return self.objective.loss(x_btd, self.weight, targets_bt, count, self.softcap, *more)
        return mean_loss(self.ops, x_btd, self.weight, targets_bt, count, self.softcap)


class Llama(nn.Module):
    """Decoder with its output layer. Returns logits or, with targets, their mean loss.

    `positions_t` are the positions of the tokens in their sequence, for a worker that has only a part of it, or [b, t] with a
    restart at each packed document. `count` replaces the number of targets in the mean's denominator. `bounds` are those of the
    documents, which a worker with parts of rows cannot derive. `more` are the tensors of an objective (`Batch.loss_inputs`).
    `last_b` has the index of one token of each row, to return its logits [b, v] alone.
    Without a seed, weights are left as allocated, for a load.
    """

    def __init__(
        self, section: ModelSection, seed: int | None = 0, kernels: Kernels = "strata", adapters: LoraSection | None = None
    ) -> None:
        super().__init__()
        ops = makers.by(kernels)
        self.model = Decoder(section, ops)
        self.lm_head = Head(section, ops)
        self.tie(section)
        if adapters:
            adapt(self, adapters)
        if seed is not None:
            for name, weight in self.named_parameters():
                initialize(lora.without_base(name), weight, section, seed)

    def tie(self, section: ModelSection) -> None:
        if section.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        tokens_bt: Tensor,
        positions_t: Tensor | None = None,
        targets_bt: Tensor | None = None,
        count: float | Tensor | None = None,
        bounds: Tensor | None = None,
        *more: Tensor,
        last_b: Tensor | None = None,
    ) -> Tensor:
        x_btd = self.model(tokens_bt, positions_t, bounds)
        if last_b is not None:
            x_btd = x_btd[torch.arange(len(last_b), device=x_btd.device), last_b]
        result: Tensor = self.lm_head(x_btd, targets_bt, count, *more)
        return result


def bounded(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def mean_loss(
    ops: Ops,
    x_btd: Tensor,
    weight_vd: Tensor,
    targets_bt: Tensor,
    count: float | Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Sum of the losses in nats, over `count` or the number of tokens. Ignored targets add no loss."""
    x_nd, targets_n = x_btd.flatten(0, 1), targets_bt.flatten()
    if softcap is None:
        total = ops.loss_sum(x_nd, weight_vd, targets_n)
    else:
        logits_nv = bounded(F.linear(x_nd, weight_vd).float(), softcap)
        total = F.cross_entropy(logits_nv, targets_n, ignore_index=IGNORED, reduction="sum")
    return total / (targets_bt.numel() if count is None else count)


@torch.no_grad()
def initialize(name: str, weight: Tensor, section: ModelSection, seed: int) -> None:
    """Initializes a parameter from its own generator, seeded by its name in the full model.

    So the values do not depend on how many of the parameters a worker builds, or in which order. A layer's output is as large as
    its input (variance 1 / fan-in), except where it is added to the residual stream, which sums 2 x layers outputs. Embeddings
    start with variance 1, so that these outputs do not drown them. GPT-2's fixed 0.02 suits widths near 1000 and is far too small
    for a narrow model. It is used for the logits of tokens and of experts, which should be nearly uniform at the start.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    if lora.is_adapter(name):
        lora.initialize(name, weight, generator)
        return
    if name.endswith("norm.weight"):
        weight.fill_(0.0 if section.architecture.norm_offset else 1.0)
        return
    if weight.dim() < 2:  # biases and sinks
        weight.zero_()
        return
    if name.endswith("embed_tokens.weight") and not section.tie_embeddings:
        std = 1.0
    elif name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "shared_expert_gate.weight")):
        std = 0.02
    else:
        std = weight.shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= (2 * section.layers) ** 0.5
    weight.normal_(std=std, generator=generator)


def token_losses(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Loss of each token in nats, in fp32 for any precision of the model."""
    losses = F.cross_entropy(logits_btv.flatten(0, 1).float(), targets_bt.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets_bt)
