"""GPUs of a cluster's nodes: which are free, and where a gang fits.

A gang takes whole nodes, and the GPUs that remain on one more node. Nodes of a block (a rack, or a leaf switch) are bits of an
integer, so the lowest free node of a block is one operation. A reservation moves nodes to a second pool, which only jobs that
end before the reservation begins may use.
"""

from collections.abc import Iterable, Iterator, Mapping

Pools = tuple[int, ...]
OPEN: Pools = (0,)
RESERVED: Pools = (1,)
ANY: Pools = (0, 1)

Allocation = tuple[tuple[int, int], ...]  # node, GPUs


class Nodes:
    """`compact`: a gang spans as few blocks as possible. Otherwise it takes the free nodes with the lowest numbers."""

    def __init__(self, count: int, size: int, block: int, compact: bool) -> None:
        self.size, self.block, self.compact = size, block, compact
        self.free = [size] * count
        self.idle = size * count  # free GPUs
        self.stranded = 0  # free GPUs of nodes that are partly used
        self.blocks = -(-count // block)
        self._pool = bytearray(count)
        # Nodes by pool, free GPUs and block, as bits; and their number by pool and free GPUs.
        self._bits = [[[0] * self.blocks for _ in range(size + 1)] for _ in ANY]
        self._count = [[0] * (size + 1) for _ in ANY]
        for node in range(count):
            self._bits[0][size][node // block] |= 1 << node % block
        self._count[0][size] = count

    def counts(self, pools: Pools = ANY) -> list[int]:
        """Number of nodes by free GPUs."""
        return [a + b for a, b in zip(*self._count, strict=True)] if len(pools) > 1 else self._count[pools[0]]

    def fits(self, gpus: int, pools: Pools = ANY) -> bool:
        return gpus <= self.idle and fits(self.counts(pools), gpus)

    def place(self, gpus: int, pools: Pools = ANY) -> Allocation | None:
        """Take the GPUs of a gang from nodes of these pools, all or none."""
        if not self.fits(gpus, pools):
            return None
        whole, rest = divmod(gpus, self.size)
        nodes = self._whole(whole, pools)
        taken = [(node, self.size) for node in nodes]
        for node in nodes:
            self._set(node, 0)
        if rest:
            node = self._partial(rest, pools, {node // self.block for node in nodes})
            self._set(node, self.free[node] - rest)
            taken.append((node, rest))
        return tuple(taken)

    def release(self, allocation: Allocation) -> None:
        for node, gpus in allocation:
            self._set(node, self.free[node] + gpus)

    def reserve(self, nodes: Iterable[int]) -> None:
        self._move(nodes, 1)

    def open(self, nodes: Iterable[int]) -> None:
        self._move(nodes, 0)

    def spanned(self, allocation: Allocation) -> int:
        """Blocks of a gang."""
        return len({node // self.block for node, _ in allocation})

    def enough(self, gpus: int, later: Mapping[int, int]) -> list[int]:
        """Nodes for a gang at a time when the nodes of `later` have these numbers of free GPUs. Nodes that are busy now come
        first, since others can use those that are free in the meantime."""
        whole, rest = divmod(gpus, self.size)
        chosen = [node for node, free in later.items() if free == self.size][:whole]
        if len(chosen) < whole:
            chosen += [node for node in self._all_free() if node not in later][: whole - len(chosen)]
        if rest:
            used = set(chosen)
            found = [(free, node) for node, free in later.items() if free >= rest and node not in used]
            if not found:
                found = [
                    (free, node) for node, free in enumerate(self.free) if free >= rest and node not in used and node not in later
                ]
            chosen.append(min(found)[1])
        return chosen

    def _all_free(self) -> Iterator[int]:
        """Nodes that are wholly free, the last first: jobs that fill gaps take the first."""
        return (node for node in range(len(self.free) - 1, -1, -1) if self.free[node] == self.size)

    def _whole(self, count: int, pools: Pools) -> list[int]:
        if not count:
            return []
        bits = self._seen(self.size, pools)
        found: list[int] = []
        if not self.compact:
            for block, mask in enumerate(bits):
                if mask:
                    found += self._lowest(mask, block, count - len(found))
                    if len(found) == count:
                        break
            return found
        left = {block: mask.bit_count() for block, mask in enumerate(bits) if mask}
        while len(found) < count:
            missing = count - len(found)
            # The tightest block that has enough; else the emptiest, which leaves the fewest blocks to add.
            enough = [(free, block) for block, free in left.items() if free >= missing]
            block = min(enough)[1] if enough else max(left, key=lambda block: (left[block], -block))
            found += self._lowest(bits[block], block, missing)
            del left[block]
        return found

    def _partial(self, gpus: int, pools: Pools, near: set[int]) -> int:
        """Best fit: the node with the fewest free GPUs that suffice. Compact gangs look into their own blocks first; single
        nodes go where the fewest nodes are wholly free, so that whole blocks stay free."""
        if self.compact and near:
            for free in range(gpus, self.size + 1):
                bits = self._seen(free, pools)
                for block in sorted(near):
                    if bits[block]:
                        return self._lowest(bits[block], block, 1)[0]
        for free in range(gpus, self.size + 1):
            if not any(self._count[pool][free] for pool in pools):
                continue
            bits = self._seen(free, pools)
            blocks = [block for block, mask in enumerate(bits) if mask]
            if self.compact:
                whole = self._seen(self.size, ANY)
                blocks = [min(blocks, key=lambda block: (whole[block].bit_count(), block))]
            return self._lowest(bits[blocks[0]], blocks[0], 1)[0]
        raise AssertionError("a gang that fits has a node")

    def _seen(self, free: int, pools: Pools) -> list[int]:
        first, *others = (self._bits[pool][free] for pool in pools)
        return [a | b for a, b in zip(first, others[0], strict=True)] if others else first

    def _lowest(self, mask: int, block: int, most: int) -> list[int]:
        found: list[int] = []
        while mask and len(found) < most:
            bit = mask & -mask
            found.append(block * self.block + bit.bit_length() - 1)
            mask ^= bit
        return found

    def _set(self, node: int, free: int) -> None:
        pool, old = self._pool[node], self.free[node]
        block, bit = node // self.block, 1 << node % self.block
        bits, count = self._bits[pool], self._count[pool]
        assert 0 <= free <= self.size and bits[old][block] & bit, "a GPU given twice or returned twice"
        bits[old][block] ^= bit
        bits[free][block] |= bit
        count[old] -= 1
        count[free] += 1
        self.idle += free - old
        self.stranded += free % self.size - old % self.size
        self.free[node] = free

    def _move(self, nodes: Iterable[int], pool: int) -> None:
        for node in nodes:
            free, was = self.free[node], self._pool[node]
            block, bit = node // self.block, 1 << node % self.block
            self._bits[was][free][block] ^= bit
            self._count[was][free] -= 1
            self._bits[pool][free][block] |= bit
            self._count[pool][free] += 1
            self._pool[node] = pool


def fits(counts: list[int], gpus: int) -> bool:
    """True if a gang fits on nodes of which `counts[n]` have n free GPUs. A smaller gang fits wherever a larger one does."""
    size = len(counts) - 1
    whole, rest = divmod(gpus, size)
    if counts[size] < whole:
        return False
    return not rest or counts[size] > whole or any(counts[rest:size])
