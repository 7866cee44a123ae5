"""Typed reads of a Hugging Face config.json, with errors that name the key and the value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from strata.platform.errors import UserError, shown

NO_WAY = "Use another model: Strata's model does not compute this."
CORRECT = "Correct it in config.json."


@dataclass(frozen=True)
class Config:
    """A config.json. A key that is absent has its family's default; null is a value of its own, as in transformers.

    Where a read names several keys, they are old and new names of one setting and the first that is present counts; the default
    is the first name's.
    """

    values: Mapping[str, Any]
    where: str  # folder or Hugging Face id, for errors
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def get(self, *keys: str) -> Any:
        for key in keys:
            if key in self.values:
                return self.values[key]
        return self.defaults.get(keys[0])

    def whole(self, *keys: str) -> int:
        value = self.get(*keys)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.wrong(keys[0], value, "is not a positive whole number")
        return value

    def optional_whole(self, *keys: str) -> int | None:
        return None if self.get(*keys) is None else self.whole(*keys)

    def count(self, key: str) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.wrong(key, value, "is not a whole number from 0 on")
        return value

    def number(self, *keys: str) -> float:
        value = self.get(*keys)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.wrong(keys[0], value, "is not a positive number")
        return float(value)

    def optional_number(self, *keys: str) -> float | None:
        return None if self.get(*keys) is None else self.number(*keys)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            self.wrong(key, value, "is neither true nor false")
        return value

    def tree(self, key: str) -> dict[str, Any]:
        """An object, empty for null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            self.wrong(key, value, "is not an object")
        return value or {}

    def require(self, key: str, *allowed: Any) -> None:
        """Refuses values of a key for which Strata's model has no switch."""
        if (value := self.get(key)) not in allowed:
            self.refuse(key, value)

    def refuse(self, key: str, value: object, fix: str = NO_WAY) -> NoReturn:
        raise UserError(f"{key}={shown(repr(value))} in the config.json of {self.where} is not supported.", fix)

    def wrong(self, key: str, value: object, problem: str) -> NoReturn:
        raise UserError(f"{key}={shown(repr(value))} in the config.json of {self.where} {problem}.", CORRECT)
