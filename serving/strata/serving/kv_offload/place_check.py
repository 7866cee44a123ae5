"""Checks that the tiers have their memory and their folder, before an engine starts and fails with less to say."""

import shutil
import tempfile
from pathlib import Path

from strata.platform.errors import UserError
from strata.serving.kv_offload.settings import GIB, KvOffload

SHARED_MEMORY = Path("/dev/shm")


def check(offload: KvOffload, shared_memory: Path = SHARED_MEMORY) -> None:
    """Raises UserError."""
    free = shutil.disk_usage(shared_memory).free
    if offload.cpu_bytes > free:
        cause = (
            f"serve.kv_offload.cpu_gib={offload.cpu_bytes / GIB:g} is more than the {free / GIB:.1f} GiB left in {shared_memory}."
        )
        raise UserError(cause, f"Lower it, or enlarge {shared_memory} (containers: --shm-size, or a memory volume).")
    if offload.folder is None:
        return
    try:
        Path(offload.folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=offload.folder) as probe:
            probe.write(b"0")
    except OSError as error:
        cause = f"serve.kv_offload.disk={offload.folder} cannot be written: {error.strerror or error}."
        raise UserError(cause, "Name a folder that the engines can write, or remove serve.kv_offload.disk.") from None
