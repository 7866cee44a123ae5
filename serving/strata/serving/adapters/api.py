"""Requests of vLLM's admin API for adapters."""

from dataclasses import dataclass
from typing import Any

from strata.serving.api.requests import ApiError

LOAD_ROUTE, UNLOAD_ROUTE = ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@dataclass(frozen=True)
class Change:
    name: str
    folder: str | None  # None removes the adapter
    replace: bool
    model: str | None  # that the adapter is for, where an endpoint has several


def read(path: str, tree: dict[str, Any]) -> Change:
    """Raises a 400."""
    loads = path == LOAD_ROUTE
    known = {"lora_name", "model", "lora_int_id"} | ({"lora_path", "load_inplace"} if loads else set())
    if unknown := sorted(tree.keys() - known):
        raise ApiError(400, f"'{unknown[0]}' is not a parameter of {path}.", param=unknown[0])
    texts: dict[str, str | None] = {}
    for key, required in (("lora_name", True), ("lora_path", loads), ("model", False)):
        value = tree.get(key)
        if (value is None and required) or not isinstance(value, str | None) or value == "":
            raise ApiError(400, f"'{key}' must be a text.", param=key)
        texts[key] = value
    replace = tree.get("load_inplace", False)
    if not isinstance(replace, bool):
        raise ApiError(400, "'load_inplace' must be true or false.", param="load_inplace")
    assert texts["lora_name"] is not None
    return Change(texts["lora_name"], texts["lora_path"], replace, texts["model"])


def done(change: Change) -> str:
    """Text of vLLM's answer."""
    return f"Success: LoRA adapter '{change.name}' {'removed' if change.folder is None else 'added'} successfully."
