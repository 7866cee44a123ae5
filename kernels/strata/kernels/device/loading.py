"""Loads device `strata` into the process, once."""

import atexit
from functools import cache

import torch
from torch.utils import backend_registration

from strata.kernels.device import module
from strata.kernels.device.build import library


@cache
def load() -> None:
    """Makes the device known to torch as `strata`. Builds its library if need be, which takes about a minute."""
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", "strata"):
        raise RuntimeError(
            f"torch supports one PrivateUse1 device, and this process has '{name}'. Load strata in another process."
        )
    torch.ops.load_library(library())
    backend_registration.rename_privateuse1_backend("strata")
    torch._register_device_module("strata", module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(torch.ops.strata_device.drain)
