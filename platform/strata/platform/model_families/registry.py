"""Families by architecture and by name: every module in `families/` defines one."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from strata.platform.errors import UserError, shown
from strata.platform.model_families import families
from strata.platform.model_families.config import Config
from strata.platform.model_families.family import Family

# Ways to unquantized weights, by quantization method.
DEQUANTIZE = {
    "mxfp4": "Load it in transformers with quantization_config=Mxfp4Config(dequantize=True), save it with save_pretrained, and "
    "set model.from to that folder.",
}


@cache
def every() -> dict[str, Family]:
    modules = [importlib.import_module(f"{families.__name__}.{each.name}") for each in pkgutil.iter_modules(families.__path__)]
    return {module.FAMILY.name: module.FAMILY for module in modules}


def named(name: str) -> Family:
    family = every().get(name)
    if family is None:
        cause = f"model.family={shown(name)} is not a family that this version of Strata knows."
        raise UserError(cause, f"It knows {', '.join(sorted(every()))}.")
    return family


def answering(values: Mapping[str, Any], where: str) -> tuple[Family, Config]:
    """The family of a config.json, and the file with the family's defaults. Refuses what no family computes."""
    architecture = _architecture(values, where)
    known = {each: family for family in every().values() for each in family.architectures}
    if architecture not in known:
        related = {each: fix for family in every().values() for each, fix in family.refused.items()}
        fix = related.get(architecture, f"Use a model with one of: {', '.join(sorted(known))}.")
        raise UserError(f"{where} has the architecture {shown(architecture)}, which is not supported.", fix)
    family = known[architecture]
    config = Config(values, where, family.defaults)
    quantization = values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        fix = DEQUANTIZE.get(method, "") if isinstance(method, str) else ""
        config.refuse("quantization_config.quant_method", method, fix or "Use the model's unquantized weights.")
    return family, config


def _architecture(values: Mapping[str, Any], where: str) -> str:
    found = values.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        cause = f"architectures={shown(repr(found))} in the config.json of {where} does not name one architecture."
        raise UserError(cause, "Correct it in config.json: it decides how the model computes.")
    return found[0]
