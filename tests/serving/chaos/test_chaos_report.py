"""Requests, titles, tables and the timeline of `strata chaos`, without an endpoint."""

import collections
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from strata.platform import benchmark_record
from strata.platform.errors import UserError
from strata.serving.chaos import report, requests, victims
from strata.serving.chaos.client import Answer, Attempt
from strata.serving.chaos.edges import Ending
from strata.serving.chaos.kills import Kill, Plan
from strata.serving.chaos.load import Sent
from strata.serving.chaos.requests import Request
from strata.serving.chaos.run import Outcome, Pass
from strata.serving.chaos.victims import Kind

# Requests


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    return [one.body | {"path": one.path} for one in requests.make(2000, 0, "m", 400)]


def share(made: list[dict[str, Any]], key: str) -> float:
    return sum(key in body for body in made) / len(made)


def test_shares_of_the_kinds(made: list[dict[str, Any]]) -> None:
    """Standard deviations are below 0.011."""
    assert sum(body["stream"] for body in made) / len(made) == pytest.approx(0.7, abs=0.04)
    assert share(made, "stop") == pytest.approx(0.25, abs=0.04)
    assert share(made, "logprobs") == pytest.approx(0.25, abs=0.04)
    assert share(made, "stream_options") == pytest.approx(0.35, abs=0.04)  # half of the streams
    assert share(made, "messages") == pytest.approx(1 / 3, abs=0.04)
    ids = sum(isinstance(body.get("prompt"), list) for body in made)
    assert ids / len(made) == pytest.approx(1 / 3, abs=0.04)
    assert all(body["stream"] for body in made if "stream_options" in body)


def test_parameters_of_the_requests(made: list[dict[str, Any]]) -> None:
    assert {body["model"] for body in made} == {"m"} and {body["temperature"] for body in made} == {0}
    assert {len(body["stop"]) for body in made if "stop" in body} == {1, 2}
    chats = [body for body in made if "messages" in body]
    assert {body["path"] for body in chats} == {"/v1/chat/completions"}
    assert {(body["logprobs"], body["top_logprobs"]) for body in chats if "logprobs" in body} == {(True, 2)}
    others = [body for body in made if "messages" not in body]
    assert {body["path"] for body in others} == {"/v1/completions"}
    assert {body["logprobs"] for body in others if "logprobs" in body} == {2}
    assert {str(body["stream_options"]) for body in made if "stream_options" in body} == {"{'include_usage': True}"}


def test_lengths_use_the_whole_range(made: list[dict[str, Any]]) -> None:
    answers = {body["max_tokens"] for body in made}
    assert (min(answers), max(answers)) == (1, 128)
    ids = [body for body in made if isinstance(body.get("prompt"), list)]
    tokens = {token for body in ids for token in body["prompt"]}
    assert (min(tokens), max(tokens)) == (100, 499)
    text = [len(body["prompt"]) / (400 - body["max_tokens"]) for body in made if isinstance(body.get("prompt"), str)]
    assert min(text) < 0.02 and 0.98 < max(text) <= 1
    chat = [len(body["messages"][0]["content"]) / (368 - body["max_tokens"]) for body in made if "messages" in body]
    assert min(chat) < 0.02 and 0.98 < max(chat) <= 1, "32 tokens are left for the template"


@pytest.mark.parametrize("context", [2, 3, 10])
def test_small_contexts_are_shared_between_prompt_and_answer(context: int) -> None:
    bodies = [one.body for one in requests.make(300, 1, "m", context)]
    assert max(body["max_tokens"] for body in bodies) == context // 2
    plain = [body for body in bodies if "prompt" in body]
    assert max(len(body["prompt"]) + body["max_tokens"] for body in plain) == context
    assert all(len(body["messages"][0]["content"]) == 1 for body in bodies if "messages" in body)


def test_a_seed_has_the_same_requests_in_every_version() -> None:
    """Otherwise reports of the same seed could not be compared."""
    found = []
    for one in requests.make(6, 5, "m", 64):
        body = one.body
        beginning = body["prompt"][:3] if isinstance(body["prompt"], list) else body["prompt"][:8]
        stop, logprobs = body.get("stop"), body.get("logprobs")
        found.append((body["max_tokens"], body["stream"], stop, logprobs, "stream_options" in body, beginning))
    assert found == [
        (22, True, [":", "."], 2, False, "for ):\n "),
        (25, True, None, 2, False, [118, 414, 186]),
        (17, False, [")"], None, False, "value ra"),
        (28, True, None, 2, False, [368, 210, 249]),
        (19, True, [":"], 2, True, "class cl"),
        (9, True, [")"], None, False, "return v"),
    ]


def test_salt_and_stream() -> None:
    request = Request("/v1/completions", {"prompt": "x", "stream": True})
    assert request.streams and not Request("/", {"stream": False}).streams
    assert request.salted("s") == Request("/v1/completions", {"prompt": "x", "stream": True, "cache_salt": "s"})


# Processes


@pytest.mark.parametrize(
    ("title", "role", "is_one"),
    [
        ("/opt/ray/gcs_server", "gcs", True),
        ("/opt/ray/gcs_server --log", "gcs", False),
        ("gcs_server", "gcs", False),
        ("ray::ServeController", "controller", True),
        ("ray::ServeReplica:strata:gateway.call", "gateway", True),
        ("x ray::ServeReplica:strata:gateway", "gateway", False),
    ],
)
def test_titles(title: str, role: str, is_one: bool) -> None:
    assert victims.is_replica(title, role) is is_one


def test_role_of_a_kind() -> None:
    assert [kind.role for kind in Kind] == ["prefill", "decode", "gateway", "prefill", "decode", "controller", "gcs"]


class Process:
    """Stand-in for psutil's process, in a tree of titles."""

    tree: ClassVar[dict[int, tuple[int, str]]] = {}
    killed: ClassVar[list[int]] = []

    def __init__(self, pid: int) -> None:
        if pid not in self.tree:
            raise psutil.NoSuchProcess(pid)
        self.pid = pid

    def children(self, recursive: bool) -> "list[Process]":
        assert recursive
        found: list[Process] = []
        for pid, (parent, _) in self.tree.items():
            if parent == self.pid:
                found += [Process(pid), *Process(pid).children(True)]
        return found

    def cmdline(self) -> list[str]:
        if not self.tree[self.pid][1]:
            raise psutil.ZombieProcess(self.pid)
        return [self.tree[self.pid][1], "more"]

    def create_time(self) -> float:
        return self.pid + 0.5

    def ppid(self) -> int:
        return self.tree[self.pid][0]

    def parent(self) -> "Process":
        return Process(self.ppid())

    def kill(self) -> None:
        self.killed.append(self.pid)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> type[Process]:
    Process.killed = []
    Process.tree = {
        1: (0, "init"),
        5: (1, "strata serve"),
        10: (5, "raylet"),
        20: (10, "ray::ServeReplica:strata:gateway"),
        21: (10, "ray::ServeReplica:strata:decode.generate"),
        22: (21, "VLLM::EngineCore"),
        23: (22, "VLLM::EngineCoreHelper"),
        24: (10, "ray::ServeReplica:strata:prefill"),
        25: (24, "VLLM::EngineCore_DP0"),
        26: (24, "VLLM::EngineCore 0"),
        27: (10, ""),
        40: (1, "ray::ServeReplica:strata:decode"),
    }
    monkeypatch.setattr(psutil, "Process", Process)
    return Process


@pytest.mark.parametrize(
    ("kind", "pids"),
    [
        (Kind.GATEWAY, [20]),
        (Kind.DECODE, [21]),
        (Kind.PREFILL, [24]),
        (Kind.DECODE_ENGINE, [22]),
        (Kind.PREFILL_ENGINE, [26]),
        (Kind.CONTROLLER, []),
    ],
)
@pytest.mark.usefixtures("processes")
def test_processes_are_found_by_title_among_the_descendants(kind: Kind, pids: list[int]) -> None:
    assert victims.Processes(5).find(kind) == [victims.Replica(pid, pid + 0.5) for pid in pids]
    assert victims.Processes(999).find(kind) == [], "the command has ended"


def test_only_the_same_process_is_killed(processes: type[Process]) -> None:
    population = victims.Processes(5)
    population.kill(victims.Replica(21, 21.5))
    population.kill(victims.Replica(22, 7.0))  # a later process with the same PID
    population.kill(victims.Replica(999, 999.5))
    assert processes.killed == [21]


def listening(pid: int | None, port: int, status: str = psutil.CONN_LISTEN) -> Any:
    return SimpleNamespace(pid=pid, status=status, laddr=SimpleNamespace(port=port))


@pytest.mark.parametrize(
    ("connections", "parent_of_the_node", "root"),
    [
        ([listening(20, 81)], 5, 5),
        ([listening(20, 81)], 1, 10),  # a daemon: the node itself
        ([listening(20, 82), listening(None, 81), listening(21, 81)], 5, None),
        ([listening(20, 81, psutil.CONN_ESTABLISHED)], 5, None),
        ([SimpleNamespace(pid=20, status=psutil.CONN_LISTEN, laddr=())], 5, None),
        ([listening(22, 81), listening(20, 81)], 5, 5),
    ],
)
def test_the_node_of_an_endpoint_is_found_by_its_port(
    processes: type[Process], monkeypatch: pytest.MonkeyPatch, connections: list[Any], parent_of_the_node: int, root: int | None
) -> None:
    processes.tree[10] = (parent_of_the_node, "raylet")
    monkeypatch.setattr(psutil, "net_connections", lambda kind: connections if kind == "tcp" else [])
    if root is None:
        with pytest.raises(UserError, match="No Strata gateway on this machine listens at http://x:81"):
            victims.node_of("http://x:81")
    else:
        assert victims.node_of("http://x:81") == root


# Report


def attempt(began: float, ended: float, text: str | None, **more: Any) -> Attempt:
    answer = None if text is None else Answer(text, "stop", 1, 2, ())
    return Attempt(began, ended, answer, more.pop("error", None if text else "HTTP 500"), **more)


def counted(**retries: float) -> dict[Any, float]:
    return {("strata_serve_retries_total", (("reason", reason),)): value for reason, value in retries.items()}


@pytest.fixture
def outcome() -> Outcome:
    bodies = tuple(Request("/v1/completions", {"prompt": str(number), "stream": True}) for number in range(4))
    baseline = tuple(Sent(number, (attempt(10 + number, 11 + number, f"a{number}"),)) for number in range(4))
    disturbed = (
        Sent(2, (attempt(102.0, 103.0, "a2", first=102.5, longest_gap_s=0.25),)),
        Sent(0, (attempt(101.0, 104.5, "other"),)),
        Sent(1, (attempt(105.0, 106.0, None, retryable=True), attempt(107.0, 109.0, "a1", first=108.0, longest_gap_s=1.5))),
        Sent(3, (attempt(106.0, 106.5, None), attempt(106.5, 107.0, None), attempt(110.0, 112.0, None, error="lost"))),
    )
    kills = (
        Kill(Kind.GATEWAY, 77, at=104.0, fault=1, back=106.5, accepted=105.0, answered=105.25),
        Kill(Kind.DECODE, 66, at=101.5, fault=0, back=None),
    )
    return Outcome(
        bodies,
        Pass(10.0, 14.5, baseline, counted(lost=0.0, busy=1.0)),
        Pass(100.0, 112.0, disturbed, counted(lost=3.0, busy=0.0, never=0.0)),
        planned=(Plan((Kind.DECODE,), 1.0), Plan((Kind.GATEWAY,), 2.0), Plan((Kind.PREFILL,), 3.0)),
        kills=kills,
        recovered=False,
        restarted=5,
    )


def test_numbers_of_a_run(outcome: Outcome) -> None:
    assert report.numbers(outcome) == {
        "sent": 4,
        "answered": 3,
        "lost": 1,
        "different": 1,
        "broken by gateway": 2,
        "sent again by the client": 3,
        "kills": 2,
        "not back": 2,  # the decode replica, and the prefill replica that was not killed for that reason
        "ended though not killed": 5,
        "whole in the end": 0,
    }


def cells(table: Any) -> list[tuple[str, ...]]:
    return list(zip(*(list(column.cells) for column in table.columns), strict=True))


def test_summary_table(outcome: Outcome) -> None:
    rows = dict(collections.OrderedDict((row[0], row[1:]) for row in cells(report.summary(outcome))))
    assert rows["sent"] == ("4", "4") and rows["answered"] == ("4", "3") and rows["lost"] == ("", "1")
    assert rows["retried"] == ("1", "3") and rows["  lost"] == ("0", "3") and rows["  busy"] == ("1", "0")
    assert "  never" not in rows, "zero in both"
    assert rows["longest ITL"] == ("0.00 s", "1.50 s") and rows["duration"] == ("4.5 s", "12.0 s")


def test_table_of_kills_in_their_order(outcome: Outcome) -> None:
    assert cells(report.kills_table(outcome)) == [
        ("decode", "66", "1.5", "never", "", ""),
        ("gateway", "77", "4.0", "2.50", "1.00", "1.25"),
    ]


def test_failures_are_listed(outcome: Outcome) -> None:
    first, second = report.failures(outcome)
    assert first.startswith("request 0 different: expected {'text': 'a0'") and "got {'text': 'other'" in first
    assert second == "request 3 lost: lost"
    many = [Sent(number % 4, (attempt(101.0, 102.0, None),)) for number in range(9)]
    lost = Outcome(outcome.requests, outcome.baseline, Pass(100.0, 112.0, tuple(many), {}), (), ())
    assert len(report.failures(lost)) == 5


def test_json_of_a_run(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_record, "header", lambda benchmark: {"benchmark": benchmark})
    written = report.as_json(outcome)
    assert written["benchmark"] == "chaos" and written["holds"] is False
    assert [written["passes"][name]["seconds"] for name in ("undisturbed", "disturbed")] == [4.5, 12.0]
    assert written["passes"]["disturbed"]["longest_gap_s"] == 1.5
    assert written["kills"] == [
        {
            "kind": "gateway",
            "blow": 1,
            "pid": 77,
            "at_s": 4.0,
            "back_after_s": 2.5,
            "refused_for_s": 1.0,
            "answers_again_after_s": 1.25,
        },
        {
            "kind": "decode",
            "blow": 0,
            "pid": 66,
            "at_s": 1.5,
            "back_after_s": None,
            "refused_for_s": None,
            "answers_again_after_s": None,
        },
    ]
    different, lost = written["failures"]
    assert (different["request"], different["began_s"], different["ended_s"]) == (0, 1.0, 4.5)
    assert different["answer"]["text"] == "other" and different["expected"]["text"] == "a0"
    assert (lost["request"], lost["began_s"], lost["ended_s"], lost["answer"]) == (3, 6.0, 12.0, None)
    assert lost["body"] == {"prompt": "3", "stream": True}


@pytest.mark.parametrize(("both", "holds"), [((True, True), True), ((True, False), False), ((False, True), False)])
def test_json_of_kills_at_the_edges(both: tuple[bool, bool], holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_record, "header", lambda benchmark: {"benchmark": benchmark})
    endings = [Ending((Kind.DECODE,), "came up", one) for one in both]
    written = report.edges_as_json("start", endings)
    assert (written["benchmark"], written["during"], written["holds"]) == ("chaos-edges", "start", holds)
    assert written["endings"][0] == {"killed": ["decode"], "outcome": "came up", "holds": both[0]}


def test_timeline_has_a_line_per_attempt(outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from strata.serving.chaos import timeline

    lines: list[list[tuple[Any, ...]]] = []
    marks: list[Any] = []
    spans: list[tuple[float, float]] = []
    moments: list[float] = []

    def hlines(self: Any, rows: Any, starts: Any, ends: Any, **more: Any) -> None:
        lines.append(list(zip(rows, starts, ends, strict=True)))

    monkeypatch.setattr(Axes, "hlines", hlines)
    monkeypatch.setattr(Axes, "scatter", lambda self, xs, ys, **more: marks.append(list(zip(xs, ys, strict=True))))
    monkeypatch.setattr(Axes, "axvspan", lambda self, start, end, **more: spans.append((start, end)))
    monkeypatch.setattr(Axes, "axvline", lambda self, at, **more: moments.append(at))
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda self, path: Path(path).write_bytes(b"png"))
    timeline.draw(outcome, tmp_path / "timeline.png")
    waits, streams = lines
    assert waits == [(0, 2.0, 2.5), (1, 1.0, 4.5), (2, 5.0, 6.0), (2, 7.0, 8.0), (3, 6.0, 6.5), (3, 6.5, 7.0), (3, 10.0, 12.0)]
    assert streams == [
        (0, 2.5, 3.0),
        (1, 4.5, 4.5),
        (2, 6.0, 6.0),
        (2, 8.0, 9.0),
        (3, 6.5, 6.5),
        (3, 7.0, 7.0),
        (3, 12.0, 12.0),
    ]
    assert marks == [[(6.0, 2), (6.5, 3), (7.0, 3)]]
    assert moments == [4.0, 1.5] and spans == [(4.0, 6.5)]
    assert (tmp_path / "timeline.png").read_bytes() == b"png"
