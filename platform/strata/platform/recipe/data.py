"""Sections of the data."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from strata.platform.recipe.section import Section

DataKind = Literal["text", "chat", "completion", "preference"]


def _local(path: Path) -> Path:
    """Refuses a URI, which a path would silently shorten: `s3://bucket` becomes `s3:/bucket`."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise ValueError(f"'{path}' is a URI: write it as uri in data.sets")
    return path


LocalPath = Annotated[Path, AfterValidator(_local)]
LEAST_SHARE = 1e-4  # of the rows, for a set: a block of the data order has some of each


class DataSetSection(Section):
    """One of several sets of examples that a run mixes by weight."""

    name: Annotated[str, Field(min_length=1)] | None = Field(None, description="name in messages; unset: from path, uri or hf")
    path: LocalPath | None = Field(
        None, description="file, folder, glob, or folder of a Hugging Face dataset that save_to_disk has written"
    )
    uri: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9+.-]*://.")] | None = Field(
        None, description="fsspec URI of a file, folder or glob (s3://, gs://, https://); downloaded once"
    )
    hf: str | None = Field(None, description="Hugging Face dataset id")
    hf_config: str | None = Field(None, description="configuration of the Hugging Face dataset")
    hf_split: str = Field("train", description="split of the Hugging Face dataset")
    kind: DataKind = Field("text", description="contents of a row")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="share of the rows, relative to the others"
    )
    text_field: str = Field("text", description="field with the text (kind=text)")

    @model_validator(mode="after")
    def one_source(self) -> Self:
        given = [key for key in ("path", "uri", "hf") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: keep one" if given else "a set needs path, uri or hf")
        return self

    @property
    def title(self) -> str:
        """Name of the set in messages."""
        source = self.name or self.hf or str(self.path or self.uri)
        return source if self.name or self.hf else source.rstrip("/").rsplit("/", 1)[-1]


class DataSection(Section):
    """Corpus. Without `path`, `hf` or `sets` it is the source code of the Python standard library."""

    path: LocalPath | None = Field(None, description="text, JSONL or Parquet file, or a folder of them")
    hf: str | None = Field(None, description="Hugging Face dataset id")
    hf_config: str | None = Field(None, description="configuration of the Hugging Face dataset")
    hf_split: str = Field("train", description="split of the Hugging Face dataset")
    text_field: str = Field("text", description="field with the text in JSONL, Parquet and Hugging Face datasets")
    holdout: Annotated[float, Field(gt=0, lt=0.5)] = Field(0.05, description="share of the documents held out for validation")
    kind: DataKind = Field(
        "text", description="contents of path or hf: text, chat messages, prompt and completion, or compared or labelled answers"
    )
    sets: tuple[DataSetSection, ...] = Field((), description="several sets, mixed by weight; excludes path and hf")
    pack: bool = Field(True, description="several documents in a row of model.context tokens; attention never crosses them")
    chat_template: Path | None = Field(None, description="file with a Jinja chat template; unset: the model's own")
    mask: Literal["assistant", "all"] = Field(
        "assistant", description="tokens that count in the loss; assistant: the answers and their end of turn"
    )
    on_long: Literal["drop", "truncate"] = Field(
        "drop", description="examples longer than model.context; long texts are always split"
    )

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if self.path and self.hf:
            raise ValueError("path and hf exclude each other: remove one")
        if self.sets and (self.path or self.hf):
            raise ValueError(f"sets and {'path' if self.path else 'hf'} exclude each other: remove one")
        if self.sets and self.kind != "text":
            raise ValueError(f"kind={self.kind} belongs to each of the sets: move it there")
        if self.kind != "text" and not (self.path or self.hf):
            raise ValueError(f"kind={self.kind} needs path or hf")
        return self

    @model_validator(mode="after")
    def sets_mix(self) -> Self:
        titles = [one.title for one in self.sets]
        if twice := next((title for title in titles if titles.count(title) > 1), None):
            raise ValueError(f"two sets are named '{twice}': set their name")
        preferences = [one.kind == "preference" for one in self.sets] or [self.kind == "preference"]
        if any(preferences) and not all(preferences):
            raise ValueError("kind=preference cannot be mixed with other kinds: their losses differ")
        if any(preferences) and self.mask == "all":
            raise ValueError("mask=all is not for kind=preference: only answers are compared")
        for one in self.sets:
            if one.weight < LEAST_SHARE * sum(other.weight for other in self.sets):
                raise ValueError(f"weight={one.weight:g} of '{one.title}' is below {LEAST_SHARE:g} of all weights")
        return self

    @property
    def all_sets(self) -> tuple[DataSetSection, ...]:
        """The sets, or the one set that `path` or `hf` describes; none for the standard library."""
        if self.sets or not (self.path or self.hf):
            return self.sets
        shared = {key: getattr(self, key) for key in ("path", "hf", "hf_config", "hf_split", "kind", "text_field")}
        return (DataSetSection(**shared),)
