"""A Grafana on this machine with our boards in it, where its program is installed. It needs no account: it listens to this
machine alone."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from strata.monitoring.prometheus.server import last_words
from strata.platform import processes
from strata.platform.errors import UserError
from strata.platform.files import write_atomic

DATA_SOURCE_UID = "strata-prometheus"  # the boards ask for it by this name
READY_S = 90.0  # the first start makes its database
HOW_TO_GET_IT = (
    "Grafana is not installed, so there are no boards here. Install it (grafana.com/grafana/download: a package, or the archive "
    "with its bin/ on PATH) and start this again: boards and data source set themselves up. Without it, 'strata top' shows "
    "the essentials in the terminal, and 'strata dashboards push --url URL --token TOKEN' fills any Grafana you have."
)


def find() -> list[str] | None:
    """The command that starts a server; since Grafana 9.4 it is `grafana server`."""
    if program := shutil.which("grafana"):
        return [program, "server"]
    if program := shutil.which("grafana-server"):
        return [program]
    return None


def boards_dir() -> Path:
    """In a wheel the boards lie inside their package; in a checkout where people look for them."""
    packaged = Path(__file__).parents[1] / "dashboards" / "generated"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "dashboards" / "generated"


def write_files(folder: Path, prometheus_url: str) -> Path:
    """Grafana's provisioning files. Returns their folder."""
    source = {
        "name": "Strata",
        "uid": DATA_SOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus_url,
        "isDefault": True,
        "jsonData": {"timeInterval": "5s", "httpMethod": "POST"},
    }
    boards = {
        "name": "Strata",
        "folder": "Strata",
        "type": "file",
        "allowUiUpdates": False,
        "options": {"path": str(boards_dir())},
    }
    files = {
        "datasources/strata.yaml": {"apiVersion": 1, "datasources": [source]},
        "dashboards/strata.yaml": {"apiVersion": 1, "providers": [boards]},
    }
    for name, content in files.items():
        write_atomic(folder / "provisioning" / name, yaml.safe_dump(content, sort_keys=False))
    return folder / "provisioning"


@contextmanager
def running(command: list[str], folder: Path, port: int, prometheus_url: str) -> Iterator[str]:
    provisioning = write_files(folder, prometheus_url)
    home = _home(Path(command[0]))
    settings = {
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "logs"),
        "GF_PATHS_PLUGINS": str(folder / "plugins"),
        "GF_PATHS_PROVISIONING": str(provisioning),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Editor",  # to explore; what is provisioned stays as it is
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }
    log = folder / "grafana.log"
    arguments = [*command, *(["--homepath", str(home)] if home else [])]
    with processes.started(arguments, log, env=os.environ | settings) as process:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + READY_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"Grafana did not start: {last_words(log)}", f"See {log}, or take grafana off PATH.")
            time.sleep(0.2)
        yield url


def _home(program: Path) -> Path | None:
    """Where its pages are: beside the program in an archive, in share/ in a package."""
    folders = (program.resolve().parents[1], Path("/usr/share/grafana"), program.parents[1] / "share" / "grafana")
    return next((folder for folder in folders if (folder / "public").is_dir()), None)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
