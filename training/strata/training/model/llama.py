"""A Llama, dense or with a mixture of experts, under Hugging Face's parameter names, so that an export is a copy.

The model is independent of devices, precision and parallelism: the engine wraps it. `ops` has everything but the matrix products.
Shapes in names: b batch, t tokens, d hidden, h heads, k key/value heads, v vocabulary; `e` is the width of one head, or half of
it in rotary tables. In `MoE`, which has no heads, n is all tokens of the batch, e experts and k experts per token.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.platform.recipe import Kernels, ModelSection, MoESection
from strata.training.model import ops as makers
from strata.training.model.ops import IGNORED, Ops


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


def rotary_table(positions_t: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Rotary angles, computed per forward pass: an engine that casts a model to bf16 would cast a stored buffer too."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=positions_t.device, dtype=torch.float32) / head_dim)
    angles_te = torch.outer(positions_t.float(), frequencies)
    return angles_te.cos(), angles_te.sin()


class CausalAttention(nn.Module):
    """Attention as a module without weights, which a sequence-parallel layout can replace."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, q_bthe: Tensor, k_btke: Tensor, v_btke: Tensor) -> Tensor:
        return self.ops.attention(q_bthe, k_btke, v_btke)


class Attention(nn.Module):
    def __init__(self, section: ModelSection, ops: Ops) -> None:
        super().__init__()
        self.head_dim = section.head_dim
        self.ops = ops
        kv_width = section.kv_heads * self.head_dim
        self.q_proj = nn.Linear(section.hidden, section.hidden, bias=False)
        self.k_proj = nn.Linear(section.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(section.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(section.hidden, section.hidden, bias=False)
        self.core: nn.Module = CausalAttention(ops)

    def forward(self, x_btd: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
        q_bthe, k_btke, v_btke = (self._heads(project(x_btd)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q_bthe, k_btke = self.ops.rope(q_bthe, k_btke, cos_te, sin_te)
        y_bthe = self.core(q_bthe, k_btke, v_btke)
        y_btd: Tensor = self.o_proj(y_bthe.flatten(2))
        return y_btd

    def _heads(self, x_btd: Tensor) -> Tensor:
        batch, tokens, width = x_btd.shape
        return x_btd.view(batch, tokens, width // self.head_dim, self.head_dim)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, ffn: int, ops: Ops) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)
        self.ops = ops

    def forward(self, x_btd: Tensor) -> Tensor:
        y_btd: Tensor = self.down_proj(self.ops.swiglu(self.gate_proj(x_btd), self.up_proj(x_btd)))
        return y_btd


class MoE(nn.Module):
    """Mixture of experts with Mixtral's routing; with a shared expert, Qwen2-MoE's block.

    Experts have no capacity limit and no token is dropped, so a token's output does not depend on the rest of its batch. Every
    expert runs, even on no tokens: its gradient is then zero instead of missing, and data-parallel workers reduce the same
    gradients. Tokens are restored by a permutation instead of an indexed addition, whose order varies on a GPU.
    """

    def __init__(self, hidden: int, ffn: int, moe: MoESection, ops: Ops) -> None:
        super().__init__()
        self.top_k = moe.top_k
        self.gate = nn.Linear(hidden, moe.experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(hidden, ffn, ops) for _ in range(moe.experts))
        self.shared_expert = SwiGLU(hidden, moe.shared_ffn, ops) if moe.shared_ffn else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if moe.shared_ffn else None

    def forward(self, x_btd: Tensor) -> Tensor:
        scores_ne = F.softmax(self.gate(x_btd).flatten(0, 1).float(), dim=-1)
        scores_nk, chosen_nk = scores_ne.topk(self.top_k, dim=-1)
        weights_nk = scores_nk / scores_nk.sum(-1, keepdim=True)

        by_expert = chosen_nk.flatten().argsort(stable=True)  # of the n x k assignments
        sizes = chosen_nk.flatten().bincount(minlength=len(self.experts)).tolist()
        inputs = torch.split(x_btd.flatten(0, 1)[by_expert // self.top_k], sizes)
        outputs = torch.cat([expert(x) for expert, x in zip(self.experts, inputs, strict=True)])
        outputs_nkd = torch.empty_like(outputs).index_copy(0, by_expert, outputs).view(*chosen_nk.shape, -1)

        y_btd: Tensor = (outputs_nkd * weights_nk.unsqueeze(-1)).sum(1).to(x_btd.dtype).view_as(x_btd)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y_btd = y_btd + torch.sigmoid(self.shared_expert_gate(x_btd)) * self.shared_expert(x_btd)
        return y_btd


class Layer(nn.Module):
    def __init__(self, section: ModelSection, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(section.hidden, section.norm_eps, ops)
        self.self_attn = Attention(section, ops)
        self.post_attention_layernorm = RMSNorm(section.hidden, section.norm_eps, ops)
        feed_forward = (section.hidden, section.ffn)
        self.mlp = MoE(*feed_forward, section.moe, ops) if section.moe else SwiGLU(*feed_forward, ops)

    def forward(self, x_btd: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
        x_btd = x_btd + self.self_attn(self.input_layernorm(x_btd), cos_te, sin_te)
        y_btd: Tensor = x_btd + self.mlp(self.post_attention_layernorm(x_btd))
        return y_btd


class Decoder(nn.Module):
    def __init__(self, section: ModelSection, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(section.vocab, section.hidden)
        self.layers = nn.ModuleList(Layer(section, ops) for _ in range(section.layers))
        self.norm = RMSNorm(section.hidden, section.norm_eps, ops)
        self.head_dim = section.head_dim
        self.rope_theta = section.rope_theta

    def forward(self, tokens_bt: Tensor, positions_t: Tensor | None = None) -> Tensor:
        x_btd = self.embed_tokens(tokens_bt)
        if positions_t is None:
            positions_t = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        cos_te, sin_te = rotary_table(positions_t, self.head_dim, self.rope_theta)
        for layer in self.layers:
            x_btd = layer(x_btd, cos_te, sin_te)
        y_btd: Tensor = self.norm(x_btd)
        return y_btd


class Head(nn.Linear):
    """Output layer: logits or, with targets, their mean loss.

    The loss is computed in a module because an engine that shards parameters gathers them when a module is called.
    """

    def __init__(self, hidden: int, vocab: int, ops: Ops) -> None:
        super().__init__(hidden, vocab, bias=False)
        self.ops = ops

    def forward(self, x_btd: Tensor, targets_bt: Tensor | None = None) -> Tensor:
        return super().forward(x_btd) if targets_bt is None else mean_loss(self.ops, x_btd, self.weight, targets_bt)


class Llama(nn.Module):
    """Llama decoder. Returns logits or, with targets, the mean loss.

    `positions_t` are the positions of the tokens in their sequence, for a worker that has only a part of it.
    """

    def __init__(self, section: ModelSection, seed: int = 0, kernels: Kernels = "strata") -> None:
        super().__init__()
        ops = makers.by(kernels)
        self.model = Decoder(section, ops)
        self.lm_head = Head(section.hidden, section.vocab, ops)
        if section.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, weight in self.named_parameters():
            initialize(name, weight, section, seed)

    def forward(self, tokens_bt: Tensor, positions_t: Tensor | None = None, targets_bt: Tensor | None = None) -> Tensor:
        result: Tensor = self.lm_head(self.model(tokens_bt, positions_t), targets_bt)
        return result


def mean_loss(ops: Ops, x_btd: Tensor, weight_vd: Tensor, targets_bt: Tensor) -> Tensor:
    """Mean loss in nats per token.

    Ignored targets add no loss but stay in the denominator; callers that ignore targets must rescale.
    """
    return ops.loss_sum(x_btd.flatten(0, 1), weight_vd, targets_bt.flatten()) / targets_bt.numel()


@torch.no_grad()
def initialize(name: str, weight: Tensor, section: ModelSection, seed: int) -> None:
    """Initializes a parameter from its own generator, seeded by its name in the full model.

    So the values do not depend on how many of the parameters a worker builds, or in which order. A layer's output is as large as
    its input (variance 1 / fan-in), except where it is added to the residual stream, which sums 2 x layers outputs. Embeddings
    start with variance 1, so that these outputs do not drown them. GPT-2's fixed 0.02 suits widths near 1000 and is far too small
    for a narrow model. It is used for the logits of tokens and of experts, which should be nearly uniform at the start.
    """
    if weight.dim() < 2:
        return  # a norm, which starts at one
    if name.endswith("embed_tokens.weight") and not section.tie_embeddings:
        std = 1.0
    elif name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "shared_expert_gate.weight")):
        std = 0.02
    else:
        std = weight.shape[1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= (2 * section.layers) ** 0.5
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    weight.normal_(std=std, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little")))


def token_losses(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Loss of each token in nats, in fp32 for any precision of the model."""
    losses = F.cross_entropy(logits_btv.flatten(0, 1).float(), targets_bt.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets_bt)
