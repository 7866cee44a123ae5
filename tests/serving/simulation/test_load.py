"""Generated loads, traces and calibration files."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from strata.platform.errors import UserError
from strata.serving.simulation import calibration, generated
from strata.serving.simulation.generated import Arrivals, Shape, arrival_times, closed_loop, lengths, open_loop
from strata.serving.simulation.requests import HashedText, OwnText
from strata.serving.simulation.traces import replay


@pytest.mark.parametrize(
    ("kind", "horizon_s"), [("poisson", 2000.0), ("bursts", 20_000.0), ("diurnal", 86_400.0), ("ramp", 7200.0)]
)
def test_arrivals_have_their_rate(kind: Arrivals, horizon_s: float) -> None:
    times = list(itertools.takewhile(lambda at: at < horizon_s, arrival_times(kind, 1.5, np.random.default_rng(1))))
    assert times == sorted(times) and times[0] > 0
    assert len(times) / horizon_s == pytest.approx(1.5, rel=0.08)


def test_poisson_gaps_vary_as_much_as_their_mean_and_bursts_more() -> None:
    def dispersion(kind: Arrivals) -> float:
        """Variance over mean of the arrivals in windows of ten seconds; 1 for a Poisson process."""
        times = np.array(list(itertools.islice(arrival_times(kind, 2.0, np.random.default_rng(2)), 20_000)))
        counts = np.bincount((times // 10).astype(int))[:-1]
        return float(counts.var() / counts.mean())

    assert dispersion("poisson") == pytest.approx(1.0, abs=0.15)
    assert dispersion("bursts") > 5


def test_the_rate_of_a_day_rises_and_falls() -> None:
    times = np.array(list(itertools.takewhile(lambda at: at < 86_400, arrival_times("diurnal", 1.0, np.random.default_rng(3)))))
    quarters = np.bincount((times // 21_600).astype(int), minlength=4) / 21_600
    # Mean of 1 + 0.8 sin over a quarter: 1 + 0.8 * 2 / pi.
    assert quarters == pytest.approx([1.51, 1.51, 0.49, 0.49], rel=0.1)


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0])
def test_lengths_have_their_mean_and_variation(variation: float) -> None:
    drawn = np.array(list(itertools.islice(lengths(400, variation, np.random.default_rng(4)), 20_000)))
    assert drawn.mean() == pytest.approx(400, rel=0.03) and drawn.min() >= 1
    assert drawn.std() / drawn.mean() == pytest.approx(variation, abs=0.03)


def test_turns_repeat_the_conversation() -> None:
    shape = Shape(prompt=30, output=12, variation=0.0, shared=20, turns=3, think_s=2.0)
    _, first = next(open_loop("poisson", 1.0, 3, shape, 4, 0))
    assert first.then is not None
    _, second = first.then()  # type: ignore[misc]
    _, third = second.then()  # type: ignore[misc]
    assert [each.prompt for each in (first, second, third)] == [50, 92, 134]
    assert first.text is second.text is third.text and third.then is None


def test_a_load_has_the_requested_number_of_requests() -> None:
    shape = Shape(10, 10, turns=3)
    count = 0
    for _, request in open_loop("poisson", 1.0, 100, shape, 4, 0):
        count += 1
        while request.then is not None:
            _, request = request.then()  # type: ignore[misc]
            count += 1
    assert count == 100


def test_clients_of_a_closed_loop_send_one_after_the_other() -> None:
    begun = list(closed_loop(3, 7, Shape(10, 10), 4, 0))
    assert [at for at, _ in begun] == [0.0] * 3
    following = [request.then() for _, request in begun for _ in range(2)]  # type: ignore[misc]
    assert sum(each is not None for each in following) == 4
    texts = {request.text for _, request in [*begun, *(each for each in following if each)]}
    assert len(texts) == 7


def test_loads_depend_on_the_seed_alone() -> None:
    def first(seed: int) -> list[tuple[float, int, int]]:
        load = open_loop("bursts", 5.0, 50, Shape(100, 100, turns=2), 16, seed)
        return [(at, request.prompt, request.output) for at, request in load]

    assert first(1) == first(1) != first(2)


def test_names_of_shared_openings_are_equal_and_others_differ() -> None:
    one, two, other = OwnText(1, 0, 3), OwnText(2, 0, 3), OwnText(3, 1, 3)
    assert list(one.names(0, 5))[:3] == list(two.names(0, 5))[:3]
    assert len({*one.names(0, 5), *two.names(0, 5), *other.names(0, 5)}) == 5 + 2 + 5
    assert [*one.names(0, 2), *one.names(2, 4), *one.names(4, 7)] == list(one.names(0, 7))


def test_names_of_hashes_are_equal_where_hashes_are() -> None:
    one, two = HashedText(1, (7, 8, 9), 4, 12), HashedText(2, (7, 8, 10), 4, 12)
    assert list(one.names(0, 8)) == list(two.names(0, 8))
    assert not set(one.names(8, 14)) & set(two.names(8, 14))
    assert [*one.names(0, 5), *one.names(5, 11), *one.names(11, 16)] == list(one.names(0, 16))
    assert len(set(one.names(0, 16))) == 16
    assert len(set(HashedText(1, (7, 7), 4, 8).names(0, 8))) == 8
    # Blocks after the prompt's are the answer's, whatever the last hash covers.
    assert list(one.names(0, 10)) == list(HashedText(1, (7, 8, 9), 4, 10).names(0, 10))
    assert set(one.names(10, 12)).isdisjoint(HashedText(1, (7, 8, 9), 4, 10).names(10, 12))


def mooncake(path: Path, *entries: object) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in entries))
    return path


GOOD = {"timestamp": 27_000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}


def test_mooncake_traces_are_replayed(tmp_path: Path) -> None:
    later = {"timestamp": 30_500, "input_length": 600, "output_length": 0, "hash_ids": [0, 9]}
    found = list(replay(mooncake(tmp_path / "t.jsonl", GOOD, "", later), 128, speed=2.0))
    assert [(at, each.prompt, each.output) for at, each in found] == [(0.0, 1100, 5), (1.75, 600, 1)]
    first, second = (each.text for _, each in found)
    assert list(first.names(0, 4)) == list(second.names(0, 4)) and set(first.names(4, 8)).isdisjoint(second.names(4, 8))
    assert len(list(replay(tmp_path / "t.jsonl", 128, requests=1))) == 1


def test_azure_traces_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    found = list(replay(path, 16))
    assert [(each.prompt, each.output) for _, each in found] == [(374, 44), (396, 109)]
    assert [at for at, _ in found] == [0.0, pytest.approx(4.314579)]


@pytest.mark.parametrize(
    ("second", "cause"),
    [
        ("{", "not JSON"),
        ([1], "not an object"),
        ({"timestamp": 1}, "input_length, output_length, hash_ids"),
        (GOOD | {"timestamp": "now"}, "timestamp is not a number: now"),
        (GOOD | {"timestamp": True}, "timestamp is not a number"),
        (GOOD | {"timestamp": 26_999}, "before that of the line above"),
        (GOOD | {"input_length": 0}, "input_length is not a whole number from 1"),
        (GOOD | {"input_length": 1.5}, "input_length"),
        (GOOD | {"output_length": -1}, "output_length"),
        (GOOD | {"output_length": 10**9}, "output_length"),
        (GOOD | {"hash_ids": [1, -1]}, "hash_ids"),
        (GOOD | {"hash_ids": None}, "hash_ids"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, second: object, cause: str) -> None:
    path = mooncake(tmp_path / "t.jsonl", GOOD, second)
    with pytest.raises(UserError) as raised:
        list(replay(path, 16))
    assert raised.value.cause.startswith(f"{path}:2: ") and cause in raised.value.cause


@pytest.mark.parametrize(
    ("text", "line", "cause"),
    [
        ("", 1, "header"),
        ("TIMESTAMP,ContextTokens\n", 1, "header lacks"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", 2, "TIMESTAMP is no date"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", 2, "2 columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", 2, "ContextTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,-1\n", 2, "GeneratedTokens"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n",
            3,
            "before that of the line above",
        ),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, text: str, line: int, cause: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        list(replay(path, 16))
    assert raised.value.cause.startswith(f"{path}:{line}: ") and cause in raised.value.cause


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    for name, content, cause in (
        ("t.txt", b"", "suffix"),
        ("none.jsonl", None, "cannot be read"),
        ("t.jsonl", b"\xff\xfe\x00", "not text"),
        ("e.jsonl", b"\n\n", "has no requests"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=cause):
            list(replay(tmp_path / name, 16))
    with pytest.raises(UserError, match="do not divide"):
        list(replay(mooncake(tmp_path / "b.jsonl", GOOD), 48))


def test_calibrations_are_checked(tmp_path: Path) -> None:
    good = {
        "fixed_s": 0.01, "sequence_s": 0.001, "context_token_s": 1e-6, "prompt_token_s": 1e-4, "prompt_pair_s": 1e-8,
        "request_s": 0.01, "kv_tokens": 1000, "context": 500,
    }  # fmt: skip
    path = tmp_path / "c.json"
    path.write_text(json.dumps(good))
    found = calibration.load(path)
    assert found.step(3, 100, 50, 1250) == pytest.approx(0.01 + 0.003 + 1e-4 + 5e-3 + 1.25e-5)
    assert found.decode_terms(3) == pytest.approx((0.013, 1e-6))
    with_front_end = found.model_copy(update={"prompt_s": 0.002})
    assert with_front_end.step(3, 100, 50, 1250, 2) == pytest.approx(found.step(3, 100, 50, 1250) + 0.004)
    beside = found.model_copy(update={"prompt_beside_s": 0.003})
    assert beside.step(3, 100, 50, 1250) == pytest.approx(found.step(3, 100, 50, 1250) + 0.003)
    assert beside.step(3, 100, 0, 0) == found.step(3, 100, 0, 0) and beside.step(0, 0, 50, 1250) == found.step(0, 0, 50, 1250)
    for changed, cause in ((good | {"fixed_s": 0}, "fixed_s"), (good | {"speed": 1}, "speed"), ({}, "fixed_s")):
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=cause):
            calibration.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        calibration.load(tmp_path / "none.json")


def test_a_burst_has_its_share_of_the_time() -> None:
    share = generated._phases(np.random.default_rng(5))
    drawn = np.array([share(at) for at in np.arange(0, 100_000, 0.5)])
    assert set(drawn) == {1.0, 1 / generated.BURST_FACTOR}
    assert (drawn == 1.0).mean() == pytest.approx(10 / 70, rel=0.1)
