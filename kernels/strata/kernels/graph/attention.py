"""Causal and full attention by `scaled_dot_product_attention`, with the repetition of key heads that transformers writes out."""

import operator
from typing import Any

import torch
from torch import fx

from strata.kernels.graph.causal_mask import causal_window
from strata.kernels.graph.nodes import (
    DTYPES,
    argument,
    call,
    calls,
    heads_last,
    in_order,
    like,
    operation,
    require_no_mutation,
    same,
    tensor,
)
from strata.kernels.graph.record import NoMatch
from strata.kernels.graph.rewriting import Rewriting
from strata.kernels.ops.flash_attention.flash_attention import MAX_HEAD_DIM


def fuse(rewriting: Rewriting) -> None:
    for attention in calls(rewriting.graph, "scaled_dot_product_attention"):
        rewriting.attempt("flash_attention", attention, _replace)
    for softmax in calls(rewriting.graph, "softmax"):
        rewriting.attempt("flash_attention", softmax, _written_out)


def _written_out(rewriting: Rewriting, softmax: fx.Node) -> None:
    user: fx.Node | None = softmax
    while user is not None and operation(user) in ("softmax", "to", "dropout"):
        user = next(iter(user.users), None)
    if user is not None and operation(user) == "matmul":
        raise NoMatch("attention is written out in matrix products: load the model with attn_implementation='sdpa'")


def _replace(rewriting: Rewriting, attention: fx.Node) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    q, k, v, mask, dropout, causal = (argument(attention, place, name) for place, name in enumerate(names))
    options = dict(attention.kwargs)
    if dropout:
        raise NoMatch(f"attention has dropout ({dropout})")
    k, repeated_k = _once(k)
    v, repeated_v = _once(v)
    _check(q, k, v, attention, bool(options.get("enable_gqa")) or bool(repeated_k))
    if bool(repeated_k) != bool(repeated_v):
        raise NoMatch("only one of keys and values is repeated")
    causal, window, masking = _masking(mask, causal, q, k)
    scale = options.get("scale")
    scale = tensor(q).shape[-1] ** -0.5 if scale is None else scale
    if not isinstance(scale, float) or not scale > 0:
        raise NoMatch(f"the scale is {scale}")
    nodes = in_order(rewriting.graph, [*repeated_k, *repeated_v, attention])
    require_no_mutation(nodes[0], attention)

    def build() -> list[tuple[fx.Node, fx.Node]]:
        graph = rewriting.graph
        heads = [heads_last(x, attention) for x in (q, k, v)]
        arguments = (*heads, causal, window, scale, None, None)
        result = call(graph, torch.ops.strata.flash_attention.default, arguments, attention)
        out = like(graph.call_function(operator.getitem, (result, 0)), attention, tensor(attention).transpose(1, 2))
        return [(attention, like(graph.call_method("transpose", (out, 1, 2)), attention))]

    rewriting.replace("flash_attention", nodes, build, also=masking)


def _once(x: Any) -> tuple[Any, list[fx.Node]]:
    """Keys or values before transformers' `repeat_kv`: x[:, :, None].expand(...).reshape(...)."""
    if operation(x) != "reshape" or operation(x.args[0]) != "expand" or operation(x.args[0].args[0]) != "getitem":
        return x, []
    spread, inserted = x.args[0], x.args[0].args[0]
    source, full = inserted.args[0], slice(None, None, None)
    index = inserted.args[1]
    if index not in ((full, full, None, full, full), (full, full, None)) or tensor(source).dim() != 4:
        return x, []
    b, heads, s, e = tensor(source).shape
    expanded, wide = tensor(spread).shape, tensor(x).shape
    repeats = expanded[2]
    wanted = (b, heads * repeats, s, e)
    if len(wide) != 4 or not all(same(a, c) for a, c in zip(wide, wanted, strict=True)) or not same(expanded[3], s):
        return x, []
    return source, [inserted, spread, x]


def _check(q: Any, k: Any, v: Any, out: fx.Node, grouped: bool) -> None:
    shape, keys, values = (tensor(x).shape for x in (q, k, v))
    if len(shape) != 4 or len(keys) != 4 or len(values) != 4:
        raise NoMatch("queries, keys and values are not [batch, heads, tokens, head dimension]")
    if not all(same(a, b) for a, b in zip(keys, values, strict=True)) or not same(shape[3], keys[3]):
        raise NoMatch("queries, keys and values have different head dimensions")
    if not isinstance(shape[1], int) or not isinstance(keys[1], int) or not isinstance(shape[3], int):
        raise NoMatch("the number of heads or their dimension is not fixed")
    if shape[1] % keys[1] or (shape[1] != keys[1] and not grouped):
        raise NoMatch(f"{shape[1]} query heads cannot share {keys[1]} key heads")
    if shape[3] > MAX_HEAD_DIM:
        raise NoMatch(f"a head dimension of {shape[3]} is above {MAX_HEAD_DIM}")
    dtypes = {tensor(x).dtype for x in (q, k, v, out)}  # under autocast, the result has another
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise NoMatch(f"queries, keys, values and the result are {', '.join(sorted(map(str, dtypes)))}")


def _masking(mask: Any, causal: Any, q: fx.Node, k: fx.Node) -> tuple[bool, int | None, list[fx.Node]]:
    """(whether attention is causal, its window, the nodes that build the mask)"""
    if causal not in (None, False, True):
        raise NoMatch("is_causal is not a constant")
    queries, keys = tensor(q).shape[2], tensor(k).shape[2]
    if mask is None and not causal and isinstance(queries, int) and isinstance(keys, int) and keys <= queries:
        return False, None, []
    if not same(queries, keys):
        raise NoMatch("there are more keys than queries: a KV cache")
    if mask is None:
        return bool(causal), None, []
    if causal:
        raise NoMatch("there is a mask beside is_causal")
    return True, *causal_window(mask)
