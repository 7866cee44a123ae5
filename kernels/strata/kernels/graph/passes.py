"""All patterns over one graph. Norms and rotations come first: their results are the inputs of attention and loss."""

from torch import fx

from strata.kernels.graph import attention, gated, loss, norms, rotary
from strata.kernels.graph.record import Record
from strata.kernels.graph.rewriting import Rewriting
from strata.kernels.ops import rope, swiglu  # noqa: F401 (registers the operators)
from strata.kernels.ops.flash_attention import flash_attention  # noqa: F401
from strata.kernels.ops.linear_cross_entropy import linear_cross_entropy  # noqa: F401
from strata.kernels.ops.rms_norm import rms_norm  # noqa: F401


def fuse(module: fx.GraphModule, record: Record) -> None:
    """Replaces every pattern of the module's graph by Strata's operation, in place."""
    rewriting = Rewriting(module.graph, record)
    for pattern in (norms, rotary, gated, attention, loss):
        pattern.fuse(rewriting)
    record.graphs += 1
    module.graph.lint()
    module.recompile()
