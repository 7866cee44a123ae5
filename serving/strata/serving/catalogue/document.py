"""The models and aliases of an endpoint as one document, and its changes.

A model has revisions: one serves, one may start beside it with new weights, and those that were replaced end when their last
request has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from strata.serving.adapters.entry import Entry
from strata.serving.api.requests import ApiError

State = Literal["starting", "ready", "failed", "draining"]


@dataclass(frozen=True)
class Revision:
    """One set of weights and settings of a model."""

    id: str  # empty for what the endpoint was started with
    folder: str
    section: dict[str, Any]  # serve section of a recipe
    state: State = "starting"
    since: float = 0.0  # Unix time of the state
    reason: str = ""  # of a failure; or the progress of a start
    version: int = 0  # of the document in which it began to drain
    adapters: tuple[Entry, ...] | None = None  # from the start of the model; None: it has none
    origin: str = ""  # id of the model's first revision: all later ones have the adapters that are loaded on it

    @property
    def unfinished(self) -> bool:
        return self.state in ("starting", "draining")


@dataclass(frozen=True)
class Model:
    revisions: tuple[Revision, ...]  # oldest first
    main: bool = False  # requests without a model get it
    removed: bool = False

    def in_state(self, *states: State) -> tuple[Revision, ...]:
        return tuple(revision for revision in self.revisions if revision.state in states)

    @property
    def serving(self) -> Revision | None:
        return next(iter(self.in_state("ready")), None) if not self.removed else None


@dataclass(frozen=True)
class Catalogue:
    version: int = 0
    models: dict[str, Model] = field(default_factory=dict)
    aliases: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def main(self) -> str | None:
        return next((name for name, model in self.models.items() if model.main), None)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> "Catalogue":
        return msgspec.json.decode(data, type=Catalogue)

    def add(self, name: str, revision: Revision) -> "Catalogue":
        known = self.models.get(name)
        if name in self.aliases:
            raise ApiError(409, f"'{name}' is an alias. Remove it first, or choose another name.", param="name")
        if known is not None and known.removed:
            raise ApiError(409, f"The model '{name}' is still ending its last requests. Try again later.", param="name")
        if known is not None and known.in_state("starting", "ready"):
            raise ApiError(409, f"There is a model '{name}' already. Update it, or choose another name.", param="name")
        return self._with(name, Model((replace(revision, origin=revision.id),)))

    def update(self, name: str, revision: Revision) -> "Catalogue":
        model = self.require(name)
        if model.serving is None:
            raise ApiError(409, f"The model '{name}' does not serve yet.", param="name")
        if model.in_state("starting"):
            raise ApiError(409, f"An update of '{name}' is in progress.", param="name")
        latest = replace(revision, origin=model.serving.origin)
        return self._with(name, replace(model, revisions=(*model.in_state("ready", "draining"), latest)))

    def remove(self, name: str) -> "Catalogue":
        model = self.require(name)
        if model.main:
            message = f"'{name}' is the main model, which requests without a model get. Update it, or stop the endpoint."
            raise ApiError(409, message, param="name")
        using = [alias for alias, weights in self.aliases.items() if name in weights]
        if using:
            raise ApiError(409, f"The alias '{using[0]}' uses the model '{name}'. Remove the alias first.", param="name")
        ending = tuple(self._draining(revision) for revision in model.revisions)
        return self._with(name, replace(model, revisions=ending, removed=True))

    def alias(self, name: str, weights: Mapping[str, float]) -> "Catalogue":
        if name in self.models:
            raise ApiError(409, f"There is a model '{name}'. Choose another name for the alias.", param="name")
        for model in weights:
            if (known := self.models.get(model)) is None or known.serving is None:
                raise ApiError(404, f"No model '{model}' serves, so no alias can use it.", param="models")
        return replace(self, version=self.version + 1, aliases=self.aliases | {name: dict(weights)})

    def without_alias(self, name: str) -> "Catalogue":
        left = {alias: weights for alias, weights in self.aliases.items() if alias != name}
        return replace(self, version=self.version + 1, aliases=left)

    def progress(self, name: str, id: str, reason: str) -> "Catalogue":
        return self._change(name, id, lambda revision: replace(revision, reason=reason))

    def ready(self, name: str, id: str, now: float) -> "Catalogue":
        """The revision serves from now on. The one before drains."""
        model = self.models[name]
        revisions = tuple(
            replace(each, state="ready", reason="", since=now)
            if each.id == id
            else self._draining(each)
            if each.state == "ready"
            else each
            for each in model.revisions
        )
        return self._with(name, replace(model, revisions=revisions))

    def failed(self, name: str, id: str, reason: str, now: float) -> "Catalogue":
        return self._change(name, id, lambda revision: replace(revision, state="failed", reason=reason, since=now))

    def ended(self, name: str, id: str) -> "Catalogue":
        """A revision whose replicas are gone. A removed model goes with its last one."""
        model = self.models[name]
        left = tuple(revision for revision in model.revisions if revision.id != id)
        if left:
            return self._with(name, replace(model, revisions=left))
        others = {each: other for each, other in self.models.items() if each != name}
        return replace(self, version=self.version + 1, models=others)

    def require(self, name: str) -> Model:
        """Raises a 404."""
        model = self.models.get(name)
        if model is None or model.removed:
            known = ", ".join(f"'{each}'" for each, other in self.models.items() if not other.removed)
            raise ApiError(404, f"There is no model '{name}'. Models: {known}.", param="name")
        return model

    def find(self, name: str, id: str) -> Revision | None:
        model = self.models.get(name)
        return next((revision for revision in model.revisions if revision.id == id), None) if model is not None else None

    def _draining(self, revision: Revision) -> Revision:
        if revision.state == "draining":
            return revision
        return replace(revision, state="draining", reason="", version=self.version + 1)

    def _change(self, name: str, id: str, change: Any) -> "Catalogue":
        model = self.models[name]
        revisions = tuple(change(each) if each.id == id else each for each in model.revisions)
        return self._with(name, replace(model, revisions=revisions))

    def _with(self, name: str, model: Model) -> "Catalogue":
        return replace(self, version=self.version + 1, models=self.models | {name: model})
