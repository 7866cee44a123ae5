"""A Llama in plain torch, with Hugging Face's parameter names, so that an export is a copy.

It knows nothing of devices, precision or parallelism: the engine wraps it. Shapes in names: b batch, t tokens, d hidden,
h heads, k key/value heads, v vocabulary; `e` is the width of one head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.platform.recipe import ModelSection


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()  # the mean of squares loses too much in bf16
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary_table(tokens: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Computed per forward pass instead of kept as a buffer: an engine that casts a model to bf16 would cast the angles too."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles_te = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles_te.cos(), angles_te.sin()


def rotate(x_bhte: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
    """Hugging Face's convention: a dimension is paired with the one half a head away, not with its neighbour."""
    first, second = x_bhte.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_bhte * cos_te + turned * sin_te).to(x_bhte.dtype)


class Attention(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.head_dim = section.head_dim
        kv_width = section.kv_heads * self.head_dim
        self.q_proj = nn.Linear(section.hidden, section.hidden, bias=False)
        self.k_proj = nn.Linear(section.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(section.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(section.hidden, section.hidden, bias=False)

    def forward(self, x_btd: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
        q_bhte = rotate(self._heads(self.q_proj(x_btd)), cos_te, sin_te)
        k_bkte = rotate(self._heads(self.k_proj(x_btd)), cos_te, sin_te)
        v_bkte = self._heads(self.v_proj(x_btd))
        y_bhte = F.scaled_dot_product_attention(q_bhte, k_bkte, v_bkte, is_causal=True, enable_gqa=True)
        y_btd: Tensor = self.o_proj(y_bhte.transpose(1, 2).flatten(2))
        return y_btd

    def _heads(self, x_btd: Tensor) -> Tensor:
        batch, tokens, width = x_btd.shape
        return x_btd.view(batch, tokens, width // self.head_dim, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(section.hidden, section.ffn, bias=False)
        self.up_proj = nn.Linear(section.hidden, section.ffn, bias=False)
        self.down_proj = nn.Linear(section.ffn, section.hidden, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        y_btd: Tensor = self.down_proj(F.silu(self.gate_proj(x_btd)) * self.up_proj(x_btd))
        return y_btd


class Layer(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(section.hidden, section.norm_eps)
        self.self_attn = Attention(section)
        self.post_attention_layernorm = RMSNorm(section.hidden, section.norm_eps)
        self.mlp = SwiGLU(section)

    def forward(self, x_btd: Tensor, cos_te: Tensor, sin_te: Tensor) -> Tensor:
        x_btd = x_btd + self.self_attn(self.input_layernorm(x_btd), cos_te, sin_te)
        y_btd: Tensor = x_btd + self.mlp(self.post_attention_layernorm(x_btd))
        return y_btd


class Decoder(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(section.vocab, section.hidden)
        self.layers = nn.ModuleList(Layer(section) for _ in range(section.layers))
        self.norm = RMSNorm(section.hidden, section.norm_eps)
        self.head_dim = section.head_dim
        self.rope_theta = section.rope_theta

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd = self.embed_tokens(tokens_bt)
        cos_te, sin_te = rotary_table(tokens_bt.shape[1], self.head_dim, self.rope_theta, tokens_bt.device)
        for layer in self.layers:
            x_btd = layer(x_btd, cos_te, sin_te)
        y_btd: Tensor = self.norm(x_btd)
        return y_btd


class Llama(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.model = Decoder(section)
        self.lm_head = nn.Linear(section.hidden, section.vocab, bias=False)
        if section.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._initialize(section.layers)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        logits_btv: Tensor = self.lm_head(self.model(tokens_bt))
        return logits_btv

    def _initialize(self, layers: int) -> None:
        """A layer's output is as large as its input (variance 1 / fan-in), except where it is added to the residual stream,
        which sums 2 x layers of them. GPT-2's fixed 0.02 suits widths near 1000 and is far too small for a narrow model."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = 0.02 if "embed" in name or "lm_head" in name else weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * layers) ** 0.5
            nn.init.normal_(weight, std=std)


def token_losses(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Nats for each token, in fp32 whatever the model computes in."""
    losses = F.cross_entropy(logits_btv.flatten(0, 1).float(), targets_bt.flatten(), reduction="none")
    return losses.view_as(targets_bt)


def count_parameters(section: ModelSection) -> int:
    """Without building the model, which for a large one would take the memory that is being asked about."""
    embedding = section.vocab * section.hidden
    attention = 2 * section.hidden**2 + 2 * section.hidden * section.kv_heads * section.head_dim
    layer = attention + 3 * section.hidden * section.ffn + 2 * section.hidden
    return embedding * (1 if section.tie_embeddings else 2) + section.layers * layer + section.hidden
