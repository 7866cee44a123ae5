"""Loads device `strata` into the process, once."""

import atexit
from functools import cache

import torch

from strata.kernels.device import module
from strata.kernels.device.build import library


@cache
def load() -> None:
    """Makes the device known to torch as `strata`. Builds its library if need be, which takes about a minute."""
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "strata"):
        raise RuntimeError(f"this process has another device of its own, '{name}'; torch supports one. Load strata in another process.")
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend("strata")
    torch._register_device_module("strata", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(torch.ops.strata_device.drain)
