"""Sections of the model: shape, architecture, rotary scaling and experts."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from strata.platform.recipe.picture import LEAST_PATCHES, PictureSection
from strata.platform.recipe.section import NonNegative, Positive, Section

PICTURE_VOCAB = 512  # words of captions, the more frequent first


class RopeScalingSection(Section):
    """Rotary frequencies rescaled for a longer context than the model was first trained with, as in Hugging Face's
    `rope_parameters`."""

    kind: Literal["linear", "llama3", "yarn"] = Field(description="how frequencies are rescaled")
    factor: Annotated[float, Field(ge=1)] = Field(description="longer context over the original one")
    original_context: Positive | None = Field(None, description="context before the rescaling (llama3, yarn)")
    low_frequency_factor: float = Field(1.0, description="llama3: wavelengths above original_context / this are multiplied")
    high_frequency_factor: float = Field(4.0, description="llama3: wavelengths below original_context / this stay")
    beta_fast: float = Field(32.0, description="yarn: rotations in the original context above which a frequency stays")
    beta_slow: float = Field(1.0, description="yarn: rotations below which a frequency is divided by factor")
    truncate: bool = Field(True, description="yarn: round the bounds between beta_fast and beta_slow to whole dimensions")
    attention_factor: float | None = Field(None, description="yarn: factor of queries and keys; unset: 1 + 0.1 ln(factor)")

    @model_validator(mode="after")
    def original_is_known(self) -> Self:
        if self.kind != "linear" and self.original_context is None:
            raise ValueError(f"kind={self.kind} needs original_context")
        return self


class ArchitectureSection(Section):
    """Differences from Llama. An imported model (`model.from`) sets them; the defaults are Llama's."""

    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] | None = Field(None, description="width of a head; unset: hidden/heads")
    qkv_bias: bool = Field(False, description="biases of the query, key and value projections")
    output_bias: bool = Field(False, description="bias of the attention's output projection")
    qk_norm: Literal["none", "head", "width"] = Field(
        "none", description="RMSNorm of queries and keys; head: of each head, width: over all heads"
    )
    norms: Literal["pre", "post", "both"] = Field("pre", description="norms before, after, or before and after each block")
    norm_offset: bool = Field(False, description="norms multiply by one plus their weight")
    activation: Literal["silu", "gelu_tanh", "clamped_silu"] = Field("silu", description="activation of the feed-forward blocks")
    embedding_scale: float | None = Field(None, description="factor of the input embeddings")
    attention_scale: Annotated[float, Field(gt=0)] | None = Field(
        None, description="factor of the attention's scores; unset: 1 / sqrt(head_dim)"
    )
    attention_softcap: Annotated[float, Field(gt=0)] | None = Field(None, description="bound of the scores, by tanh")
    logit_softcap: Annotated[float, Field(gt=0)] | None = Field(None, description="bound of the logits, by tanh")
    sinks: bool = Field(False, description="a learned score of each head that takes attention from all tokens")
    window: Positive | None = Field(None, description="tokens that a sliding layer attends to")
    sliding_layers: tuple[NonNegative, ...] = Field((), description="layers that attend to the window only")
    sliding_rope_theta: Annotated[float, Field(gt=0)] | None = Field(
        None, description="rope_theta of the sliding layers, without rope_scaling; unset: that of the others"
    )
    unrotated_layers: tuple[NonNegative, ...] = Field((), description="layers without rotary embedding")
    rope_scaling: RopeScalingSection | None = Field(None, description="rescaled rotary frequencies")


class MoESection(Section):
    """Mixture of experts in place of feed-forward blocks. Each expert is `model.ffn` wide."""

    experts: Annotated[int, Field(ge=2)] = Field(description="experts of a layer")
    top_k: Positive = Field(2, description="experts that process each token")
    shared_ffn: Annotated[int, Field(ge=0)] = Field(0, description="width of an expert that processes every token; 0: none")
    balance: Annotated[float, Field(ge=0)] = Field(0.01, description="weight of the load-balancing loss")
    normalize: bool = Field(True, description="scale the weights of a token's experts to a sum of one")
    bias: bool = Field(False, description="biases of the router and the experts")
    dense_layers: tuple[NonNegative, ...] = Field((), description="layers with a plain feed-forward block")
    dense_ffn: NonNegative = Field(0, description="width of the plain feed-forward blocks")

    @model_validator(mode="after")
    def enough_experts(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must not exceed experts={self.experts}")
        return self


class ModelSection(Section):
    """Decoder: a Llama of any size, or an imported model. With `from`, the other keys except context come from that model. With
    `picture`, a text-to-image transformer: layers, hidden and heads are its sizes, kv_heads, ffn and context follow from them."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    source: str | None = Field(
        None, alias="from", description="folder or Hugging Face id of a model to start from; unset: random weights"
    )
    family: str | None = Field(None, description="family of the imported model, such as qwen3; set by the import")
    layers: Positive = Field(description="decoder layers")
    hidden: Positive = Field(description="width of the residual stream; an even multiple of heads")
    heads: Positive = Field(description="query heads; a multiple of kv_heads")
    kv_heads: Positive = Field(description="key and value heads; below heads, grouped-query attention")
    ffn: Positive = Field(description="width of the feed-forward block")
    vocab: Positive = Field(
        description="vocabulary size: 256 bytes, the special tokens and the merges; at least 512 without an imported model"
    )
    context: Annotated[int, Field(ge=16)] = Field(
        description="training sequence length, and the longest sequence that serving accepts"
    )
    rope_theta: Annotated[float, Field(gt=0)] = Field(10_000.0, description="base of the rotary embedding's frequencies")
    norm_eps: Annotated[float, Field(gt=0, lt=1e-2)] = Field(1e-5, description="epsilon of RMSNorm")
    tie_embeddings: bool = Field(True, description="use the input embedding as the output projection")
    moe: MoESection | None = Field(None, description="mixture of experts in place of each feed-forward block")
    architecture: ArchitectureSection = Field(ArchitectureSection(), description="differences from Llama")
    picture: PictureSection | None = Field(None, description="a text-to-image model; unset: a language model")

    @model_validator(mode="before")
    @classmethod
    def picture_decides(cls, given: Any) -> Any:
        """Fills in the sizes that follow from others in a picture model."""
        picture = given.get("picture") if isinstance(given, dict) else None
        if picture is None:
            return given
        follow: dict[str, int] = {"vocab": PICTURE_VOCAB}
        if isinstance(hidden := given.get("hidden"), int):
            follow["ffn"] = 4 * hidden
        if isinstance(heads := given.get("heads"), int):
            follow["kv_heads"] = heads
        try:
            follow["context"] = (picture if isinstance(picture, PictureSection) else PictureSection(**picture)).patches
        except (TypeError, ValueError):
            follow["context"] = LEAST_PATCHES  # the error is that of the section itself, not that of a missing context
        return follow | given

    @model_validator(mode="after")
    def picture_sizes_follow(self) -> Self:
        if self.picture is None:
            return self
        follow = {"kv_heads": self.heads, "ffn": 4 * self.hidden, "context": self.picture.patches}
        for key, value in follow.items():
            if getattr(self, key) != value:
                raise ValueError(f"{key}={getattr(self, key)} is {value} in this picture model: remove it")
        for key in ("source", "moe"):
            if getattr(self, key) is not None:
                raise ValueError(f"{'from' if key == 'source' else key} is for language models, and picture is set: remove one")
        if self.architecture != ArchitectureSection():
            raise ValueError("architecture is for language models, and picture is set: remove one")
        return self

    @field_validator("vocab")
    @classmethod
    def vocab_holds_bytes(cls, vocab: int, given: ValidationInfo) -> int:
        if given.data.get("family") is None and vocab < 512:
            raise ValueError(f"vocab={vocab} must be at least 512")
        return vocab

    @model_validator(mode="after")
    def family_has_a_source(self) -> Self:
        if self.family is not None and self.source is None:
            raise ValueError(f"family={self.family} is set by an import, and needs from")
        return self

    @model_validator(mode="after")
    def heads_divide(self) -> Self:
        if self.architecture.head_dim is None and (self.hidden % self.heads or (self.hidden // self.heads) % 2):
            raise ValueError(f"hidden={self.hidden} must be heads={self.heads} times an even number")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        return self

    @property
    def head_dim(self) -> int:
        return self.architecture.head_dim or self.hidden // self.heads
