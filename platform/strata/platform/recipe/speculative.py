"""Section of speculative decoding."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from strata.platform.recipe.section import Positive, Section

REFUSED = {
    "suffix": "needs the package arctic-inference, which is not installed with Strata",
    "eagle": "drafts from the hidden states of the target, and no test covers its hand-over from a prefill pool",
}
REFUSED["eagle3"] = REFUSED["mtp"] = REFUSED["eagle"]


def _supported(method: Any) -> Any:
    if isinstance(method, str) and method in REFUSED:
        raise ValueError(f"method={method} {REFUSED[method]}: use ngram or draft")
    return method


class SpeculativeSection(Section):
    """Speculative decoding: drafts of several tokens, which the model verifies in one step."""

    method: Annotated[Literal["ngram", "draft"], BeforeValidator(_supported)] = Field(
        description="ngram: repeat what followed the last tokens earlier in the request; draft: a smaller model"
    )
    draft: str | None = Field(
        None, description="with method=draft: a run's name, a model folder, an id on Hugging Face or a bucket's URI"
    )
    tokens: Annotated[Positive, Field(le=16)] = Field(4, description="drafted tokens per step, at most")

    @model_validator(mode="after")
    def draft_belongs_to_its_method(self) -> Self:
        if self.method == "draft" and not self.draft:
            raise ValueError("method=draft needs draft, a run's name or a model folder")
        if self.method != "draft" and self.draft is not None:
            raise ValueError(f"draft={self.draft} is for method=draft, and method={self.method}")
        return self
