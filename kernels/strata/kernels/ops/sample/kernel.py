"""Samples a token of each row in one pass over the logits, by two kernels.

The first reads tiles, 16 lines of 1024 tokens. A segment of a tile is 4 neighbouring columns: a thread holds all of its tokens,
and reduces them without the other threads. The kernel stores the largest logit of each segment and, if the row needs it, the sum
of weights. It does nothing else, so that it keeps the memory busy.

In the second kernel, a program selects the token of a row. From Hopper on, its programs start as those of the first end
(programmatic dependent launch). Segment maxima bound the thresholds of top-k and top-p from below: only segments that reach the
bound are read again, and tokens that reach it become candidates. Few candidates are compared each with every other; among more,
a search finds the exact thresholds. If a flat distribution has more candidates than fit, the search reads the row instead.
Weights are summed in fp32.

A row without a filter draws a segment, then a token of it. Nothing depends on the other rows or on the order of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strata.kernels.ops.sample.bounds import bound_of_top_k, bound_of_top_p
from strata.kernels.ops.sample.draw import draw, draw_of_all, draw_of_few, first_largest, load_scaled, tokens_of
from strata.kernels.tuning.tunable import Config, Key, Tunable, architecture, bucket, config

LINES, COLUMNS, RUN = 16, 1024, 4  # of a tile; columns of a segment
SEGMENT = LINES * RUN
TILE = LINES * COLUMNS
WIDTH = 512  # columns of a program of the first kernel
BYTES_OF_WARP = 512  # of a line: 16 of every thread
CANDIDATES = 4096  # that fit the buffer of a row
LOG2_E = 1.4426950408889634
GREEDY = 1e-5  # temperatures below select the largest logit
LOWEST = -1e37  # stands for -inf, whose differences are NaN


@triton.jit
def read_again(
    values,
    tokens,
    listed,
    count,
    logits,
    bound,
    scale,
    vocabulary,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Stores tokens of the listed segments that reach the bound, and returns how many there are, more than fit included."""
    AT_ONCE: tl.constexpr = GATHER // (LINES * RUN)
    found = 0
    for start in range(0, count, AT_ONCE):
        number = start + tl.arange(0, AT_ONCE)
        beyond = tl.cdiv(vocabulary, LINES * COLUMNS) * (COLUMNS // RUN)
        token = tokens_of(tl.load(listed + number, mask=number < count, other=beyond), LINES, COLUMNS, RUN)
        x = load_scaled(logits + token, token < vocabulary, scale)
        passed = ((x >= bound) & (token < vocabulary)).to(tl.int32)
        of_segment = tl.sum(passed, 1)
        slot = found + (tl.cumsum(of_segment, 0) - of_segment)[:, None] + tl.cumsum(passed, 1) - 1
        fits = (passed > 0) & (slot < CANDIDATES)
        tl.store(values + slot, x, mask=fits)
        tl.store(tokens + slot, token, mask=fits)
        found += tl.sum(of_segment, 0)
    return found


@triton.jit
def settings_of_row(
    row, temperature, top_k, top_p, min_p, vocabulary, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr
):
    """Scale of the logits, k, p, min-p, whether the row is greedy, and whether it needs the weights of segments. Rows with top-k
    or min-p have bounds without them."""
    heat = tl.load(temperature + row)
    greedy = heat < 1e-5
    scale = tl.where(greedy, 1.0, tl.math.div_rn(1.4426950408889634, tl.where(greedy, 1.0, heat)))
    k = vocabulary
    p = 1.0
    share = 0.0
    if TOP_K:
        given_k = tl.load(top_k + row).to(tl.int32)
        k = tl.where((given_k > 0) & (given_k < vocabulary), given_k, vocabulary)
    if TOP_P:
        p = tl.load(top_p + row)
    if MIN_P:
        share = tl.load(min_p + row)
    summed = (greedy == 0) & (k == vocabulary) & (share <= 0)
    return scale, k, p, share, greedy, summed


@triton.jit
def summarize_kernel(
    maxima,  # of segments [rows, segments]
    sums,  # of weights relative to the segment's maximum [rows, segments]
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    row_stride,
    vocabulary,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,  # columns of a program
    DEPENDENT: tl.constexpr,
):
    TILE: tl.constexpr = LINES * COLUMNS
    OF_TILE: tl.constexpr = COLUMNS // RUN
    OF_PROGRAM: tl.constexpr = WIDTH // RUN
    if DEPENDENT:
        gdc_launch_dependents()
    row, tile, part = tl.program_id(1), tl.program_id(0) // (COLUMNS // WIDTH), tl.program_id(0) % (COLUMNS // WIDTH)
    segments = tl.cdiv(vocabulary, TILE) * OF_TILE
    line, column = tl.arange(0, LINES), part * WIDTH + tl.arange(0, WIDTH)
    index = tile * TILE + line[:, None] * COLUMNS + column[None, :]
    pointers, there = logits + row.to(tl.int64) * row_stride + index, index < vocabulary
    raw = tl.load(pointers, mask=there, other=float("-inf")).to(tl.float32)
    scale, _, _, _, _, summed = settings_of_row(row, temperature, top_k, top_p, min_p, vocabulary, TOP_K, TOP_P, MIN_P)
    # The scale is positive, and rounding keeps the order: the largest product is that of the largest logit.
    peak = tl.maximum(tl.max(tl.reshape(tl.max(raw, 0), [OF_PROGRAM, RUN]), 1) * scale, -1e37)
    segment = row * segments + tile * OF_TILE + part * OF_PROGRAM + tl.arange(0, OF_PROGRAM)
    tl.store(maxima + segment, peak)
    if summed:
        peaks_of_columns = tl.reshape(tl.broadcast_to(peak[:, None], [OF_PROGRAM, RUN]), [WIDTH])
        # Read again, from L1: held in registers until here, logits of 16 bits would take those of fp32.
        weights_of_tile = tl.exp2(load_scaled(pointers, there, scale) - peaks_of_columns[None, :])
        mass = tl.sum(tl.where(there, weights_of_tile, 0.0), 0)
        tl.store(sums + segment, tl.sum(tl.reshape(mass, [OF_PROGRAM, RUN]), 1))


@triton.jit
def select_kernel(
    out,
    maxima,
    sums,
    listed,  # segments to read again [rows, segments]
    values,  # candidates [rows, CANDIDATES]
    tokens,  # of the candidates
    logits,
    seeds,
    steps,
    temperature,
    top_k,
    top_p,
    min_p,
    row_stride,
    vocabulary,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    TILES: tl.constexpr,  # of a row, rounded up to a power of two
    CANDIDATES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    GATHER: tl.constexpr,  # tokens read again at once
    BLOCK: tl.constexpr,  # candidates at once
    FEW: tl.constexpr,  # candidates that are compared each with every other, or twice as many
    AT_ONCE: tl.constexpr,  # of these
):
    TILE: tl.constexpr = LINES * COLUMNS
    SEGMENT: tl.constexpr = LINES * RUN
    OF_TILE: tl.constexpr = COLUMNS // RUN
    row = tl.program_id(0)
    segments = tl.cdiv(vocabulary, TILE) * OF_TILE
    row_logits = logits + row.to(tl.int64) * row_stride
    row_maxima, row_sums, row_listed = maxima + row * segments, sums + row * segments, listed + row * segments
    scale, k, p, share, greedy, summed = settings_of_row(row, temperature, top_k, top_p, min_p, vocabulary, TOP_K, TOP_P, MIN_P)
    seed = tl.load(seeds + row)
    step = tl.load(steps + row).to(tl.int32)
    of_tile = tl.arange(0, OF_TILE)
    all_segments = tl.arange(0, TILES)[:, None] * OF_TILE + of_tile[None, :]
    there = all_segments < segments
    if DEPENDENT:
        gdc_wait()  # the first kernel wrote nothing that was loaded so far
    peaks = tl.load(row_maxima + all_segments, mask=there, other=-3e38)
    largest = tl.max(peaks)
    if summed & (p >= 1):
        sum_of = tl.load(row_sums + all_segments, mask=there, other=0.0)
        winner = draw_of_all(row_logits, peaks, sum_of, all_segments, seed, step, scale, vocabulary, LINES, COLUMNS, RUN)
        tl.store(out + row, winner.to(tl.int64))
    else:
        bound = -1e37
        total = 0.0  # weight of a row without other filters
        if MIN_P:
            bound = tl.where(share > 0, largest + tl.log2(tl.where(share > 0, share, 1.0)), -1e37)
        if greedy:
            k = 1
            p = 1.0
            bound = largest
        elif k <= segments:
            bound = tl.maximum(bound, bound_of_top_k(peaks, largest, k))
        if summed:
            sum_of = tl.load(row_sums + all_segments, mask=there, other=0.0)
            weights = tl.where(there, sum_of * tl.exp2(peaks - largest), 0.0)
            total = tl.sum(weights)
            bound = bound_of_top_p(peaks, weights, largest, p, total, SEGMENT)
        reached = (peaks >= bound).to(tl.int32)
        of_column = tl.sum(reached, 0)
        place = (tl.cumsum(of_column, 0) - of_column)[None, :] + tl.cumsum(reached, 0) - 1
        tl.store(row_listed + place, all_segments, mask=reached > 0)
        again = tl.sum(of_column, 0)
        tl.debug_barrier()
        row_values, row_tokens = values + row * CANDIDATES, tokens + row * CANDIDATES
        count = read_again(
            row_values,
            row_tokens,
            row_listed,
            again,
            row_logits,
            bound,
            scale,
            vocabulary,
            LINES,
            COLUMNS,
            RUN,
            CANDIDATES,
            GATHER,
        )
        tl.debug_barrier()
        if count <= FEW:
            winner = draw_of_few(row_values, row_tokens, count, largest, total, k, p, seed, step, greedy, FEW, AT_ONCE)
        elif count <= 2 * FEW:
            winner = draw_of_few(row_values, row_tokens, count, largest, total, k, p, seed, step, greedy, 2 * FEW, AT_ONCE)
        elif greedy:
            winner = first_largest(row_logits, vocabulary, scale, largest, BLOCK)
        else:
            flat = (count > CANDIDATES).to(tl.int32)
            count = tl.where(flat != 0, vocabulary, count)
            winner = draw(row_values, row_tokens, row_logits, count, scale, flat, bound, largest, total, k, p, seed, step, BLOCK)
        tl.store(out + row, winner.to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def penalize_kernel(
    logits, tokens, counts, repetition, frequency, presence, row_stride, tokens_stride, vocabulary, count, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row.to(tl.int64) * tokens_stride + place, mask=place < count, other=-1)
    valid = (token >= 0) & (token < vocabulary)
    times = tl.load(counts + row.to(tl.int64) * tokens_stride + place, mask=valid, other=0).to(tl.float32)
    pointers = logits + row.to(tl.int64) * row_stride + token
    x = tl.load(pointers, mask=valid, other=0.0).to(tl.float32)
    factor = tl.load(repetition + row)
    x = tl.where(x > 0, tl.math.div_rn(x, tl.zeros_like(x) + factor), x * factor)
    x = x - tl.load(frequency + row) * times
    x = x - tl.where(times > 0, tl.load(presence + row), 0.0)
    tl.store(pointers, x.to(logits.dtype.element_ty), mask=valid)


def candidates(arch: int, key: Key) -> list[Config]:
    """Configurations of the second kernel, which do not affect its results. `key` is the number of bytes of a logit. With more
    than 128 registers a thread, two programs of eight warps would not fit a multiprocessor."""
    if arch == 0:
        return [config(GATHER=1024, BLOCK=1024, FEW=128, AT_ONCE=64)]
    return [
        config(8, GATHER=2048, BLOCK=1024, FEW=128, AT_ONCE=32),
        config(8, GATHER=2048, BLOCK=1024, FEW=128, AT_ONCE=16),
        config(8, GATHER=4096, BLOCK=1024, FEW=128, AT_ONCE=32),
        config(4, GATHER=2048, BLOCK=1024, FEW=128, AT_ONCE=32),
    ]


tunable = Tunable("sample", candidates)
PENALIZED = 512  # tokens of a program


def sample_triton(
    logits: Tensor,
    seeds: Tensor,
    steps: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    tokens: Tensor | None,
    counts: Tensor | None,
    repetition: Tensor | None,
    frequency: Tensor | None,
    presence: Tensor | None,
    chosen: dict[str, int] | None = None,
) -> Tensor:
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    if tokens is not None and tokens.numel():
        assert counts is not None and repetition is not None and frequency is not None and presence is not None
        penalize_kernel[(rows, -(-tokens.shape[1] // PENALIZED))](
            logits,
            tokens,
            counts,
            repetition,
            frequency,
            presence,
            logits.stride(0),
            tokens.stride(0),
            vocabulary,
            tokens.shape[1],
            BLOCK=PENALIZED,
            enable_fp_fusion=False,  # rounded after every operation, as torch does
        )
    arguments = chosen or tunable.arguments((logits.element_size(),), logits.device)
    dependent = architecture(logits.device) >= 90
    tiles = -(-vocabulary // TILE)
    segments = tiles * (COLUMNS // RUN)
    maxima, sums = torch.empty(2, rows, segments, dtype=torch.float32, device=logits.device)
    listed = torch.empty(rows, segments, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=logits.device)
    found = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=logits.device)
    settings = (
        temperature,
        temperature if top_k is None else top_k,
        temperature if top_p is None else top_p,
        temperature if min_p is None else min_p,
        logits.stride(0),
        vocabulary,
    )
    constants = {
        "TOP_K": top_k is not None,
        "TOP_P": top_p is not None,
        "MIN_P": min_p is not None,
        "LINES": LINES,
        "COLUMNS": COLUMNS,
        "RUN": RUN,
        "DEPENDENT": dependent,
    }
    summarize_kernel[(tiles * COLUMNS // WIDTH, rows)](
        maxima, sums, logits, *settings, **constants, WIDTH=WIDTH, num_warps=WIDTH * logits.element_size() // BYTES_OF_WARP
    )
    select_kernel[(rows,)](
        out,
        maxima,
        sums,
        listed,
        values,
        found,
        logits,
        seeds,
        steps,
        *settings,
        **constants,
        TILES=bucket(tiles),
        CANDIDATES=CANDIDATES,
        launch_pdl=dependent,
        **arguments,
    )
    return out
