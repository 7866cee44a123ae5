"""`torch.compile(backend="strata")`: Strata's operations in place of the patterns of a Dynamo graph, then Inductor for the rest.

The operations replace nodes before AOTAutograd, which therefore differentiates them by their own gradients.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from strata.kernels.graph.passes import fuse
from strata.kernels.graph.record import Record

TAILS = ("inductor", "aot_eager", "eager")
logger = logging.getLogger(__name__)


def strata(
    module: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Dynamo backend. Options are Inductor's, and two of its own: `record`, a `Record` to fill, and `tail`, the compiler of the
    resulting graph: inductor, aot_eager (autograd without compilation) or eager."""
    settings = dict(options or {})
    record = settings.pop("record", None) or Record()
    tail = settings.pop("tail", "inductor")
    if tail not in TAILS:
        raise ValueError(f"backend strata has the tails {', '.join(TAILS)}, got '{tail}'")
    fuse(module, record)
    logger.info("fused %s; left %d as they are", record.counts(), len(record.refused))
    if tail == "eager":
        return module.forward
    if tail == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(module, list(inputs))
    import torch._inductor
    from torch._inductor.compile_fx import compile_fx

    if mode not in (None, "default"):
        settings = {**torch._inductor.list_mode_options(mode), **settings}
    compiled: Any = compile_fx(module, list(inputs), config_patches=settings or None)
    return compiled  # type: ignore[no-any-return]
