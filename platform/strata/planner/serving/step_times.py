"""Times of mixed engine steps as plain numbers, for simulations that evaluate millions of them.

`engine_step.py` has the formulas, as lines of a worksheet. A step that only decodes takes the same time as there, and so does a
prompt alone in one step; a step with both adds its tokens up before the slower of reading weights and matrix products is taken.
"""

import math
from functools import lru_cache

from strata.planner.serving.engine_step import CUSTOM_S, CUSTOM_SHARE, LIBRARY_S, LIBRARY_SHARE
from strata.planner.worksheet import Worksheet


class StepTimes:
    """Step times of the engine that `engine_step.describe` wrote to a worksheet."""

    def __init__(self, engine: Worksheet) -> None:
        e = engine
        self._fixed_s = e["host_s"] + e["kernels_s"]
        self._sequence_s = e["host_s_per_sequence"]
        self._least_s, self._least_sequence_s = e["least_s"], e["least_s_per_sequence"]
        common_bytes = e["common_weights"] * e["bytes_per_weight"] + 2 * e["vocab"] * e["hidden"]
        self._common_s = common_bytes / e["tensor"] / e["memory_rate"]
        self._routed_s = e["routed_weights"] * e["bytes_per_weight"] / e["tensor"] / e["memory_rate"]
        self._idle_share = 1 - e["top_k"] / e["experts"]  # experts that one token does not activate
        self._token_s = e["flops_per_token"] / e["matrix_rate"]
        self._head_s = 2 * e["vocab"] * e["hidden"] / e["tensor"] / e["matrix_rate"]
        self._elementwise_s = e["elementwise_bytes"] / e["memory_rate"]
        self._context_s = max(e["kv_bytes_per_token"] / e["memory_rate"], e["decode_pair_flops"] / e["attention_rate"])
        self._pair_s = e["prefill_pair_flops"] / e["attention_rate"]
        self._all_reduces = 2 * e["layers"] if e["tensor"] > 1 else 0.0
        self._wire_s = 2 * (e["tensor"] - 1) / e["tensor"] * 2 * e["hidden"] / e["link"]
        self.decode_terms = lru_cache(maxsize=None)(self._decode_terms)

    @property
    def gpu_terms(self) -> dict[str, float]:
        """Seconds of a decoding sequence without attention, of a token of its context, and of a query-key pair of a prompt."""
        return {"sequence_s": self._elementwise_s, "context_token_s": self._context_s, "prompt_pair_s": self._pair_s}

    def _decode_terms(self, sequences: int) -> tuple[float, float]:
        """Seconds of a decode step of `sequences` sequences: a constant, and a factor of their context tokens."""
        return self._without_attention(sequences, 0), self._context_s

    def step(self, sequences: float, context: float, tokens: float, pairs: float, _prompts: float = 0.0, /) -> float:
        """Seconds of one step. `sequences` decode over `context` tokens in total, and `tokens` prompt tokens are prefilled with
        `pairs` query-key pairs, in any number of prompts."""
        gpu_s = self._without_attention(sequences, tokens) + context * self._context_s + pairs * self._pair_s
        return max(gpu_s, self.least(sequences))

    def least(self, sequences: float, /) -> float:
        """Seconds that the host needs for a step, beside the GPU."""
        return self._least_s + sequences * self._least_sequence_s

    def _without_attention(self, sequences: float, tokens: float) -> float:
        count = sequences + tokens
        weights_s = self._common_s + self._routed_s * (1 - math.pow(self._idle_share, count))
        matrix_s = max(weights_s, count * self._token_s + sequences * self._head_s)
        return (
            matrix_s
            + count * self._elementwise_s
            + self._all_reduce_s(count)
            + self._fixed_s
            + sequences * self._sequence_s
        )  # fmt: skip

    def _all_reduce_s(self, tokens: float) -> float:
        wire_s = tokens * self._wire_s
        return self._all_reduces * min(CUSTOM_S + wire_s / CUSTOM_SHARE, LIBRARY_S + wire_s / LIBRARY_SHARE)
