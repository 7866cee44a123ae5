"""A model's shape: all that its costs depend on, and how many parameters it has where."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward block, in every layer but the first `dense_layers`."""

    count: int
    top_k: int
    ffn: int  # width of one expert
    shared_ffn: int = 0  # width of what every token passes through beside its experts
    dense_layers: int = 0


@dataclass(frozen=True)
class Latent:
    """DeepSeek's multi-head latent attention: queries and keys/values go through narrow projections, which alone are cached."""

    query_rank: int
    kv_rank: int
    plain_dim: int  # of a head's queries and keys, without position
    rotary_dim: int  # with position; the keys' is shared by all heads
    value_dim: int


@dataclass(frozen=True)
class Shape:
    """A decoder. `ffn` is the width of a dense layer's feed-forward block; `gated` says it has a third matrix (SwiGLU)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    gated: bool = True
    tied: bool = False
    biases: bool = False  # in every matrix, and in norms, as GPT has them
    query_biases: bool = False  # in queries, keys and values only, as Qwen2 has them
    positions: bool = False  # a learned embedding of positions, `context` long
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def dense_layers(self) -> int:
        return self.experts.dense_layers if self.experts else self.layers

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers

    def attention_parameters(self) -> int:
        """Of one layer, with its norms."""
        h = self.hidden
        if self.latent:
            m = self.latent
            width = m.plain_dim + m.rotary_dim
            down = h * m.query_rank + m.query_rank  # with its norm
            query = down + m.query_rank * self.heads * width if m.query_rank else h * self.heads * width
            kv = h * (m.kv_rank + m.rotary_dim) + m.kv_rank + m.kv_rank * self.heads * (m.plain_dim + m.value_dim)
            return query + kv + self.heads * m.value_dim * h + 2 * h
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (q + 2 * kv) * (self.biases or self.query_biases) + h * self.biases
        norms = 2 * h * (2 if self.biases else 1)
        return h * (q + 2 * kv) + q * h + biases + norms

    def ffn_parameters(self, width: int) -> int:
        """Of one feed-forward block (or expert) of this width."""
        return (3 if self.gated else 2) * self.hidden * width + (self.hidden + width) * self.biases

    def dense_ffn_parameters(self) -> int:
        return self.ffn_parameters(self.ffn)

    def router_parameters(self) -> int:
        return self.hidden * self.experts.count if self.experts else 0

    def expert_parameters(self) -> int:
        """Of one expert."""
        return self.ffn_parameters(self.experts.ffn) if self.experts else 0

    def shared_parameters(self) -> int:
        """Of a sparse layer's block that every token passes through."""
        return self.ffn_parameters(self.experts.shared_ffn) if self.experts and self.experts.shared_ffn else 0

    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden + self.context * self.hidden * self.positions

    def head_parameters(self) -> int:
        """Of the output matrix and the last norm; a tied matrix is the embedding's."""
        return (0 if self.tied else self.vocab * self.hidden) + self.hidden * (2 if self.biases else 1)

    def parameters(self) -> int:
        return self._parameters(self.experts.count if self.experts else 0)

    def active_parameters(self) -> int:
        """Those that one token passes through."""
        return self._parameters(self.experts.top_k if self.experts else 0)

    def _parameters(self, experts: int) -> int:
        sparse = self.router_parameters() + experts * self.expert_parameters() + self.shared_parameters()
        return (
            self.layers * self.attention_parameters()
            + self.dense_layers * self.dense_ffn_parameters()
            + self.sparse_layers * sparse
            + self.embedding_parameters()
            + self.head_parameters()
        )
