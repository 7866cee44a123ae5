"""Feed-forward blocks: a gated block, and a mixture of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.platform.recipe import ModelSection, MoESection
from strata.training.model.ops import Ops
from strata.training.model.projections import Projecting, projected

CLAMP_LIMIT, CLAMP_SLOPE = 7.0, 1.702  # gpt-oss's, which its configuration does not change


class GatedBlock(Projecting):
    """Activation of one projection times another: SwiGLU, or Gemma's GeGLU, or gpt-oss's bounded one."""

    def __init__(self, hidden: int, ffn: int, section: ModelSection, ops: Ops, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=bias)
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)
        self.activation = section.architecture.activation
        self.ops = ops

    def forward(self, x_btd: Tensor) -> Tensor:
        gate, up = projected(self, x_btd, self.gate_proj, self.up_proj)
        y_btd: Tensor = self.down_proj(self._gated(gate, up))
        return y_btd

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.activation == "silu":
            return self.ops.swiglu(gate, up)
        if self.activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return (up + 1) * gate * torch.sigmoid(CLAMP_SLOPE * gate)


class MoE(nn.Module):
    """Mixture of experts with Mixtral's routing; with a shared expert, Qwen2-MoE's block.

    Experts have no capacity limit and no token is dropped, so a token's output does not depend on the rest of its batch. Every
    expert runs, even on no tokens: its gradient is then zero instead of missing, and data-parallel workers reduce the same
    gradients. Tokens are restored by a permutation instead of an indexed addition, whose order varies on a GPU.
    """

    def __init__(self, section: ModelSection, moe: MoESection, ops: Ops) -> None:
        super().__init__()
        hidden = section.hidden
        self.top_k, self.normalize = moe.top_k, moe.normalize
        self.gate = nn.Linear(hidden, moe.experts, bias=moe.bias)
        self.experts = nn.ModuleList(GatedBlock(hidden, section.ffn, section, ops, moe.bias) for _ in range(moe.experts))
        self.shared_expert = GatedBlock(hidden, moe.shared_ffn, section, ops) if moe.shared_ffn else None
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if moe.shared_ffn else None

    def forward(self, x_btd: Tensor) -> Tensor:
        scores_ne = F.softmax(self.gate(x_btd).flatten(0, 1).float(), dim=-1)
        weights_nk, chosen_nk = scores_ne.topk(self.top_k, dim=-1)
        if self.normalize:
            weights_nk = weights_nk / weights_nk.sum(-1, keepdim=True)

        by_expert = chosen_nk.flatten().argsort(stable=True)  # of the n x k assignments
        sizes = chosen_nk.flatten().bincount(minlength=len(self.experts)).tolist()
        inputs = torch.split(x_btd.flatten(0, 1)[by_expert // self.top_k], sizes)
        outputs = torch.cat([expert(x) for expert, x in zip(self.experts, inputs, strict=True)])
        outputs_nkd = torch.empty_like(outputs).index_copy(0, by_expert, outputs).view(*chosen_nk.shape, -1)

        y_btd: Tensor = (outputs_nkd * weights_nk.unsqueeze(-1)).sum(1).to(x_btd.dtype).view_as(x_btd)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y_btd = y_btd + torch.sigmoid(self.shared_expert_gate(x_btd)) * self.shared_expert(x_btd)
        return y_btd


def feed_forward(section: ModelSection, layer: int, ops: Ops) -> nn.Module:
    moe = section.moe
    if moe is None:
        return GatedBlock(section.hidden, section.ffn, section, ops)
    if layer in moe.dense_layers:
        return GatedBlock(section.hidden, moe.dense_ffn, section, ops)
    return MoE(section, moe, ops)
