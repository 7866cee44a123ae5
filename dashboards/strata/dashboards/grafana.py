"""Client of a Grafana server that converts every failure to an error with a cause and a fix.

The token is sent in the request header only. No message contains it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import requests
from grafana_client.api import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException, GrafanaServerError, TokenAuth

from strata.platform.errors import UserError

TIMEOUT_S = 15.0
OLDEST = 10  # the version of the dashboards' JSON
TOKEN_FIX = (
    "Create a token in Grafana (Administration, Users and access, Service accounts, role Admin). "
    "Pass it as --token or GRAFANA_TOKEN."
)

Json = dict[str, Any]


class Grafana:
    """The part of Grafana's HTTP API that a push needs. Reading an object that does not exist returns None."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise UserError("--url contains a user name or password.", f"Remove them. {TOKEN_FIX}")
        if parts.scheme not in ("http", "https") or not parts.hostname or not _is_port(parts):
            raise UserError(
                f"--url {url!r} is not the address of a web server.",
                "Write it as http://HOST:PORT, such as http://127.0.0.1:3000.",
            )
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            raise UserError("The token is empty, or contains spaces, line breaks or non-ASCII characters.", TOKEN_FIX)
        self.url = url.rstrip("/")
        self._token = token
        path = parts.path.strip("/")
        self._api = GrafanaApi(
            TokenAuth(token),
            host=f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
            port=parts.port,
            url_path_prefix=f"{path}/" if path else "",
            protocol=parts.scheme,
            timeout=TIMEOUT_S,
        )

    def version(self) -> str:
        """Version of Grafana. Raises if the server is not Grafana, or is too old for the dashboards."""
        health = self._read("report its health", self._api.health.check)
        version = health.get("version") if isinstance(health, dict) else None
        if not isinstance(version, str):
            raise self._no_grafana()
        if int(re.split(r"\D", version)[0] or 0) < OLDEST:
            raise UserError(f"{self.url} is Grafana {version}.", f"The dashboards need Grafana {OLDEST} or newer.")
        return version

    def folders(self) -> list[Json]:
        return self._list("list folders", self._api.folder.get_all_folders)

    def folder(self, uid: str) -> Json | None:
        return self._find("read the folder", lambda: self._api.folder.get_folder(uid))

    def create_folder(self, title: str, uid: str) -> None:
        self._write("create the folder", lambda: self._api.folder.create_folder(title, uid))

    def rename_folder(self, uid: str, title: str, version: int) -> None:
        self._write("rename the folder", lambda: self._api.folder.update_folder(uid, title, version))

    def data_source(self, uid: str) -> Json | None:
        return self._find("read the data source", lambda: self._api.datasource.get_datasource_by_uid(uid))

    def create_data_source(self, source: Json) -> None:
        self._write("create the data source", lambda: self._api.datasource.create_datasource(source))

    def update_data_source(self, uid: str, source: Json) -> None:
        self._write("change the data source", lambda: self._api.datasource.update_datasource_by_uid(uid, source))

    def board(self, uid: str) -> Json | None:
        return self._find("read a dashboard", lambda: self._api.dashboard.get_dashboard(uid))

    def board_versions(self, uid: str) -> list[Json]:
        """Versions of a dashboard, newest first."""
        answer = self._read("read a dashboard's history", lambda: self._api.dashboard_versions.get_dashboard_versions_by_uid(uid))
        versions = answer["versions"] if isinstance(answer, dict) else answer  # a bare list before Grafana 11
        return sorted(versions, key=lambda version: int(version["version"]), reverse=True)

    def save_board(self, body: Json) -> None:
        self._write("save a dashboard", lambda: self._api.dashboard.update_dashboard(body))

    def alert_rules(self) -> list[Json]:
        return self._list("list alert rules", self._api.alertingprovisioning.get_alertrules_all)

    def alert_group(self, folder_uid: str, name: str) -> Json | None:
        group = quote(name, safe="")
        return self._find("read alert rules", lambda: self._api.alertingprovisioning.get_rule_group(folder_uid, group))

    def save_alert_group(self, folder_uid: str, body: Json) -> None:
        group = quote(body["title"], safe="")
        self._write("save alert rules", lambda: self._api.alertingprovisioning.update_rule_group(folder_uid, group, body))

    def _find(self, doing: str, call: Callable[[], Any]) -> Json | None:
        with self._explained(doing):
            try:
                answer = call()
            except GrafanaClientError as error:
                if error.status_code == 404:
                    return None
                raise
            found: Json = self._checked(answer, dict)
            return found

    def _list(self, doing: str, call: Callable[[], Any]) -> list[Json]:
        with self._explained(doing):
            found: list[Json] = self._checked(call(), list)
            return found

    def _read(self, doing: str, call: Callable[[], Any]) -> Any:
        with self._explained(doing):
            return self._checked(call(), (dict, list))

    def _write(self, doing: str, call: Callable[[], Any]) -> None:
        self._read(doing, call)

    def _checked(self, answer: Any, kind: type | tuple[type, ...]) -> Any:
        """Raises if the response is not JSON of this kind, such as a proxy's login page with status 200."""
        if not isinstance(answer, kind):
            raise self._no_grafana()
        return answer

    def _no_grafana(self) -> UserError:
        return UserError(
            f"The server at {self.url} is not Grafana.",
            "Set --url to Grafana's own address, including its path: https://host/grafana. A proxy may return a login page.",
        )

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except requests.exceptions.SSLError as error:
            raise UserError(
                f"The TLS connection to {self.url} failed: {getattr(error.args[0], 'reason', error)}",
                "For a private certificate authority, set REQUESTS_CA_BUNDLE=authority.pem. For a server without TLS, use --url http://...",
            ) from None
        except (requests.exceptions.JSONDecodeError, requests.exceptions.TooManyRedirects):
            raise self._no_grafana() from None
        except requests.exceptions.RequestException as error:
            raise UserError(
                f"No response from {self.url} ({type(error).__name__}).",
                "Check the address and that Grafana is running. On Kubernetes: kubectl port-forward service/grafana 3000:80",
            ) from None
        except GrafanaException as error:
            raise self._refused(doing, error) from None

    def _refused(self, doing: str, error: GrafanaException) -> UserError:
        message = self._clean(_message(error))
        cause = f"{self.url} refused to {doing} ({error.status_code}): {message}"
        if isinstance(error, GrafanaServerError):
            return UserError(cause, "Grafana failed; see its log. It is safe to push again.")
        fixes = {
            401: f"The token is invalid or expired. {TOKEN_FIX}",
            403: f"The token lacks the permission. {TOKEN_FIX}",
            404: f"Check that {self.url} includes Grafana's path, and that unified alerting is enabled.",
            409: "It was changed by someone else, or the name is in use. Check it in Grafana, then push again.",
            412: "It was changed in Grafana during the push, or the name is in use. Push again to see the difference.",
        }
        return UserError(cause, fixes.get(error.status_code, "Grafana's message names the reason."))

    def _clean(self, text: str) -> str:
        return text.replace(self._token, "(token)")


def _is_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _message(error: GrafanaException) -> str:
    answer = error.response
    message = answer.get("message") if isinstance(answer, dict) else answer
    return " ".join(str(message or error.message).split())[:300]
