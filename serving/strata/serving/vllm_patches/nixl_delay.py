"""A NIXL that waits instead of spinning.

NIXL's Python API hard-codes a delay of zero for its progress thread, which then polls without end: each idle engine
burns a core, and a laptop has two. With a delay the thread sleeps until UCX has an event, and a transfer is as fast as
before (measured: docs/results/serving.md). There is no setting for it, so the one value is changed on its way in. GPU hosts keep
the default: they have cores to spare, and RDMA gains from polling.
"""

import os
from typing import Any

DELAY_US = "STRATA_NIXL_DELAY_US"  # set in the environment of CPU engines; vLLM loads this plugin into their processes


def wait() -> None:
    if DELAY_US not in os.environ:
        return
    delay = int(os.environ[DELAY_US])
    from nixl import _api

    class PatientConfig(_api.nixlBind.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay if name == "pthrDelay" else value)

    _api.nixlBind.nixlAgentConfig = PatientConfig
