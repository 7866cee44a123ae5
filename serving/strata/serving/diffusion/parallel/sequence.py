"""Self-attention over tokens that are split among workers: Ulysses, ring, and both (USP).

Each worker has a share of the image tokens and a share of the text tokens that take part in self-attention. Attention does not
depend on the order of keys, so the two shares are exchanged as one. Ulysses exchanges tokens for heads: every worker then has all
tokens of its ulysses group for some of the heads. The ring passes keys and values on, and each worker merges the partial results
by their log-sum-exp in fp32. Shares differ by at most one token of each stream."""

import torch
import torch.distributed as dist
from torch import Tensor

from strata.serving.diffusion.attention import Site, attention
from strata.serving.diffusion.parallel.group import Axis, Group


def shares(total: int, parts: int) -> list[int]:
    """Sizes that differ by at most one; the first ones are larger."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def share(total: int, axis: Axis) -> slice:
    """This worker's range of `total` tokens or rows."""
    sizes = shares(total, axis.size)
    start = sum(sizes[: axis.index])
    return slice(start, start + sizes[axis.index])


def gather(x: Tensor, axis: Axis, total: int, dim: int) -> Tensor:
    """The whole of a tensor of which each worker has its share along `dim`. Collectives need equal sizes, hence the padding."""
    if axis.size == 1:
        return x
    sizes = shares(total, axis.size)
    moved = x.movedim(dim, 0)
    padded = moved.new_zeros(sizes[0], *moved.shape[1:])
    padded[: len(moved)] = moved
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=axis.group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, dim)


class SequenceAttention:
    """Attention over `image` + `text` tokens of all workers, for the shares of this one."""

    def __init__(self, workers: Group, image: int, text: int) -> None:
        self.ulysses, self.ring = workers.ulysses, workers.ring
        images, texts = shares(image, workers.sequence.size), shares(text, workers.sequence.size)
        self.lengths = {True: [i + t for i, t in zip(images, texts, strict=True)], False: images}  # by Site.joint

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, site: Site, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_ring = torch.tensor(self.lengths[site.joint]).view(self.ring.size, self.ulysses.size).tolist()
        members = by_ring[self.ring.index]
        if self.ulysses.size > 1:
            q, k, v = to_heads(torch.stack((q, k, v)), self.ulysses, members)
        out = ring_attention(q, k, v, self.ring, [sum(lengths) for lengths in by_ring])
        return to_tokens(out, self.ulysses, members) if self.ulysses.size > 1 else out


def to_heads(x: Tensor, axis: Axis, lengths: list[int]) -> Tensor:
    """[..., own tokens, heads, dim] -> [..., all tokens, own heads, dim]"""
    *outer, own, heads, dim = x.shape
    mine = heads // axis.size
    sent = torch.unflatten(x, -2, (axis.size, mine)).movedim(-3, 0).contiguous()
    unit = x[..., 0, :mine, :].numel() if own else outer_size(outer) * mine * dim
    received = x.new_empty(unit * sum(lengths))
    dist.all_to_all_single(received, sent.view(-1), [unit * n for n in lengths], [unit * own] * axis.size, group=axis.group)
    parts = torch.split(received, [unit * n for n in lengths])
    return torch.cat([part.view(*outer, n, mine, dim) for part, n in zip(parts, lengths, strict=True)], dim=-3)


def to_tokens(x: Tensor, axis: Axis, lengths: list[int]) -> Tensor:
    """[..., all tokens, own heads, dim] -> [..., own tokens, heads, dim]"""
    *outer, _, mine, dim = x.shape
    own = lengths[axis.index]
    unit = outer_size(outer) * mine * dim
    sent = torch.cat([part.reshape(-1) for part in torch.split(x, lengths, dim=-3)])
    received = x.new_empty(axis.size * unit * own)
    dist.all_to_all_single(received, sent, [unit * own] * axis.size, [unit * n for n in lengths], group=axis.group)
    return received.view(axis.size, *outer, own, mine, dim).movedim(0, -3).flatten(-3, -2)


def outer_size(outer: list[int]) -> int:
    return int(torch.Size(outer).numel())


def ring_attention(q: Tensor, k: Tensor, v: Tensor, axis: Axis, lengths: list[int]) -> Tensor:
    """Attention of this worker's queries to the keys of all workers of the ring. The next keys and values travel while the
    present ones are used."""
    if axis.size == 1:
        return attention(q, k, v)[0]
    after, before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
    b, _, heads, dim = k.shape
    held = torch.stack((k, v))
    out, lse = None, None
    for turn in range(axis.size):
        arriving, requests = None, []
        if turn + 1 < axis.size:
            arriving = held.new_empty(2, b, lengths[axis.index - turn - 1], heads, dim)
            swap = [
                dist.P2POp(dist.isend, held, after, group=axis.group),
                dist.P2POp(dist.irecv, arriving, before, group=axis.group),
            ]
            requests = dist.batch_isend_irecv(swap)
        part, part_lse = attention(q, held[0], held[1])
        out, lse = (part.float(), part_lse) if out is None or lse is None else merged(out, lse, part.float(), part_lse)
        for request in requests:
            request.wait()
        if arriving is not None:
            held = arriving
    assert out is not None
    return out.to(q.dtype)


def merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attention results over different keys as one. `out` is [b, t, h, e], `lse` [b, h, t]."""
    both = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((x - both).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, other_lse))
    return out * weight + other * other_weight, both
