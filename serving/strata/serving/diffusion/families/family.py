"""Interface between sampling and a diffusion transformer of `diffusers`.

A transformer's forward pass is taken apart into embedding, blocks and head, so that tokens can be split over workers, blocks over
stages, and blocks can be skipped by a step cache. The modules that run are diffusers' own."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]  # cosine and sine, [tokens, head dimension] each


@dataclass(frozen=True)
class Rows:
    """A set of tensors whose first dimension is the batch, apart from rotary embeddings, which have none."""

    def rows(self, index: Tensor | slice) -> Self:
        chosen = {f.name: getattr(self, f.name)[index] for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **chosen)


@dataclass(frozen=True)
class Condition(Rows):
    """Text or class inputs of a transformer, one row per picture."""

    text: Tensor | None = None  # [b, t, channels]
    pooled: Tensor | None = None  # [b, channels]
    mask: Tensor | None = None  # [b, t], 1 for tokens that are attended to
    labels: Tensor | None = None  # [b]


def joined(conditions: Sequence[Condition]) -> Condition:
    """One batch of several."""
    columns = {f.name: [getattr(c, f.name) for c in conditions] for f in fields(Condition)}
    return Condition(**{name: None if values[0] is None else torch.cat(values) for name, values in columns.items()})


@dataclass(frozen=True)
class Tokens(Rows):
    """The streams that blocks change."""

    image: Tensor  # [b, n, width]
    text: Tensor | None = None  # [b, t, width]; only models with joint attention have a text stream


@dataclass(frozen=True)
class Modulation(Rows):
    """The inputs that blocks and head only read: the same for all tokens, apart from the rotary embeddings."""

    time: Tensor
    final: Tensor | None = None  # conditioning of the head, where it differs from that of the blocks
    labels: Tensor | None = None
    caption: Tensor | None = None  # keys and values of cross attention, [b, t, width]
    caption_bias: Tensor | None = None  # [b, 1, t]
    image_rope: Rope | None = None
    text_rope: Rope | None = None

    @cached_property
    def rope(self) -> Rope | None:
        """Rotary embedding of text and image, in this order, joined once for all blocks."""
        if self.image_rope is None or self.text_rope is None:
            return None
        (cos, sin), (text_cos, text_sin) = self.image_rope, self.text_rope
        return torch.cat((text_cos, cos)), torch.cat((text_sin, sin))

    def of_tokens(self, image: slice, text: slice) -> "Modulation":
        if self.image_rope is None or self.text_rope is None:
            return self
        (cos, sin), (text_cos, text_sin) = self.image_rope, self.text_rope
        return replace(self, image_rope=(cos[image], sin[image]), text_rope=(text_cos[text], text_sin[text]))


class Family:
    """Calls of one kind of transformer. Latents are [b, channels, height, width] for all of them; token i of an image is patch
    (i // columns, i % columns)."""

    name: ClassVar[str]
    joint_text: ClassVar[bool] = False  # text tokens take part in self-attention
    text_first: ClassVar[bool] = False  # order of the two in self-attention
    distilled_guidance: ClassVar[bool] = False  # guidance is an input; classifier-free guidance only on request
    max_shift: ClassVar[float] = 1.15  # default of `max_shift` for schedulers whose time shift depends on the picture's size

    def patch(self, model: Any) -> int:
        """Latent pixels per token, in each direction."""
        return int(model.config.patch_size)

    def channels(self, model: Any) -> int:
        """Channels of the latents."""
        return int(model.config.in_channels)

    def blocks(self, model: Any) -> list[nn.Module]:
        return list(model.transformer_blocks)

    def null(self, model: Any, count: int) -> Condition | None:
        """Conditions of the unconditional half where no text describes them."""
        return None

    def scheduler_sigmas(self, steps: int) -> list[float] | None:
        """Noise levels that replace the scheduler's own."""
        return None

    def tokens(self, model: Any, latents: Tensor, condition: Condition) -> Tokens:
        raise NotImplementedError

    def modulation(
        self, model: Any, timestep: Tensor, condition: Condition, guidance: Tensor, grid: tuple[int, int], size: tuple[int, int]
    ) -> Modulation:
        """`timestep` and `guidance` are [b]; `grid` is (rows, columns) of tokens, `size` (height, width) in pixels."""
        raise NotImplementedError

    def block(self, block: nn.Module, tokens: Tokens, modulation: Modulation) -> Tokens:
        raise NotImplementedError

    def head(self, model: Any, image: Tensor, modulation: Modulation) -> Tensor:
        """[b, n, width] -> [b, n, patch * patch * channels]"""
        raise NotImplementedError

    def latents(self, model: Any, values: Tensor, columns: int) -> Tensor:
        """Latents of whole rows of tokens, without the predicted variance of models that learn one."""
        patch = self.patch(model)
        values = torch.unflatten(torch.unflatten(values, 1, (-1, columns)), -1, (patch, patch, -1))
        return torch.einsum("nhwpqc->nchpwq", values).flatten(4, 5).flatten(2, 3)[:, : self.channels(model)]
