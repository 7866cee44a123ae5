"""Without a GPU, Triton's code runs in its interpreter. Triton decides that when a kernel is defined, so before all imports."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
