"""vLLM's `speculative_config` for each pool.

Decode engines speculate. On a CPU, dense draft models run in Strata's own drafter (`cpu_drafter.py`), of which a prefill engine
knows nothing. With a draft model that vLLM runs, prefill engines load it too: NIXL transfers the KV blocks of all layers of an
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
CPU_DRAFTER = "strata.serving.speculation.cpu_drafter.CpuDrafter"
OFF = "strata_without_drafts"  # in `extra_args` of a request's sampling parameters
DRAFT_DIR = "strata_draft_dir"  # in vLLM's `additional_config`
NGRAM = (2, 5)  # shortest and longest run of tokens that is looked up


@dataclass(frozen=True)
class Speculation:
    """Speculation of an engine. `tokens` is 0 in a prefill engine."""

    method: Literal["ngram", "draft", "cpu-draft"]
    tokens: int
    draft_dir: str | None

    def engine_arguments(self, max_sequences: int) -> dict[str, Any]:
        config: dict[str, Any] = {
            "num_speculative_tokens": max(1, self.tokens),
            "num_speculative_tokens_per_batch_size": [[1, max_sequences, self.tokens]],
        }
        further = {}
        if self.method == "ngram":
            config |= {"method": "ngram", "prompt_lookup_min": NGRAM[0], "prompt_lookup_max": NGRAM[1]}
        elif self.method == "draft":
            config |= {"method": "draft_model", "model": self.draft_dir}
        else:
            config |= {"method": "custom_class", "model": CPU_DRAFTER}
            further = {"additional_config": {DRAFT_DIR: self.draft_dir}}
        return {"speculative_config": config} | further

    def scheduler(self, asynchronous: bool) -> str | None:
        """Class of vLLM's scheduler, for an engine that drafts."""
        return f"{SCHEDULERS}.{'MeasuredAsyncScheduler' if asynchronous else 'MeasuredScheduler'}" if self.tokens else None


def of(serve: ServeSection, role: Literal["prefill", "decode"]) -> Speculation | None:
    section = serve.speculative
    if section is None:
        return None
    place = draft.folder(section.draft) if section.draft is not None else None
    method = "cpu-draft" if place is not None and draft.on_cpu(serve, place) else section.method
    if role == "prefill" and method != "draft":
        return None
    return Speculation(method, section.tokens if role == "decode" else 0, str(place) if place is not None else None)
