"""vLLM's `speculative_config` for each pool.

Decode engines speculate. With a draft model, prefill engines load it too: NIXL transfers the KV blocks of all layers of an
engine and requires the same layers on both sides. A prefill engine drafts nothing; it only computes the draft's KV cache of the
prompt, which moves with the blocks.

The table by batch size is always set. Without one, vLLM 0.29 pads the first step of a sequence whose prompt is already computed
(after a transfer, or a hit in the prefix cache) with drafts of token -1, which its synchronous runner looks up in the embedding.
"""

from dataclasses import dataclass
from typing import Any, Literal

from strata.platform.recipe import ServeSection
from strata.serving.speculation import draft

SCHEDULERS = "strata.serving.speculation.scheduler"
OFF = "strata_without_drafts"  # in `extra_args` of a request's sampling parameters
NGRAM = (2, 5)  # shortest and longest run of tokens that is looked up


@dataclass(frozen=True)
class Speculation:
    """Speculation of an engine. `tokens` is 0 in a prefill engine."""

    method: Literal["ngram", "draft"]
    tokens: int
    draft_dir: str | None

    def config(self, max_sequences: int) -> dict[str, Any]:
        common: dict[str, Any] = {
            "num_speculative_tokens": max(1, self.tokens),
            "num_speculative_tokens_per_batch_size": [[1, max_sequences, self.tokens]],
        }
        if self.method == "ngram":
            return common | {"method": "ngram", "prompt_lookup_min": NGRAM[0], "prompt_lookup_max": NGRAM[1]}
        return common | {"method": "draft_model", "model": self.draft_dir}

    def scheduler(self, asynchronous: bool) -> str | None:
        """Class of vLLM's scheduler, for an engine that drafts."""
        return f"{SCHEDULERS}.{'MeasuredAsyncScheduler' if asynchronous else 'MeasuredScheduler'}" if self.tokens else None


def of(serve: ServeSection, role: Literal["prefill", "decode"]) -> Speculation | None:
    section = serve.speculative
    if section is None or (role == "prefill" and section.method == "ngram"):
        return None
    place = str(draft.folder(section.draft)) if section.draft is not None else None
    return Speculation(section.method, section.tokens if role == "decode" else 0, place)
