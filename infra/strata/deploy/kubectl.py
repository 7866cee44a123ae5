"""Runs kubectl, which includes kustomize."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from strata.platform.errors import UserError

Answer = subprocess.CompletedProcess[str]


def run(words: Sequence[str], stdin: str | None = None) -> Answer:
    return subprocess.run([_find(), *words], input=stdin, capture_output=True, text=True)


def run_checked(words: Sequence[str], stdin: str | None = None, fix: str = "Fix the reported error.") -> str:
    answer = run(words, stdin)
    if answer.returncode:
        raise failure(words, answer, fix)
    return answer.stdout


def failure(words: Sequence[str], answer: Answer, fix: str) -> UserError:
    reason = answer.stderr.strip() or answer.stdout.strip() or f"exit status {answer.returncode}"
    return UserError(f"'kubectl {words[0]}' failed: {reason}", fix)


def server_version() -> str | None:
    """Kubernetes version of the current context's cluster; None if there is none or it does not respond."""
    answer = run(["version", "--output=json", "--request-timeout=5s"])
    try:
        version = json.loads(answer.stdout).get("serverVersion")
    except json.JSONDecodeError:
        return None
    return str(version["gitVersion"]) if version else None


def context() -> str:
    return run(["config", "current-context"]).stdout.strip()


def _find() -> str:
    """Prefers kubectl of the Python environment, the version that the manifests are tested with, to the one on PATH."""
    own = Path(sys.executable).parent / "kubectl"
    found = str(own) if own.is_file() else shutil.which("kubectl")
    if found is None:
        raise UserError(
            "kubectl, which builds the manifests, is not installed.", "Run 'make setup', or install kubectl 1.30 or newer."
        )
    return found
