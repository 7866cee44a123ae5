"""Suppresses the raylet log that Ray prints on the driver's terminal when a raylet dies.

Ray prints the last 20 lines of that log even with `log_to_driver=False`. Commands report the death themselves, in one line
(`strata.platform.ray_cluster.watch`).

Written for Ray 2.60. No longer needed when `log_to_driver=False` covers `ray._private.worker.listen_error_messages`.
"""

from typing import Any

MESSAGE = "Raylet is terminated"  # in `ray._private.process_watcher.report_raylet_error_logs`


def suppress() -> None:
    """Lasts as long as the process. A second call has no effect."""
    import ray._private.worker as worker

    original = worker.print_to_stdstream
    if getattr(original, "without_raylet_log", False):
        return

    def show(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if not any(MESSAGE in line for line in data.get("lines", ())):
            original(data, *arguments, **options)

    show.without_raylet_log = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = show
