"""Patches of Ray: each has the effect it is written for, and Ray still has the internals it replaces.

A failure after an upgrade of Ray names the patch to update or to delete. No cluster is started.
"""

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import ray
import ray._private.services as services
import ray._private.worker as worker
from ray._private import process_watcher, ray_constants
from ray._private.node import Node

from strata.platform.ray_patches import agent_ports, fewer_processes, loopback_address, raylet_log_lines, registration_timeout


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def test_patches_are_for_the_installed_ray() -> None:
    assert ray.__version__.startswith("2.60."), (
        f"Ray is {ray.__version__}. Read the docstrings in strata.platform.ray_patches and strata.serving.ray_patches, "
        "delete those no longer needed, and write the new version into the others and into this test."
    )


def test_registration_waits_longer_than_rays_30_s(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"node": 1}])

    def registered(*_: object) -> dict[str, int]:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", registered)
    monkeypatch.setattr(registration_timeout, "SLOW_S", 0.0)
    with registration_timeout.extended():
        assert services.get_node("address", "node") == {"node": 1}
    assert services.get_node is registered
    assert capsys.readouterr().err == "Ray is starting slowly, as happens on a busy machine; still waiting.\n"


def test_ray_still_has_a_constant_registration_timeout() -> None:
    start = source(Node.__init__)
    assert "raylet_start_wait_time_s = 30" in start, (
        "Ray's wait for its raylet is no longer the constant 30 s in Node.__init__. If it can be configured, delete "
        "registration_timeout.py and configure it in local_ray.py; else update the patch."
    )
    assert "ray._private.services.get_node(" in start and "except RuntimeError" in start, (
        "Node.__init__ no longer retries services.get_node on RuntimeError: registration_timeout.py has no effect. Update it."
    )


def test_agents_get_different_ports_and_the_raylet_knows_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[dict[str, Any]] = []

    def start_raylet(
        node_id: str,
        session_dir: str,
        metrics_agent_port: int,
        metrics_export_port: int,
        dashboard_agent_listen_port: int,
        runtime_env_agent_port: int,
    ) -> None:
        started.append(dict(locals()))

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    given = dict.fromkeys(agent_ports.PORTS, 0) | {"metrics_export_port": 8080}
    with agent_ports.chosen():
        services.start_raylet("node", str(tmp_path), **given)
    assert services.start_raylet is start_raylet
    ports = [started[0][name] for name in agent_ports.PORTS]
    assert len(set(ports)) == 4 and 8080 in ports and all(port == 8080 or port in agent_ports.RANGE for port in ports)
    (written,) = (path.read_text() for path in tmp_path.iterdir())
    assert int(written) == started[0]["dashboard_agent_listen_port"]


def test_ray_still_starts_its_raylet_with_these_ports() -> None:
    assert "process_info = ray._private.services.start_raylet(" in source(Node.start_raylet), (
        "Ray starts its raylet another way: agent_ports.py has no effect. Update it."
    )
    parameters = inspect.signature(services.start_raylet).parameters
    assert {*agent_ports.PORTS, "session_dir", "node_id"} <= set(parameters), "Update agent_ports.py."
    start = source(services.start_raylet)
    assert "dashboard_agent_listen_port" not in start[start.index("RAYLET_EXECUTABLE,") :], (
        "Ray gives its raylet the port of the dashboard's agent: delete the file that agent_ports.py writes."
    )


def test_skipped_processes_are_restored() -> None:
    originals = [getattr(Node, name) for name in fewer_processes.SKIPPED]
    with fewer_processes.skipped():
        assert Node.start_log_monitor(object()) is None
        assert Node.start_api_server(object(), include_dashboard=False, raise_on_failure=False) is None
    assert [getattr(Node, name) for name in fewer_processes.SKIPPED] == originals


def test_ray_init_still_has_no_option_to_skip_these_processes() -> None:
    assert "if self._ray_params.include_log_monitor:\n            self.start_log_monitor()" in source(Node.start_ray_processes), (
        "Ray starts its log monitor elsewhere: update fewer_processes.py."
    )
    assert "        self.start_api_server(\n" in source(Node.start_head_processes), (
        "Ray no longer starts its dashboard process unconditionally: delete start_api_server from fewer_processes.py."
    )
    options = [name for name in inspect.signature(ray.init).parameters if "log_monitor" in name or "api_server" in name]
    assert not options, f"ray.init has the options {options}: use them in local_ray.py instead of fewer_processes.py."


def test_only_the_raylet_log_is_suppressed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, ignore_prefix: printed.extend(data["lines"]))
    for _ in range(2):
        raylet_log_lines.suppress()
    worker.print_to_stdstream({"lines": ["Raylet is terminated. Last 20 lines of the Raylet logs: ..."]}, ignore_prefix=False)
    worker.print_to_stdstream({"lines": ["a worker died"]}, ignore_prefix=False)
    assert printed == ["a worker died"]


def test_ray_still_prints_the_raylet_log_whatever_log_to_driver_is() -> None:
    assert raylet_log_lines.MESSAGE in source(process_watcher.report_raylet_error_logs), (
        "Ray words the death of a raylet differently: update MESSAGE in raylet_log_lines.py."
    )
    listen = source(worker.listen_error_messages)
    assert "print_to_stdstream(" in listen, "Ray prints error messages another way: update or delete raylet_log_lines.py."
    assert "log_to_driver" not in listen, "log_to_driver covers error messages now: delete raylet_log_lines.py."


def test_node_address_is_loopback_only_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_global_node", None)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.delenv(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, raising=False)
    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda address: "192.0.2.7")
    with loopback_address.used():
        assert services.get_node_ip_address() == "127.0.0.1"
        assert os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] == "0"  # for Ray's processes
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR not in os.environ
    assert services.resolve_ip_for_localhost("127.0.0.1") == "192.0.2.7", (
        "Ray no longer replaces a loopback address by the external one: delete loopback_address.py and set _node_ip_address."
    )


@pytest.mark.parametrize("name", ["kill_gcs_server", "start_gcs_server", "dead_processes", "kill_all_processes"])
def test_node_has_the_methods_that_supervision_calls(name: str) -> None:
    assert callable(getattr(Node, name, None)), f"Ray's Node has no {name}: update ray_cluster/gcs.py and ray_cluster/watch.py."
