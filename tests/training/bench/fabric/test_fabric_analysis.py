"""Naming of slow nodes and paths from given times, the tournament, and the reports. No processes."""

import io
import itertools
import json
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from strata.planner.collectives import cost
from strata.planner.collectives.patterns import Place as Ranks
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue
from strata.training.bench.fabric import judgement, report, teams
from strata.training.bench.fabric.analysis import Exchange, Measurement, slow_paths, verdicts
from strata.training.bench.fabric.command import bench_fabric
from strata.training.bench.fabric.measurement import measure, node_names
from strata.training.bench.fabric.member import Place, lockable_memory
from strata.training.bench.fabric.teams import NoAnswerError
from strata.training.bench.fabric.tournament import rounds

SIZE = 1000
LEAST = 0.7

# The tournament


@given(players=st.integers(2, 33), most=st.integers(1, 40))
def test_rounds_are_disjoint_pairs_and_nobody_meets_twice(players: int, most: int) -> None:
    found = rounds(players, most)
    assert len(found) == min(most, players - 1 + players % 2)
    for one in found:
        seen = [player for pair in one for player in pair]
        assert len(set(seen)) == len(seen) == players - players % 2
        assert all(a < b for a, b in one)
    met = [pair for one in found for pair in one]
    assert len(set(met)) == len(met)
    if most >= players:
        assert set(met) == set(itertools.combinations(range(players), 2))


# Verdicts


def measured(
    nodes: int,
    inside: int = 1,
    slow_ranks: dict[int, float] | None = None,
    slow_inside: dict[int, float] | None = None,
    slow_pairs: dict[tuple[int, int], float] | None = None,
    most: int = 8,
) -> Measurement:
    """Times on a cluster in which all ranks have a rate of 1, but for the given ones. A pair is as slow as its slower rank."""
    factors, paths = slow_ranks or {}, slow_pairs or {}
    exchanges = []
    for one in rounds(nodes, most):
        for a, b in one:
            for i in range(inside):
                pair = (a * inside + i, b * inside + i)
                rate = min(factors.get(rank, 1.0) for rank in pair) * paths.get((a, b), 1.0)
                exchanges.append(Exchange(pair, SIZE / rate))
    names = tuple(f"n{rank // inside}" for rank in range(nodes * inside))
    within = {f"n{node}": SIZE / (slow_inside or {}).get(node, 1.0) for node in range(nodes)} if inside > 1 else {}
    return Measurement(names, SIZE, within, exchanges, {SIZE: 1.0})


def slow(measurement: Measurement, least: float = LEAST) -> list[str]:
    return [one.node for one in verdicts(measurement, least) if one.slow]


@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 33])
@pytest.mark.parametrize("inside", [1, 4])
def test_the_slow_node_is_named_and_no_other(nodes: int, inside: int) -> None:
    for victim in {0, 1, nodes - 1}:
        found = measured(nodes, inside, {victim * inside + inside - 1: 0.5})
        assert slow(found) == [f"n{victim}"]
        verdict = verdicts(found, LEAST)[victim]
        assert verdict.ranks == (victim * inside + inside - 1,)
        assert verdict.between_share == pytest.approx(0.5) and verdict.between == pytest.approx(0.5)
        others = [one for one in verdicts(found, LEAST) if not one.slow]
        assert all(one.between == pytest.approx(1.0) and one.between_share and one.between_share > 0.99 for one in others)
        assert all(one.ranks == () for one in others)


def test_a_healthy_cluster_has_no_slow_node() -> None:
    for nodes, inside in itertools.product((1, 2, 3, 8), (1, 2)):
        assert slow(measured(nodes, inside)) == []


@pytest.mark.parametrize(("rate", "named"), [(0.69, True), (0.71, False)])
def test_the_share_is_of_the_others_median(rate: float, named: bool) -> None:
    assert (slow(measured(4, 1, {1: rate})) == ["n1"]) is named
    assert slow(measured(4, 1, {1: rate}), least=rate + 0.001) == ["n1"]
    assert slow(measured(4, 1, {1: rate}), least=rate - 0.001) == []


def test_several_slow_nodes_are_named_while_most_are_healthy() -> None:
    assert slow(measured(8, 2, {2: 0.3, 7: 0.5, 9: 0.6})) == ["n1", "n3", "n4"]


def test_few_rounds_suffice_for_many_nodes() -> None:
    assert slow(measured(200, 1, {17: 0.4}, most=2)) == ["n17"]


def test_a_slow_link_within_a_node_is_named() -> None:
    found = verdicts(measured(4, 8, slow_inside={2: 0.5}), LEAST)
    assert [one.node for one in found if one.slow] == ["n2"]
    assert found[2].inside_share == pytest.approx(0.5) and found[2].between_share == pytest.approx(1.0) and found[2].ranks == ()
    assert found[0].inside == pytest.approx(2 * 7 / 8), "bus bandwidth of 8 ranks: 2 x 7/8 of the buffer each"


def test_two_nodes_cannot_be_told_apart_but_the_slow_rail_shows() -> None:
    found = measured(2, 4, {1: 0.5})
    judged = verdicts(found, LEAST)
    assert [one.slow for one in judged] == [False, False]
    [path] = slow_paths(found, judged, LEAST)
    assert (path.nodes, path.ranks) == (("n0", "n1"), (1, 5)) and path.share == pytest.approx(0.5)


def test_a_slow_path_is_not_a_slow_node() -> None:
    found = measured(5, 1, slow_pairs={(1, 3): 0.4})
    judged = verdicts(found, LEAST)
    assert not any(one.slow for one in judged)
    [path] = slow_paths(found, judged, LEAST)
    assert path.nodes == ("n1", "n3") and path.share == pytest.approx(0.4)
    assert slow_paths(measured(5, 1, {3: 0.4}), verdicts(measured(5, 1, {3: 0.4}), LEAST), LEAST) == [], "the node explains it"
    assert slow_paths(measured(2), verdicts(measured(2), LEAST), LEAST) == []


# The measurement, with a team that answers by formula


class FakeTeam:
    """Ranks whose all-reduce takes the time of their slowest member, in proportion to the size."""

    def __init__(self, nodes: int, inside: int, factors: dict[int, float] | None = None, mute: Sequence[int] = ()) -> None:
        self.places = [Place(f"id{rank // inside}", f"host{rank // inside}", None, None) for rank in range(nodes * inside)]
        self.host = "10.0.0.1"
        self.factors, self.mute = factors or {}, mute
        self.calls: list[tuple[str, list[Any]]] = []

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.calls.append((method, list(arguments)))
        if method == "all_reduce":
            if self.mute and any(set(self.mute) & set(words[0]) for words in arguments):
                raise NoAnswerError(self.mute, "no answer")
            return [
                [size / min(self.factors.get(one, 1.0) for one in ranks) for size in sizes] if rank in ranks else []
                for rank, (ranks, sizes) in enumerate(arguments)
            ]
        return [("10.0.0.1", 7) if method == "open" and words[0] else None for words in arguments]


def test_every_phase_covers_all_ranks_once() -> None:
    team = FakeTeam(3, 2)
    found, gpu = measure(team, (16, 256), 8, lambda phase: None)
    assert gpu is None
    assert team.calls[0] == ("open", [("10.0.0.1",), *[(None,)] * 5]), "rank 0 opens the store"
    assert [words[:3] for words in team.calls[1][1]] == [(("10.0.0.1", 7), rank, 6) for rank in range(6)]
    assert [words[0] for words in team.calls[2][1]] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    assert found.inside == {"host0": 256, "host1": 256, "host2": 256}
    assert sorted(one.ranks for one in found.exchanges) == [(0, 2), (0, 4), (1, 3), (1, 5), (2, 4), (3, 5)]
    assert found.world == {16: 16, 256: 256} and found.size == 256
    assert found.nodes == ("host0", "host0", "host1", "host1", "host2", "host2")
    assert team.calls[-1] == ("leave", [()] * 6)


def test_a_single_node_is_measured_inside_and_one_rank_a_node_only_between() -> None:
    found, _ = measure(FakeTeam(1, 4), (16,), 8, lambda phase: None)
    assert found.exchanges == [] and found.inside == {"host0": 16}
    assert [one.between for one in verdicts(found, LEAST)] == [None]
    found, _ = measure(FakeTeam(4, 1), (16,), 8, lambda phase: None)
    assert found.inside == {} and len(found.exchanges) == 6


def test_nodes_that_do_not_answer_are_named() -> None:
    with pytest.raises(UserError) as error:
        measure(FakeTeam(4, 2, mute=(5,)), (16,), 8, lambda phase: None)
    assert "host2" in error.value.cause and "host0" not in error.value.cause


def test_failed_ranks_are_named_and_not_those_that_wait_for_them() -> None:
    assert teams._complete("join", {1: "b", 0: "a"}, {}, 2) == ["a", "b"]
    with pytest.raises(NoAnswerError) as failed:
        teams._complete("join", {0: "a"}, {2: "ended"}, 4)
    assert (failed.value.ranks, failed.value.reason) == ((2,), "ended")
    with pytest.raises(NoAnswerError) as silent:
        teams._complete("join", {0: "a", 2: "c"}, {}, 4)
    assert silent.value.ranks == (1, 3) and "no answer to join" in silent.value.reason


@pytest.mark.parametrize(
    ("limit", "effective", "expected"),
    [
        (8 * 2**20, "0000000000000000", 8 * 2**20),
        (8 * 2**20, "0000000000004000", None),  # CAP_IPC_LOCK
        (8 * 2**20, "00000000a804a5fb", 8 * 2**20),  # many others
        (resource.RLIM_INFINITY, "0000000000000000", None),
    ],
)
def test_memory_is_lockable_by_limit_or_effective_capability(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int, effective: str, expected: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    (tmp_path / "status").write_text(f"Name:\tpython\nCapPrm:\t0000000000004000\nCapEff:\t{effective}\n")
    assert lockable_memory(tmp_path / "status") == expected


def test_uneven_nodes_are_refused() -> None:
    team = FakeTeam(2, 2)
    team.places = team.places[:3]
    with pytest.raises(UserError, match=r"unevenly over the nodes: host0 2, host1 1"):
        measure(team, (16,), 8, lambda phase: None)


def test_nodes_of_one_host_name_differ() -> None:
    places = [Place("a" * 40, "same", None, None), Place("b" * 40, "same", None, None), Place("c", "other", None, None)]
    assert node_names(places) == ["same (aaaaaaaa)", "same (bbbbbbbb)", "other"]


# Reports


def printed(*parts: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for part in parts:
        console.print(part)
    return console.export_text()


def test_the_plan_is_the_planners_cost_on_this_place_and_fabric() -> None:
    found = Measurement(tuple(f"n{rank // 8}" for rank in range(16)), SIZE, {}, [], {2**20: 1e-3, 2**30: 1e-2})
    planned = report.plan(found, "NVIDIA H100 80GB HBM3", "gke-a3-mega")
    assert planned is not None and (planned.gpu, planned.fabric) == ("h100-sxm", "gke-a3-mega")
    links = cost.links(catalogue.gpu("h100-sxm"), catalogue.fabric("gke-a3-mega"))
    assert planned.seconds == {size: cost.cost("all_reduce", size, Ranks(8, 2), links).seconds for size in found.world}
    faster = report.plan(found, "NVIDIA H100 80GB HBM3", "ndr-400")
    assert faster is not None and faster.seconds[2**30] < planned.seconds[2**30]
    assert report.plan(found, None, None) is None and report.plan(found, "Some card", None) is None
    text = printed(report.world_table(found, planned))
    assert "h100-sxm with gke-a3-mega" in text and f"{1e-2 / planned.seconds[2**30]:.2f}" in text
    assert f"{2**30 * 2 * 15 / 16 / 1e-2 / 1e9:,.2f}" in text, "bus bandwidth"


def test_tables_name_the_slow_node_and_its_ranks() -> None:
    found = verdicts(measured(4, 2, {5: 0.5}), LEAST)
    lines = [line for line in printed(report.node_table(found, LEAST)).splitlines() if "slow," in line]
    assert len(lines) == 1 and lines[0].split()[0] == "n2" and "ranks 5" in lines[0] and "50%" in lines[0]


def test_limited_locked_memory_is_reported_on_gpus_only() -> None:
    found = measured(3)
    places = [Place("a", "n0", None, None), Place("b", "n1", None, 8 * 2**20), Place("c", "n2", None, None)]
    text = printed(*report.notes(found, [], places, on_gpus=True))
    assert "1 nodes limit locked memory (8 MiB on n1)" in text and "LimitMEMLOCK" in text
    assert report.notes(found, [], places, on_gpus=False) == []
    assert "Two nodes" in printed(*report.notes(measured(2), [], places[:2], on_gpus=False))


@pytest.mark.parametrize(("factors", "expected"), [({}, []), ({2: 0.5}, ["host2"])])
def test_the_record_has_what_the_tables_have(tmp_path: Path, factors: dict[int, float], expected: list[str]) -> None:
    file = tmp_path / "fabric" / "run.json"
    settings = judgement.Settings((16, 256), 8, LEAST, json=file)
    assert judgement.judge(FakeTeam(4, 1, factors), settings) == expected
    written = json.loads(file.read_text())
    assert written["benchmark"] == "fabric" and written["nodes"] == written["ranks"] == 4
    assert [one["node"] for one in written["verdicts"] if one["slow"]] == expected
    assert [one["bytes"] for one in written["all_reduce"]] == [16, 256]
    assert len(written["exchanges"]) == 6 and written["least_share"] == LEAST and written["planned"] is None


# The command


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        ("4MiB", (16384, 262144, 4194304)),
        ("1GiB", (16384, 262144, 4194304, 67108864, 1073741824)),
        ("16KiB", (16384,)),
        ("10", (8,)),
    ],
)
def test_sizes_grow_by_a_constant_factor(largest: str, expected: tuple[int, ...]) -> None:
    assert judgement.sizes_up_to(largest) == expected


def invoke(*words: str) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench_fabric)
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(("slow_nodes", "code"), [([], 0), (["b"], 1)])
def test_the_command_fails_if_a_node_is_slow(monkeypatch: pytest.MonkeyPatch, slow_nodes: list[str], code: int) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(judgement, "on_this_machine", lambda *given: seen.append(given) or slow_nodes)
    assert invoke("--processes", "3", "--share", "0.5", "--size", "64KiB").exit_code == code
    [(processes, settings)] = seen
    assert (processes, settings.share, settings.sizes) == (3, 0.5, (65536,))


@pytest.mark.parametrize(
    ("words", "given", "place"),
    [
        (["--recipe", "laptop"], False, "on_this_machine"),
        (["--recipe", "laptop"], True, "on_ray"),
        (["--recipe", "laptop", "--processes", "2"], True, "on_this_machine"),
        (["--recipe", "8xh100"], False, "on_ray"),
    ],
)
def test_a_cluster_is_measured_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, words: list[str], given: bool, place: str
) -> None:
    seen: list[str] = []
    answers: Callable[[str], Any] = lambda name: lambda *given: seen.append(name) or []  # noqa: E731
    for name in ("on_this_machine", "on_ray"):
        monkeypatch.setattr(judgement, name, answers(name))
    monkeypatch.setattr("strata.platform.ray_cluster.cluster.is_given", lambda: given)
    assert invoke(*words).exit_code == 0 and seen == [place]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--recipe", "h200"], "one worker has no network"),
        (["--fabric", "nonsense"], "nonsense"),
        (["--processes", "2", "--size", "much"], "is not a size"),
    ],
)
def test_impossible_measurements_are_refused(words: list[str], cause: str) -> None:
    error = invoke(*words).exception
    assert isinstance(error, UserError) and cause in error.cause
