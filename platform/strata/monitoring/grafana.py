"""Local Grafana server with the Strata dashboards, if Grafana is installed.

It needs no account, because it listens on the loopback address only.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from strata.monitoring.prometheus.server import last_line
from strata.platform import processes
from strata.platform.errors import UserError
from strata.platform.files import write_atomic

DATA_SOURCE_UID = "strata-prometheus"  # the dashboards refer to this UID
READY_S = 90.0  # the first start creates its database
HOW_TO_GET_IT = (
    "Grafana is not installed, so no dashboards are served. Install it (grafana.com/grafana/download: a package, or the archive "
    "with its bin/ on PATH) and run 'strata monitor' again: it provisions the data source and the dashboards. Without Grafana, "
    "'strata top' shows the key figures in the terminal, and 'strata dashboards push --url URL --token TOKEN' pushes the "
    "dashboards to another Grafana."
)


def find() -> list[str] | None:
    """Returns the command that starts a server: `grafana server` since Grafana 9.4, or `grafana-server`."""
    if program := shutil.which("grafana"):
        return [program, "server"]
    if program := shutil.which("grafana-server"):
        return [program]
    return None


def boards_dir() -> Path:
    """Folder of the generated dashboards: inside the package in a wheel, `dashboards/generated` in a checkout."""
    packaged = Path(__file__).parents[1] / "dashboards" / "generated"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "dashboards" / "generated"


def write_files(folder: Path, prometheus_url: str) -> Path:
    """Writes Grafana's provisioning files. Returns their folder."""
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
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Editor",  # allows Explore; provisioned dashboards stay read-only
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
                raise UserError(f"Grafana did not start: {last_line(log)}", f"See {log}, or remove grafana from PATH.")
            time.sleep(0.2)
        yield url


def _home(program: Path) -> Path | None:
    """Folder with Grafana's web assets: beside the program in an archive, in share/ in a package."""
    folders = (program.resolve().parents[1], Path("/usr/share/grafana"), program.parents[1] / "share" / "grafana")
    return next((folder for folder in folders if (folder / "public").is_dir()), None)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
