"""vLLM endpoint under Ray Serve, disaggregated into prefill and decode engines, with KV blocks transferred over NIXL.

Public API: `serve` and the `Endpoint` that it yields. Both load on first use, so that the command line starts fast.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.serving.python_api import Endpoint, serve

__all__ = ["Endpoint", "serve"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from strata.serving import python_api

        return getattr(python_api, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
