"""Device `strata`: a PrivateUse1 backend for torch in C++, from which the backend of a new accelerator can start.

It has what torch expects of a device: a caching allocator, asynchronous streams and events, guards, generators, copies,
operators, a CPU fallback, meta kernels and autograd. The accelerator itself is missing: memory is the host's, and a kernel is a
CPU kernel on a thread of its stream. docs/device.md lists the parts to replace.

Public API: `load`, `fallbacks`, `clear_fallbacks`, `set_capacity` and `snapshot`; after `load`, the module `torch.strata`.
"""

from strata.kernels.device.build import BuildError
from strata.kernels.device.loading import load
from strata.kernels.device.state import Block, clear_fallbacks, fallbacks, set_capacity, snapshot

__all__ = ["Block", "BuildError", "clear_fallbacks", "fallbacks", "load", "set_capacity", "snapshot"]
