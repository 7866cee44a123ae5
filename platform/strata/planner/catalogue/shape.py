"""Shape of a model: the sizes that its costs depend on, and its parameter counts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward block, in every layer but the first `dense_layers`."""

    count: int
    top_k: int
    ffn: int  # width of one expert
    shared_ffn: int = 0  # width of the shared expert, which every token passes through
    dense_layers: int = 0
    shared_gate: bool = False  # whether a gate scales the shared expert's output, as in Qwen2-MoE and `strata train`


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
    """A decoder. `ffn` is the width of a dense layer's feed-forward block; a `gated` block has a third matrix (SwiGLU)."""

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
    biases: bool = False  # in every matrix, and in norms, as in GPT
    query_biases: bool = False  # in queries, keys and values only, as in Qwen2
    positions: bool = False  # a learned embedding of positions, `context` long
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def dense_layers(self) -> int:
        return self.experts.dense_layers if self.experts else self.layers

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers

    def narrow_parameters(self) -> int:
        """Down projections of one layer's latent attention."""
        m = self.latent
        return self.hidden * (m.query_rank + m.kv_rank + m.rotary_dim) if m else 0

    def attention_matrices(self) -> int:
        """Parameters of one layer's attention matrices, without biases and norms."""
        h = self.hidden
        if self.latent:
            m = self.latent
            queries = self.heads * (m.plain_dim + m.rotary_dim)
            up = (m.query_rank or h) * queries + m.kv_rank * self.heads * (m.plain_dim + m.value_dim)
            return self.narrow_parameters() + up + self.heads * m.value_dim * h
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return h * (q + 2 * kv) + q * h

    def norm_parameters(self) -> int:
        """Norms of one layer, those of latent attention included."""
        return 2 * self.last_norm_parameters() + (self.latent.query_rank + self.latent.kv_rank if self.latent else 0)

    def last_norm_parameters(self) -> int:
        """The norm before the head; each of a layer's two has as many."""
        return self.hidden * (2 if self.biases else 1)

    def attention_parameters(self) -> int:
        """One layer's attention, with the layer's norms."""
        biases = 0
        if not self.latent:
            q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
            biases = (q + 2 * kv) * (self.biases or self.query_biases) + self.hidden * self.biases
        return self.attention_matrices() + biases + self.norm_parameters()

    def ffn_matrices(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    def ffn_parameters(self, width: int) -> int:
        """One feed-forward block (or expert) of this width."""
        return self.ffn_matrices(width) + (self.hidden + width) * self.biases * (width > 0)

    def dense_ffn_parameters(self) -> int:
        return self.ffn_parameters(self.ffn)

    def router_parameters(self) -> int:
        """A sparse layer's router, and the gate of its shared expert."""
        return self.hidden * (self.experts.count + self.experts.shared_gate) if self.experts else 0

    def expert_parameters(self) -> int:
        """One expert of one layer."""
        return self.ffn_parameters(self.experts.ffn) if self.experts else 0

    def shared_parameters(self) -> int:
        """The shared expert of one sparse layer."""
        return self.ffn_parameters(self.experts.shared_ffn) if self.experts else 0

    def layers_parameters(self, dense: int, sparse: int) -> int:
        """So many dense and sparse layers, without their routed experts."""
        sparse_block = self.router_parameters() + self.shared_parameters()
        return (dense + sparse) * self.attention_parameters() + dense * self.dense_ffn_parameters() + sparse * sparse_block

    def routed_parameters(self, sparse: int) -> int:
        """All routed experts of so many sparse layers."""
        return sparse * self.experts.count * self.expert_parameters() if self.experts else 0

    def table_parameters(self) -> int:
        """The token embedding, and the output matrix: each is vocabulary x hidden."""
        return self.vocab * self.hidden

    def embedding_parameters(self) -> int:
        """Token embedding and learned positions."""
        return self.table_parameters() + self.context * self.hidden * self.positions

    def head_parameters(self) -> int:
        """Output matrix and last norm; a tied output matrix is the embedding's."""
        return (0 if self.tied else self.table_parameters()) + self.last_norm_parameters()

    def parameters(self) -> int:
        layers = self.layers_parameters(self.dense_layers, self.sparse_layers) + self.routed_parameters(self.sparse_layers)
        return layers + self.embedding_parameters() + self.head_parameters()

    def active_parameters(self) -> int:
        """Parameters that one token passes through: top_k experts instead of all."""
        idle = self.experts.count - self.experts.top_k if self.experts else 0
        return self.parameters() - self.sparse_layers * idle * self.expert_parameters()

    def matrix_parameters(self) -> int:
        """Parameters that one token is multiplied with: neither norms, biases nor embeddings, which are looked up, and top_k
        experts instead of all. The output layer is a product, tied or not."""
        sparse = 0
        if self.experts:
            width = self.experts.top_k * self.experts.ffn + self.experts.shared_ffn
            sparse = self.sparse_layers * (self.router_parameters() + self.ffn_matrices(width))
        dense = self.dense_layers * self.ffn_matrices(self.ffn)
        return self.layers * self.attention_matrices() + dense + sparse + self.table_parameters()
