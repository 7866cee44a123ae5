"""Fake Grafana server with the HTTP endpoints that a push uses.

It follows Grafana's documentation and source: tokens, permissions, versions, conflicts, and fields that Grafana adds.
"""

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

Json = dict[str, Any]
Answer = tuple[int, Any]

ADMIN, VIEWER = "admin-token", "viewer-token"
PERMISSION = "You'll need additional permissions to perform this action. Permissions needed: "


class Store:
    """State of the server. Tests change it as users, files and other tools would."""

    def __init__(self) -> None:
        self.version = "12.3.1"
        self.prefix = ""  # of the path, if Grafana is served below one
        self.folders: dict[str, Json] = {}
        self.sources: dict[str, Json] = {}
        self.boards: dict[str, Json] = {}
        self.history: dict[str, list[Json]] = {}
        self.groups: dict[tuple[str, str], Json] = {}
        self.writes: list[str] = []
        self.before_write: Callable[[], None] = lambda: None  # another user's change between read and write
        self.bare_history = False  # response format of Grafana 10
        self.broken: Answer | None = None

    def edit_by_hand(self, uid: str, message: str = "") -> None:
        board = copy.deepcopy(self.boards[uid])
        board["dashboard"]["panels"][1]["title"] = "Mine"
        self._store(uid, board["dashboard"], board["meta"]["folderUid"], message, "editor")

    def _store(self, uid: str, dashboard: Json, folder: str, message: str, by: str) -> int:
        version = self.boards[uid]["dashboard"]["version"] + 1 if uid in self.boards else 1
        stored = {**copy.deepcopy(dashboard), "id": 7, "version": version}
        self.boards[uid] = {"dashboard": stored, "meta": {"folderUid": folder, "provisioned": False, "version": version}}
        self.history.setdefault(uid, []).insert(0, {"id": version, "version": version, "message": message, "createdBy": by})
        return version

    def get_folders(self) -> Answer:
        return 200, [{key: folder[key] for key in ("id", "uid", "title")} for folder in self.folders.values()]

    def get_folder(self, uid: str) -> Answer:
        return (200, self.folders[uid]) if uid in self.folders else (404, {"message": "folder not found", "status": "not-found"})

    def post_folder(self, body: Json) -> Answer:
        if body["uid"] in self.folders:
            return 412, {"message": "The folder has been changed by someone else", "status": "version-mismatch"}
        self.folders[body["uid"]] = {"id": len(self.folders) + 1, "version": 1, **body}
        return 200, self.folders[body["uid"]]

    def put_folder(self, uid: str, body: Json) -> Answer:
        if body.get("version") != self.folders[uid]["version"]:
            return 412, {"message": "The folder has been changed by someone else", "status": "version-mismatch"}
        self.folders[uid] |= {"title": body["title"], "version": body["version"] + 1}
        return 200, self.folders[uid]

    def get_source(self, uid: str) -> Answer:
        return (200, self.sources[uid]) if uid in self.sources else (404, {"message": "Data source not found"})

    def post_source(self, body: Json) -> Answer:
        if any(source["name"] == body["name"] for source in self.sources.values()):
            return 409, {"message": "data source with the same name already exists"}
        self.sources[body["uid"]] = {"id": 1, "orgId": 1, "version": 1, "readOnly": False, "isDefault": False, **body}
        return 200, {"id": 1, "message": "Datasource added", "name": body["name"]}

    def put_source(self, uid: str, body: Json) -> Answer:
        if body.get("version", 0) not in (0, self.sources[uid]["version"]):
            return 409, {"message": "Datasource has already been updated by someone else. Please reload and try again"}
        self.sources[uid] = {**body, "version": self.sources[uid]["version"] + 1}
        return 200, {"message": "Datasource updated", "id": 1}

    def get_board(self, uid: str) -> Answer:
        return (200, self.boards[uid]) if uid in self.boards else (404, {"message": "Dashboard not found"})

    def get_history(self, uid: str) -> Answer:
        found = self.history.get(uid, [])
        return 200, found if self.bare_history else {"continueToken": "", "versions": found}

    def post_board(self, body: Json) -> Answer:
        board = body["dashboard"]
        uid, there = board["uid"], self.boards.get(board["uid"])
        if body["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        if there and there["meta"]["provisioned"]:
            return 400, {"message": "Cannot save provisioned dashboard"}
        if there and not body["overwrite"] and there["dashboard"]["version"] != board["version"]:
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        version = self._store(uid, board, body["folderUid"], body["message"], "sa-strata")
        return 200, {"id": 7, "uid": uid, "url": f"/d/{uid}", "status": "success", "version": version}

    def get_rules(self) -> Answer:
        return 200, [rule for group in self.groups.values() for rule in group["rules"]]

    def get_group(self, folder: str, name: str) -> Answer:
        return (200, self.groups[folder, name]) if (folder, name) in self.groups else (404, {"message": "rule group not found"})

    def put_group(self, folder: str, name: str, body: Json) -> Answer:
        if folder not in self.folders:
            return 404, {"message": "folder does not exist"}
        if body["interval"] % 10:
            return 400, {"message": f"rule evaluation interval ({body['interval']}s) should be positive and a multiple of 10s"}
        added = {"id": 3, "orgID": 1, "updated": "2026-01-01T00:00:00Z", "provenance": "api", "notification_settings": None}
        self.groups[folder, name] = {**body, "rules": [{**copy.deepcopy(rule), **added} for rule in body["rules"]]}
        return 200, self.groups[folder, name]


class _Handler(BaseHTTPRequestHandler):
    store: Store

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        body = json.loads(raw) if self.command != "GET" and raw else {}
        status, answer = self._answer(self.path, body)
        kind = "text/html" if isinstance(answer, str) else "application/json"
        sent = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def _answer(self, path: str, body: Json) -> Answer:
        store = self.store
        if store.broken is not None:
            return store.broken
        if not path.startswith(f"{store.prefix}/api/"):
            return 404, "<html>not here</html>"
        path = path.removeprefix(store.prefix)
        if path == "/api/health":
            return 200, {"database": "ok", "version": store.version, "commit": "abc"}
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (ADMIN, VIEWER):
            return 401, {"message": "Invalid API key"}
        for method, pattern, action in _routes(store):
            found = re.fullmatch(pattern, path)
            if self.command == method and found:
                parts = [unquote(part) for part in found.groups()]
                if method == "GET":
                    return action(*parts)
                if token == VIEWER:
                    return 403, {"message": PERMISSION + "folders:create"}
                store.before_write()
                store.writes.append(path)
                return action(*parts, body)
        return 404, {"message": "Not found"}


def _routes(store: Store) -> list[tuple[str, str, Callable[..., Answer]]]:
    group = r"/api/v1/provisioning/folder/([^/]+)/rule-groups/([^/]+)"
    return [
        ("GET", "/api/folders", store.get_folders),
        ("GET", "/api/folders/([^/]+)", store.get_folder),
        ("POST", "/api/folders", store.post_folder),
        ("PUT", "/api/folders/([^/]+)", store.put_folder),
        ("GET", "/api/datasources/uid/([^/]+)", store.get_source),
        ("POST", "/api/datasources", store.post_source),
        ("PUT", "/api/datasources/uid/([^/]+)", store.put_source),
        ("GET", "/api/dashboards/uid/([^/]+)", store.get_board),
        ("GET", "/api/dashboards/uid/([^/]+)/versions", store.get_history),
        ("POST", "/api/dashboards/db", store.post_board),
        ("GET", "/api/v1/provisioning/alert-rules", store.get_rules),
        ("GET", group, store.get_group),
        ("PUT", group, store.put_group),
    ]


class StandIn:
    def __init__(self) -> None:
        class Handler(_Handler):
            store = Store()

        self._handler = Handler
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.address}"

    def emptied(self) -> Store:
        self._handler.store = Store()
        return self._handler.store

    @contextmanager
    def running(self) -> Iterator["StandIn"]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
