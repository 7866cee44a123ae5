"""GPUs and fabrics by name, and GPUs by the device name that their driver reports."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from strata.platform.hardware.catalogue_file import Catalogue, parse, read
from strata.platform.hardware.specs import Device, Fabric, Gpu

FOLDER = Path(__file__).parent


def gpu(name: str) -> Gpu:
    return _gpus().find("GPU", name)


def has_gpu(name: str) -> bool:
    return name in _gpus()


def gpu_names() -> list[str]:
    return list(_gpus().entries)


def fabric(name: str) -> Fabric:
    return _fabrics().find("fabric", name)


def fabric_names() -> list[str]:
    return list(_fabrics().entries)


def device_named(device_name: str) -> Device | None:
    """The entry whose pattern matches a driver's device name; None for an unknown card. A `Gpu` where the catalogue has the
    figures to plan with, else a `Device` that has peak rates only."""
    return next((each for each in _devices() if re.search(each.device, device_name, re.IGNORECASE)), None)


@cache
def _gpus() -> Catalogue[Gpu]:
    """Entries with a memory size can be planned for; the others only have peak rates."""
    return parse({name: entry for name, entry in _gpu_entries().items() if "memory" in entry}, Gpu, "gpus.yaml")


@cache
def _devices() -> list[Device]:
    """In the file's order, exact cards before families: the first match wins."""
    families = {name: entry for name, entry in _gpu_entries().items() if "memory" not in entry}
    return [*_gpus().entries.values(), *parse(families, Device, "gpus.yaml").entries.values()]


@cache
def _gpu_entries() -> dict[str, dict[str, Any]]:
    return read(FOLDER / "gpus.yaml")


@cache
def _fabrics() -> Catalogue[Fabric]:
    return parse(read(FOLDER / "fabrics.yaml"), Fabric, "fabrics.yaml")
