"""Decoding of latents by several workers, each with a strip of rows. Equal to decoding by one.

Convolutions get the neighbouring rows of the strips above and below, group norms add up their statistics over all workers, and
the attention of the middle block attends to the keys and values of all strips."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from strata.serving.diffusion.parallel.group import Axis
from strata.serving.diffusion.parallel.sequence import gather, share

BLOCKS = {"UNetMidBlock2D", "UpDecoderBlock2D"}


def splits(vae: Any, rows: int, axis: Axis) -> bool:
    """True if `decode` applies: the decoder has known parts only, and `rows` latent rows are enough for one per worker."""
    decoder = getattr(vae, "decoder", None)
    if type(vae).__name__ != "AutoencoderKL" or not 1 < axis.size <= rows:
        return False
    kinds = {type(block).__name__ for block in (decoder.mid_block, *decoder.up_blocks)}  # type: ignore[union-attr]
    return kinds <= BLOCKS


def decode(vae: Any, latents: Tensor, axis: Axis) -> Tensor:
    """Scaled latents [b, channels, height, width] to pixels, on every worker."""
    rows = latents.shape[2]
    strips = Strips(axis, rows)
    x = latents[:, :, share(rows, axis)]
    if vae.post_quant_conv is not None:
        x = vae.post_quant_conv(x)
    decoder = vae.decoder
    x = strips.conv(decoder.conv_in, x)
    x = strips.middle(decoder.mid_block, x)
    for block in decoder.up_blocks:
        x = strips.up(block, x)
    x = strips.conv(decoder.conv_out, decoder.conv_act(strips.norm(decoder.conv_norm_out, x)))
    return strips.whole(x)


class Strips:
    """Layers of a decoder for this worker's strip."""

    def __init__(self, axis: Axis, rows: int) -> None:
        self.axis, self.rows = axis, rows  # of the latents; strips grow with the picture
        self.own = len(range(*share(rows, axis).indices(rows)))

    def whole(self, x: Tensor) -> Tensor:
        """All strips of [b, channels, own height, width]."""
        return gather(torch.unflatten(x, 2, (self.own, -1)), self.axis, self.rows, dim=2).flatten(2, 3)

    def conv(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        if conv.kernel_size == (1, 1):
            return conv(x)  # type: ignore[no-any-return]
        assert conv.kernel_size == (3, 3) and conv.padding == (1, 1) and conv.stride == (1, 1)
        above, below = self._neighbours(x)
        return F.conv2d(torch.cat((above, x, below), dim=2), conv.weight, conv.bias, padding=(0, 1))

    def _neighbours(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The last row of the strip above and the first of the strip below; zeros at the edges of the picture."""
        first, last = x[:, :, :1].contiguous(), x[:, :, -1:].contiguous()
        above, below = torch.zeros_like(first), torch.zeros_like(last)
        swaps = []
        for index, sent, received in ((self.axis.index - 1, first, above), (self.axis.index + 1, last, below)):
            if 0 <= index < self.axis.size:
                swaps.append(dist.P2POp(dist.isend, sent, self.axis.ranks[index], group=self.axis.group))
                swaps.append(dist.P2POp(dist.irecv, received, self.axis.ranks[index], group=self.axis.group))
        for request in dist.batch_isend_irecv(swaps):
            request.wait()
        return above, below

    def norm(self, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        """Mean first, then squared distances from it: a difference of squares would lose digits."""
        groups = torch.unflatten(x.float(), 1, (norm.num_groups, -1)).flatten(2)  # [b, groups, values]
        count = groups.shape[2] // self.own * self.rows
        mean = self._sum(groups.sum(2)) / count
        centered = groups - mean[..., None]
        variance = self._sum(centered.square().sum(2)) / count
        scaled = (centered * (variance + norm.eps).rsqrt()[..., None]).view(x.shape)
        return (scaled * norm.weight[:, None, None] + norm.bias[:, None, None]).to(x.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.axis.group)
        return x

    def residual(self, block: Any, x: Tensor) -> Tensor:
        y = self.conv(block.conv1, block.nonlinearity(self.norm(block.norm1, x)))
        y = self.conv(block.conv2, block.nonlinearity(self.norm(block.norm2, y)))
        skip = x if block.conv_shortcut is None else self.conv(block.conv_shortcut, x)
        return (skip + y) / block.output_scale_factor  # type: ignore[no-any-return]

    def attention(self, attn: Any, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        y = self.norm(attn.group_norm, x).flatten(2).transpose(1, 2)  # [b, tokens, channels]
        q, k, v = attn.to_q(y), attn.to_k(y), attn.to_v(y)
        k, v = (self.whole(z.unflatten(1, (height, width)).permute(0, 3, 1, 2)).flatten(2).transpose(1, 2) for z in (k, v))
        q, k, v = (z.unflatten(2, (attn.heads, -1)).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = attn.to_out[0](y).transpose(1, 2).unflatten(2, (height, width))
        return (y + x if attn.residual_connection else y) / attn.rescale_output_factor  # type: ignore[no-any-return]

    def middle(self, block: Any, x: Tensor) -> Tensor:
        x = self.residual(block.resnets[0], x)
        for attn, resnet in zip(block.attentions, block.resnets[1:], strict=True):
            if attn is not None:
                x = self.attention(attn, x)
            x = self.residual(resnet, x)
        return x

    def up(self, block: Any, x: Tensor) -> Tensor:
        for resnet in block.resnets:
            x = self.residual(resnet, x)
        for upsampler in block.upsamplers or ():
            x = self.conv(upsampler.conv, F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return x
