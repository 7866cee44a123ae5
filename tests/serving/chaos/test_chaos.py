"""Counts and verdicts of `strata chaos` against a stand-in endpoint with configurable failures; no engine, no Ray."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import typer
from chaos_stand_in import StandIn, stand_in

from strata.platform import ports
from strata.platform.errors import UserError
from strata.serving.chaos import client, command, kills, report, requests, run, session, victims
from strata.serving.chaos.endpoint import wait_until_ready
from strata.serving.chaos.victims import Kind, Processes
from strata.serving.metrics import counters

pytestmark = pytest.mark.slow

SET = requests.make(24, 7, "stand-in", 64)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "AFTER_S", 0.5)
    monkeypatch.setattr(kills, "SETTLE_S", 0.2)
    monkeypatch.setattr(kills, "PERIOD_S", 0.05)
    monkeypatch.setattr(counters, "PERIOD_S", 0.05)


def disturbed(endpoint: StandIn, *kinds: Kind, overlap: bool = False) -> run.Outcome:
    return with_faults(endpoint, [(kind,) for kind in kinds], overlap=overlap)


def with_faults(endpoint: StandIn, faults: list[kills.Fault], overlap: bool = False, spare: bool = False) -> run.Outcome:
    return asyncio.run(run.disturb(endpoint.url, endpoint, SET, faults, concurrency=8, seed=3, overlap=overlap, spare=spare))


def test_requests_are_reproducible_by_seed() -> None:
    assert requests.make(50, 1, "m", 256) == requests.make(50, 1, "m", 256)
    assert requests.make(50, 1, "m", 256) != requests.make(50, 2, "m", 256)


@pytest.mark.parametrize("context", [64, 256, 2048])
def test_requests_are_of_every_kind_and_fit_the_context(context: int) -> None:
    made = requests.make(1500, 0, "m", context)
    bodies = [one.body for one in made]
    assert all(body["temperature"] == 0 for body in bodies)
    for body in bodies:
        prompt = body.get("prompt") or body["messages"][0]["content"]  # no tokenizer produces more tokens than bytes
        assert prompt and len(prompt) + body["max_tokens"] <= context
    kinds = {(one.path, one.streams, "stop" in one.body, "logprobs" in one.body) for one in made}
    assert len(kinds) == 16
    assert any("stream_options" in body for body in bodies)
    assert any(isinstance(body.get("prompt"), list) for body in bodies)


def test_kills_are_spread_and_seeded() -> None:
    faults: list[kills.Fault] = [(Kind.DECODE,), (Kind.DECODE,), (Kind.PREFILL, Kind.CONTROLLER), (Kind.GATEWAY,)]
    planned = kills.plan(faults, 5, 100.0)
    assert planned == kills.plan(faults, 5, 100.0) != kills.plan(faults, 6, 100.0)
    assert sorted(one.kinds for one in planned) == sorted(faults)
    moments = [one.at_s for one in planned]
    assert moments == sorted(moments) and moments[0] >= 5 and moments[-1] <= 75


def test_surviving_answers_count_as_the_same() -> None:
    with stand_in() as endpoint:
        outcome = disturbed(endpoint, Kind.PREFILL, Kind.DECODE)
        assert sorted(endpoint.killed) == [Kind.DECODE, Kind.PREFILL]
    assert outcome.holds
    numbers = report.numbers(outcome)
    assert numbers["sent"] == numbers["answered"] >= 24 and numbers["kills"] == 2
    assert not any(numbers[name] for name in ("lost", "different", "broken by gateway", "sent again by the client", "not back"))
    assert report.counted(outcome.disturbed)["migrated"] == {"continued": 1}
    assert report.counted(outcome.baseline)["migrated"] == {"continued": 0}
    assert all(kill.back and kill.back - kill.at > 0.3 for kill in outcome.kills)


def test_the_two_passes_share_no_cached_prefix() -> None:
    with stand_in() as endpoint:
        disturbed(endpoint)
        salts = [body["cache_salt"] for body in endpoint.received]
    assert len(salts) == 48 and len(set(salts[:24])) == len(set(salts[24:])) == 1 and salts[0] != salts[-1]


def test_one_of_two_decode_replicas_always_runs() -> None:
    with stand_in() as endpoint:
        outcome = disturbed(endpoint, Kind.DECODE, Kind.DECODE, Kind.DECODE)
        assert endpoint.least_decoding == 1
    first, second, third = outcome.kills
    assert first.back and second.back and first.back <= second.at and second.back <= third.at
    assert (
        third.back and max(one.attempts[0].began for one in outcome.disturbed.sent) > third.back
    )  # the new replica serves requests


def test_overlapping_kills_leave_no_decode_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "LAST", kills.FIRST)  # both simultaneously
    with stand_in(away_s=1.0) as endpoint:
        outcome = disturbed(endpoint, Kind.DECODE, Kind.DECODE, overlap=True)
        assert endpoint.least_decoding == 0
    assert outcome.holds


@pytest.mark.parametrize("failure", ["breaks", "errs"])
def test_streams_that_break_with_their_replica_are_lost(failure: str) -> None:
    with stand_in(**{failure: True}) as endpoint:
        outcome = disturbed(endpoint, Kind.DECODE)
    assert 0 < outcome.count(run.Verdict.LOST) == endpoint.cut
    assert outcome.count(run.Verdict.DIFFERENT) == outcome.broken_by_gateway == 0
    assert not outcome.holds
    assert "lost" in report.failures(outcome)[0]


def test_changed_answers_are_different() -> None:
    with stand_in(wrong=True) as endpoint:
        outcome = disturbed(endpoint, Kind.DECODE)
    assert 0 < outcome.count(run.Verdict.DIFFERENT) == endpoint.spoiled
    assert outcome.count(run.Verdict.LOST) == 0 and not outcome.holds


def test_requests_broken_by_a_gateway_are_retried_and_counted() -> None:
    with stand_in() as endpoint:
        outcome = disturbed(endpoint, Kind.GATEWAY)
    assert outcome.holds and outcome.count(run.Verdict.SAME) == len(outcome.disturbed.sent)
    assert 0 < outcome.broken_by_gateway <= outcome.sent_again
    [kill] = outcome.kills
    assert kill.accepted and kill.answered and kill.back
    assert kill.at + endpoint.away_s <= kill.accepted <= kill.answered <= kill.back


def test_replica_without_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "BACK_LIMIT_S", 1.0)
    with stand_in(dead=True) as endpoint:
        outcome = disturbed(endpoint, Kind.DECODE, Kind.DECODE)
        assert endpoint.killed == [Kind.DECODE]  # the second kill was skipped
    assert outcome.not_back == 2 and not outcome.holds
    assert report.as_json(outcome)["kills"][0]["back_after_s"] is None


def test_overlapping_kills_without_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "BACK_LIMIT_S", 1.0)
    with stand_in(dead=True) as endpoint:
        outcome = disturbed(endpoint, Kind.PREFILL, Kind.PREFILL, overlap=True)
        assert endpoint.killed == [Kind.PREFILL]  # there was only one
    assert outcome.not_back == 2 and not outcome.holds


def test_baseline_of_an_earlier_run_is_reused() -> None:
    with stand_in() as endpoint:
        before = disturbed(endpoint)
        count = len(endpoint.received)
        again = asyncio.run(run.disturb(endpoint.url, endpoint, SET, [(Kind.DECODE,)], 8, 3, baseline=before.baseline))
        assert len(endpoint.received) == count + len(again.disturbed.sent)
    assert again.holds and again.baseline is before.baseline


def test_failure_in_the_undisturbed_run_is_a_user_error() -> None:
    strange = requests.Request("/nowhere", {"stream": False, "prompt": [1]})
    with stand_in() as endpoint, pytest.raises(UserError, match="failed in the undisturbed run"):
        asyncio.run(run.disturb(endpoint.url, endpoint, [strange], [], 1, 0))


def test_processes_of_a_fault_are_killed_simultaneously() -> None:
    with stand_in() as endpoint:
        outcome = with_faults(endpoint, [(Kind.DECODE, Kind.DECODE, Kind.CONTROLLER), (Kind.PREFILL,)])
        assert endpoint.least_decoding == 0 and sorted(endpoint.killed) == sorted(
            [*[Kind.DECODE] * 2, Kind.CONTROLLER, Kind.PREFILL]
        )
    assert outcome.holds and outcome.recovered and not outcome.restarted
    together = [kill for kill in outcome.kills if kill.kind in (Kind.DECODE, Kind.CONTROLLER)]
    assert len({kill.fault for kill in together}) == 1 and len({kill.pid for kill in together}) == 3
    assert together[-1].at - together[0].at < 0.1


def test_replicas_ended_by_a_new_controller_are_counted() -> None:
    with stand_in(rejects=True) as endpoint:
        outcome = disturbed(endpoint, Kind.CONTROLLER)
    assert outcome.restarted == 1 and not outcome.holds and outcome.not_back == 0
    assert report.numbers(outcome)["ended though not killed"] == 1


def test_random_faults_leave_an_engine_running() -> None:
    drawn_from: list[kills.Fault] = [(Kind.DECODE,), (Kind.PREFILL,), (Kind.DECODE, Kind.CONTROLLER), (Kind.GATEWAY,)]
    faults = kills.at_random(drawn_from, 12, 1)
    assert faults == kills.at_random(drawn_from, 12, 1) != kills.at_random(drawn_from, 12, 2)
    with stand_in(away_s=0.2) as endpoint:
        outcome = with_faults(endpoint, faults, spare=True)
        assert endpoint.fewest_engines >= 1
    assert outcome.holds and len(outcome.kills) == sum(map(len, faults))


@pytest.mark.parametrize("spare", [False, True])
def test_results_until_ctrl_c_are_reported(spare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "FIRST", 0.0)
    monkeypatch.setattr(kills, "LAST", 4.0)  # the other kills are scheduled long after the first
    with stand_in() as endpoint:
        made = endpoint.kill
        monkeypatch.setattr(endpoint, "kill", lambda replica: (made(replica), signal.raise_signal(signal.SIGINT)))
        outcome = with_faults(endpoint, [(Kind.PREFILL,), (Kind.DECODE,), (Kind.DECODE,)] * 4, spare=spare)
    assert len(outcome.kills) == len(outcome.planned) < 12
    assert outcome.holds and outcome.recovered


def test_endpoint_that_does_not_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "BACK_LIMIT_S", 1.0)
    with stand_in(dead=True) as endpoint:
        outcome = with_faults(endpoint, [(Kind.PREFILL,), (Kind.DECODE, Kind.DECODE)], spare=True)
        assert Kind.DECODE not in endpoint.killed or Kind.PREFILL not in endpoint.killed  # one engine was left running
    assert not outcome.recovered and not outcome.holds and outcome.not_back > 0


def test_no_process_to_kill() -> None:
    with stand_in() as endpoint, pytest.raises(UserError, match="no decode-engine"):
        endpoint._alive[Kind.DECODE_ENGINE] = []
        disturbed(endpoint, Kind.DECODE_ENGINE)


# One stream


def received(events: list[str]) -> client.Attempt:
    async def send() -> client.Attempt:
        body = "".join(f"data: {event}\n\n" for event in events)
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
        async with httpx.AsyncClient(base_url="http://e", transport=transport) as http:
            return await client.send(http, requests.Request("/v1/completions", {"stream": True}))

    return asyncio.run(send())


def event(text: str, finish: str | None = None, name: str = "a") -> str:
    return json.dumps({"id": name, "choices": [{"text": text, "finish_reason": finish}]})


def test_complete_stream() -> None:
    usage = json.dumps({"id": "a", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    got = received([event("x"), event("y", "length"), usage, "[DONE]"])
    assert got.answer == client.Answer("xy", "length", 3, 2, ()) and got.events == 2 and got.error is None


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([event("x"), event("y", "length")], "without [DONE]"),
        ([event("x"), "[DONE]"], "no finish_reason"),
        ([event("x", "stop"), event("y", "stop"), "[DONE]"], "went on after"),
        ([event("x"), event("y", "stop", "b"), "[DONE]"], "several ids"),
        ([event("x"), json.dumps({"error": {"message": "engine died"}}), "[DONE]"], "engine died"),
        ([event("x", "stop"), "[DONE]", event("y")], "after [DONE]"),
        (["{"], "JSONDecodeError"),
    ],
)
def test_invalid_streams(events: list[str], error: str) -> None:
    got = received(events)
    assert got.answer is None and not got.retryable
    assert got.error and error in got.error


# Counters


def test_restarted_counters_are_summed() -> None:
    meter = counters.Meter(httpx.AsyncClient())
    text = 'strata_serve_retries_total{{model="m",reason="{}"}} {}\nvllm_other 3\n'
    for moment, (reason, value) in enumerate([("a", 5), ("a", 7), ("b", 2), ("a", 1), ("a", 4)], 1):
        meter.take(counters.parse(text.format(reason, value)), moment)
    assert counters.by(meter.increases, counters.SERVE_RETRIES, "reason") == {"a": 6, "b": 2}


# Processes


@pytest.mark.parametrize(
    ("title", "role", "is_one"),
    [
        ("ray::ServeReplica:strata:decode", "decode", True),
        ("ray::ServeReplica:strata:decode.handle_request", "decode", True),
        ("ray::ServeReplica:strata:decoder", "decode", False),
        ("ray::ServeReplica:strata.qwen3-0.6b.2:decode", "decode", True),
        ("ray::ServeReplica:stratagem:decode", "decode", False),
        ("ray::ServeReplica:strata:prefill", "decode", False),
        ("ray::ServeReplica:other:decode", "decode", False),
        ("ray::IDLE", "decode", False),
        ("ray::ServeController.listen_for_change", "controller", True),
        ("ray::ServeReplica:strata:controller", "controller", False),
    ],
)
def test_replicas_are_recognized_by_title(title: str, role: str, is_one: bool) -> None:
    assert victims.is_replica(title, role) is is_one


REPLICA = """
import subprocess, sys, time
from setproctitle import setproctitle
engine = "import time; from setproctitle import setproctitle; setproctitle('VLLM::EngineCore'); print(flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", engine], stdout=subprocess.PIPE)
child.stdout.readline()
setproctitle("ray::ServeReplica:strata:decode")
print(child.pid, flush=True)
time.sleep(60)
"""


@contextmanager
def replica_process() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    pytest.importorskip("setproctitle")
    with subprocess.Popen([sys.executable, "-c", REPLICA], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        engine = psutil.Process(int(process.stdout.readline()))
        try:
            yield psutil.Process(process.pid), engine
        finally:
            for one in (process, engine):
                one.kill()


def wait_until_gone(find: Callable[[Kind], list[victims.Replica]], kind: Kind) -> None:
    deadline = time.monotonic() + 10
    while find(kind):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_replica_and_engine_are_found_and_killed_separately() -> None:
    mine = Processes(psutil.Process().pid)
    others = {kind: mine.find(kind) for kind in Kind}  # of endpoints started by other tests

    def find(kind: Kind) -> list[victims.Replica]:
        return [replica for replica in mine.find(kind) if replica not in others[kind]]

    with replica_process() as (replica, engine):
        [found] = find(Kind.DECODE)
        [found_engine] = find(Kind.DECODE_ENGINE)
        assert (found.pid, found_engine.pid) == (replica.pid, engine.pid)
        assert find(Kind.PREFILL) == find(Kind.PREFILL_ENGINE) == find(Kind.GATEWAY) == []
        mine.kill(found_engine)
        wait_until_gone(find, Kind.DECODE_ENGINE)
        assert find(Kind.DECODE) == [found]
        mine.kill(victims.Replica(found.pid, found.created - 100))  # an earlier process with this PID
        assert find(Kind.DECODE) == [found]
        mine.kill(found)
        wait_until_gone(find, Kind.DECODE)
    mine.kill(found)  # gone: nothing to do


def test_port_of_a_foreign_process() -> None:
    with stand_in() as endpoint, pytest.raises(UserError, match="No Strata gateway"):
        victims.node_of(endpoint.url)


# The command


def test_parse_faults() -> None:
    assert session.parse_faults("prefill,decode=2") == [(Kind.PREFILL,), (Kind.DECODE,), (Kind.DECODE,)]
    assert session.parse_faults("decode+controller=2") == [(Kind.DECODE, Kind.CONTROLLER)] * 2
    assert session.parse_faults("") == []
    for wrong in ("proxy", "decode=two", "decode=", "decode+", "decode+proxy"):
        with pytest.raises(UserError, match="is not valid"):
            session.parse_faults(wrong)


def test_random_needs_processes_to_kill() -> None:
    with pytest.raises(UserError, match="needs processes to draw from"):
        command.chaos(kill="", random=5, url="http://127.0.0.1:1")


@pytest.mark.parametrize(("behaviour", "code"), [({}, 0), ({"wrong": True}, 1), ({"errs": True}, 1)])
def test_exit_code_and_files(
    behaviour: dict[str, bool], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in(**behaviour) as endpoint:
        monkeypatch.setattr(victims, "node_of", lambda url: 0)
        monkeypatch.setattr(run, "Processes", lambda root: endpoint)
        app = typer.Typer()
        app.command()(command.chaos)
        words = ["--url", endpoint.url, "--requests", "24", "--concurrency", "8", "--json", str(tmp_path / "c.json")]
        with pytest.raises(SystemExit) as ended:
            app(words, prog_name="chaos")
    assert ended.value.code == code
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["holds"] is (code == 0) and len(written["kills"]) == 3
    assert bool(written["failures"]) is bool(code)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "longest ITL" in capsys.readouterr().out


def test_an_endpoint_that_ends_before_it_is_ready_shows_its_log(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    with ports.reserve() as held, log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", "print('error: no such model'); raise SystemExit(3)"], stdout=output)
        with pytest.raises(UserError, match=r"ended with code 3 before it was ready[\s\S]*no such model"):
            wait_until_ready(held.url, process, log)


def test_url_excludes_overrides() -> None:
    with pytest.raises(UserError, match="--url"):
        command.chaos(overrides=["serve.eager=true"], url="http://127.0.0.1:1")
