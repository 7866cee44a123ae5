"""Decisions on suspect nodes: votes, repeated hangs, stragglers, capacity, and what later starts know."""

import json
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from strata.platform.errors import UserError
from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import CORRUPTED, GRADIENTS, HUNG, SLOW, Excluded, Node
from strata.platform.recipe import ParallelSection, Recipe, WatchdogSection
from strata.training.elastic.capacity import Survey
from strata.training.exclusion import placement
from strata.training.exclusion.news import ExclusionNews
from strata.training.exclusion.placement import Placement, indispensable
from strata.training.exclusion.suspects import Suspects, elsewhere
from strata.training.loop import Job
from strata.training.watchdog import hang_report, watch
from strata.training.watchdog.diagnosis import Diagnosis, Kind
from strata.training.watchdog.evidence import Evidence
from strata.training.watchdog.replicas import Replica, different

NODES = {name: Node(name * 56, f"host-{name}", f"10.0.0.{number}") for number, name in enumerate("abcd")}
A, B, C, D = (node.id for node in NODES.values())


def excluded(name: str, kind: str = CORRUPTED, at: float = 0.0) -> Excluded:
    return Excluded(NODES[name], kind, "Its cause.", at)


def survey(free: dict[str, int], *avoided: Excluded) -> Survey:
    nodes = {node.id: node for node in NODES.values()}
    known = {one.node.id: one for one in avoided}
    found = Survey(0, frozenset(nodes), frozenset(), known, nodes, {NODES[name].id: count for name, count in free.items()})
    return replace(found, free=found.free_without(known))


def ranks(*nodes: str, step: int = 30, own_s: tuple[float, ...] = ()) -> list[Evidence]:
    one = Evidence(
        "s", 0, len(nodes), "host", "0", 100, step, "forward", 50, own_s, ("x.py:1 f",), state="S", seen_at=1.0, beat=1.0
    )
    return [replace(one, rank=rank, pid=100 + rank, node=NODES[node].id) for rank, node in enumerate(nodes)]


def suspects(run: Path, found: Survey | None, enough: Callable[[int], bool] = lambda workers: workers >= 3) -> Suspects:
    return Suspects(run, lambda: found, enough)


def kinds(run: Path) -> dict[str, str]:
    return {one.node.host: one.kind for one in excluded_nodes.read(run)}


def replica(rank: int, checksum: int = 7, norm: float = 1.0) -> Replica:
    return Replica(rank, (0, 0), f"host-{rank}", checksum, norm, f"node-{rank}")


@pytest.mark.parametrize(
    ("checksums", "nodes"),
    [((7, 8), set()), ((7, 8, 7), {"node-1"}), ((7, 8, 9, 7), set()), ((7, 8, 9, 7, 7), {"node-1", "node-2"})],
)
def test_only_a_majority_of_the_replicas_names_a_node(checksums: tuple[int, ...], nodes: set[str]) -> None:
    found = different([replica(rank, value) for rank, value in enumerate(checksums)])
    assert found and found.parameters and found.nodes == nodes
    sent = pickle.loads(pickle.dumps(found))
    assert (sent.ranks, str(sent), sent.nodes) == (found.ranks, str(found), found.nodes)


def test_wrong_gradients_are_weaker_evidence_than_parameters() -> None:
    found = different([replica(0), replica(1, norm=100.0), replica(2)])
    assert found and found.nodes == {"node-1"} and not found.parameters
    of_two = different([replica(0, norm=50.0), replica(1)], before={0: 1.0, 1: 1.0})
    assert of_two and of_two.ranks == (0,) and not of_two.nodes


def test_files_survive_the_driver_and_a_deleted_one_readmits_its_node(tmp_path: Path) -> None:
    assert excluded_nodes.read(tmp_path) == []
    for one in (excluded("b", SLOW, at=2.0), excluded("a", at=1.0)):
        excluded_nodes.add(tmp_path, one)
    assert excluded_nodes.read(tmp_path) == [excluded("a", at=1.0), excluded("b", SLOW, at=2.0)]
    excluded_nodes.path(tmp_path, A).unlink()
    assert excluded_nodes.read(tmp_path) == [excluded("b", SLOW, at=2.0)]
    excluded_nodes.path(tmp_path, B).write_text("{")
    with pytest.raises(UserError, match="is damaged") as error:
        excluded_nodes.read(tmp_path)
    assert "readmit" in error.value.fix


def test_restarted_raylet_of_an_excluded_machine_is_found_by_its_address() -> None:
    again = replace(NODES["a"], id="f" * 56)
    alive = {node.id: node for node in (again, NODES["b"])}
    assert set(excluded_nodes.matched([excluded("a")], alive)) == {again.id}
    assert set(excluded_nodes.matched([excluded("a")], {**alive, A: NODES["a"]})) == {A}, "another raylet of the machine"
    assert excluded_nodes.matched([excluded("c")], alive) == {}


def test_strict_exclusion_of_a_machine_wins() -> None:
    again = replace(excluded("a", SLOW), node=replace(NODES["a"], id="f" * 56))
    for order in ([excluded("a"), again], [again, excluded("a")]):
        assert excluded_nodes.matched(order, {A: NODES["a"]})[A].strict


@pytest.mark.parametrize(
    ("free", "avoided", "expected"),
    [
        ({"a": 1, "b": 1, "c": 1, "d": 1}, [excluded("b")], [B]),
        ({"a": 1, "b": 1, "c": 2}, [excluded("b", SLOW)], [B]),
        ({"a": 1, "b": 1, "c": 1}, [excluded("b", SLOW)], []),  # needed: a slow rank is better than none
        ({"a": 1, "b": 1, "c": 1}, [excluded("b", GRADIENTS)], []),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, [excluded("b"), excluded("c", HUNG)], [B]),
        ({"a": 1, "b": 1, "c": 1, "d": 2}, [excluded("b"), excluded("c", HUNG)], [B, C]),
    ],
)
def test_placement_avoids_excluded_nodes_as_far_as_the_capacity_allows(
    free: dict[str, int], avoided: list[Excluded], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "SETTLE_S", 0.0)
    monkeypatch.setattr(placement, "survey", lambda *_: survey(free, *avoided))
    select = Placement(tmp_path, {"CPU": 1.0}, False)
    assert select(3) is None, "no file: no survey, no selector"
    for one in avoided:
        excluded_nodes.add(tmp_path, one)
    assert select(3) == ({"ray.io/node-id": f"!in({','.join(expected)})"} if expected else None)


def test_placement_waits_until_ray_has_returned_the_resources_of_ended_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [survey({"a": 0, "c": 0, "d": 1}, excluded("b")), survey({"a": 1, "c": 1, "d": 1}, excluded("b"))]
    monkeypatch.setattr(placement, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(placement, "survey", lambda *_: looks.pop(0))
    excluded_nodes.add(tmp_path, excluded("b"))
    assert Placement(tmp_path, {"CPU": 1.0}, False)(3) == {"ray.io/node-id": f"!in({B})"}


def test_fixed_run_without_capacity_ends_with_the_node_of_the_corrupted_replica(tmp_path: Path) -> None:
    found = survey({"a": 1, "b": 1, "c": 1}, excluded("b"))
    with pytest.raises(UserError, match=r"free resources for 2 of 3 workers\. Node host-b") as error:
        indispensable(tmp_path, found, 3, waits=False)
    assert str(excluded_nodes.path(tmp_path, B)) in error.value.cause
    assert "parallel.workers=2..3" in error.value.fix and f"--resume {tmp_path.name}" in error.value.fix
    assert set(indispensable(tmp_path, found, 3, waits=True)) == {B}, "an autoscaler adds a node"


def test_capacity_elsewhere_counts_running_workers_and_no_excluded_node() -> None:
    found = survey({"a": 0, "b": 5, "c": 1, "d": 2}, excluded("d"))
    assert elsewhere(found, ranks("a", "a", "b"), B) == 3


def test_slow_node_is_excluded_only_with_a_spare(tmp_path: Path) -> None:
    workers = ranks("a", "b", "c")
    for found in (None, survey({"a": 0, "b": 0, "c": 0}), survey({"a": 0, "b": 4, "c": 0})):
        assert not suspects(tmp_path, found).slow(workers, B, "Slow.")
    assert kinds(tmp_path) == {}
    assert suspects(tmp_path, survey({"a": 0, "b": 0, "c": 0, "d": 1})).slow(workers, B, "Slow.")
    assert kinds(tmp_path) == {"host-b": SLOW}


def test_at_most_three_slow_nodes_are_replaced(tmp_path: Path) -> None:
    for name in "abc":
        excluded_nodes.add(tmp_path, excluded(name, SLOW))
    assert not suspects(tmp_path, survey({"a": 4, "b": 4, "c": 4})).slow(ranks("d", "b", "c"), D, "Slow.")


def hang(run: Path, at_fault: tuple[int, ...], kind: Kind = "process stopped") -> None:
    hang_report.write(run, ranks("a", "b", "c"), Diagnosis(kind, at_fault, "It hangs.", None), 20.0)


def test_second_hang_on_a_node_excludes_it(tmp_path: Path) -> None:
    workers, spare = ranks("a", "b", "c"), survey({"a": 0, "b": 0, "c": 0, "d": 1})
    hang(tmp_path, (1,))
    hang(tmp_path, (2,))  # another node
    hang(tmp_path, (1,), "process died")  # no hang
    hang(tmp_path, (0, 1, 2), "connection lost")  # all are suspect
    assert not suspects(tmp_path, spare).hung(workers, B)
    hang(tmp_path, (1,))
    assert not suspects(tmp_path, survey({"a": 0, "b": 0, "c": 0})).hung(workers, B), "the run needs the node"
    assert suspects(tmp_path, survey({}), enough=lambda workers: workers >= 2).hung(workers, B), "an elastic run does not"
    assert kinds(tmp_path) == {"host-b": HUNG}
    assert "2 hangs: step-30, step-30-5" in excluded_nodes.read(tmp_path)[0].cause


def test_reports_without_nodes_count_for_none(tmp_path: Path) -> None:
    (tmp_path / "hangs").mkdir()
    (tmp_path / "hangs" / "step-1.json").write_text(
        json.dumps({"kind": "process stopped", "ranks": [0], "evidence": [{"rank": 0}]})
    )
    (tmp_path / "hangs" / "step-2.json").write_text("{")
    assert hang_report.caused_by(tmp_path, B) == []


def slow_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, replace_stragglers: bool, found: list[Survey]
) -> tuple[list[str], list[str]]:
    """Lines and requested kills of a minute in which rank 1 is slow."""
    now = [0.0]
    monkeypatch.setattr(watch, "_exported", lambda _: (lambda _: None, lambda *_: None))
    section = WatchdogSection(replace_stragglers=replace_stragglers)
    driver = suspects(run, None)
    driver._surveyed = lambda: found[min(int(now[0] // 60), len(found) - 1)]
    watchdog = watch.Watch(run, section, ParallelSection(workers=3), lambda: now[0], driver)
    lines = []
    for second in range(1, 130):
        now[0] = float(second)
        looked = [
            replace(one, marks=second, own_s=(0.2 if one.rank == 1 else 0.1,) * 20, seen_at=now[0])
            for one in ranks("a", "b", "c")
        ]
        monkeypatch.setattr(watch.evidence, "read", lambda _, looked=looked: looked)
        lines += watchdog.news()
    return lines, [path.name for path in (run / "watch").glob("kill-*")]


FULL, SPARE = survey({"a": 0, "b": 0, "c": 0}), survey({"a": 0, "b": 0, "c": 0, "d": 1})


def test_straggler_is_replaced_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, kills = slow_run(tmp_path, monkeypatch, False, [SPARE])
    assert len(lines) == 1 and "Rank 1 (process 101 on host, GPU 0) is slow" in lines[0] and not kills and not kinds(tmp_path)


def test_straggler_without_a_spare_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, kills = slow_run(tmp_path, monkeypatch, True, [FULL])
    assert len(lines) == 2 and "No other node has free resources" in lines[1] and not kills and not kinds(tmp_path)


def test_straggler_is_replaced_by_a_spare_that_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, kills = slow_run(tmp_path, monkeypatch, True, [FULL, SPARE])
    assert len(lines) == 3 and "without its node" in lines[2]
    assert kills == ["kill-s-1"] and kinds(tmp_path) == {"host-b": SLOW}


def test_console_names_each_excluded_node_once_and_warns_of_workers_on_one(home: Path, small_recipe: Recipe) -> None:
    run = home / "runs" / "r"
    run.mkdir(parents=True)
    job = Job(run, home, small_recipe.model, small_recipe.train, small_recipe.parallel)
    news = ExclusionNews(job)
    job.nodes.write_text(f"{A}\n{B}\n")
    assert news.news() == []
    excluded_nodes.add(run, excluded("b", SLOW))
    os.utime(job.nodes, (time.time() - 60,) * 2)
    [line] = news.news()
    assert "Node host-b (10.0.0.1, Ray node bbbbbbbb) is excluded from this run: slow rank. Its cause." in line
    assert str(excluded_nodes.path(run, B)) in line and news.news() == []
    os.utime(job.nodes, (time.time() + 60,) * 2)
    [line] = news.news()
    assert line.startswith("WARNING: the workers use the excluded node host-b") and news.news() == []
    excluded_nodes.path(run, B).unlink()
    assert news.news() == []
    excluded_nodes.add(run, excluded("b", SLOW))
    assert len(news.news()) >= 1
