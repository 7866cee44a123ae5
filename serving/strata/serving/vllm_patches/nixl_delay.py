"""Makes NIXL's progress thread sleep between polls on CPU hosts.

NIXL's Python API hard-codes a delay of zero for its progress thread, which then polls continuously: each idle engine uses a
whole core, and a laptop may have two. With a delay the thread sleeps until UCX has an event, and transfers are as fast as
before (measured: docs/results/serving.md). There is no setting, so the value is replaced when it is assigned. GPU hosts use the
default: they have spare cores, and RDMA benefits from polling.

Written for NIXL 1.3. No longer needed when `nixl_agent_config` has a setting for the delay; the test of this file fails then.
"""

import os
from typing import Any

DELAY_US = "STRATA_NIXL_DELAY_US"  # set for CPU engines; vLLM loads this plugin in their processes


def install() -> None:
    """Installs the delay if DELAY_US is set. Entry point of the plugin."""
    if DELAY_US not in os.environ:
        return
    delay = int(os.environ[DELAY_US])
    from nixl import _api

    class DelayedConfig(_api.nixlBind.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay if name == "pthrDelay" else value)

    _api.nixlBind.nixlAgentConfig = DelayedConfig
