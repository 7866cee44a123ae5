"""Diagnoses of evidence that takes several machines or GPUs, and of two ranks, which have no majority."""

from dataclasses import replace

import pytest

from strata.training.watchdog import diagnosis, evidence
from strata.training.watchdog.evidence import Connection, Evidence
from strata.training.watchdog.flight import Collective

IN_COLLECTIVE = ("/x/torch/distributed/distributed_c10d.py:9 all_reduce", "loop.py:1 step")
STEP = (("all_reduce", "[[4096]]"), ("all_gather", "[[1024]]"), ("all_reduce", "[[1]]"))


def history(
    last: int, waits: bool, last_signature: tuple[str, str] | None = None, state: str = "scheduled"
) -> tuple[Collective, ...]:
    """Collectives of whole steps, up to number `last`."""
    ops = [Collective(seq, *STEP[(seq - 1) % 3], True, "completed") for seq in range(1, last + 1)]
    op, sizes = last_signature or STEP[(last - 1) % 3]
    return (*ops[:-1], Collective(last, op, sizes, not waits, state))


def rank(number: int, ops: tuple[Collective, ...], **more: object) -> Evidence:
    one = Evidence("s", number, 2, f"host-{number}", None, 100 + number, 9, "backward", 50, (0.1,), IN_COLLECTIVE)
    return replace(one, groups={"0:default_pg": ops}, state="S", **more)


@pytest.mark.parametrize(
    ("signature", "kind"),
    [
        (("all_gather", "[[1024]]"), "collective skipped or out of order"),
        (("all_reduce", "[[999]]"), "collective of other sizes"),
        (("broadcast", "[[4096]]"), "different collective"),
    ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_of_two_ranks_the_one_that_leaves_the_pattern_is_at_fault(signature: tuple[str, str], kind: str, victim: int) -> None:
    ranks = [rank(number, history(31, True, signature if number == victim else None)) for number in range(2)]
    found = diagnosis.hang(ranks)
    assert (found.kind, found.ranks) == (kind, (victim,)) and found.stuck and found.stuck.collective.seq == 31
    assert "collective 31" in found.sentence


def test_gpu_that_never_begins_the_collective_is_stuck() -> None:
    ranks = [rank(number, history(31, True, state="scheduled" if number else "started"), gpu=str(number)) for number in range(2)]
    found = diagnosis.hang(ranks)
    assert (found.kind, found.ranks) == ("GPU stuck", (1,))


def test_rank_in_another_group_is_not_blamed_for_waiting() -> None:
    """Rank 1 waits in its tensor group for rank 2, which loops; rank 0 waits for rank 1."""
    tensor = {"3:tensor": (Collective(7, "all_reduce", "[[8]]", False, "scheduled"),)}
    ranks = [
        rank(0, history(31, True)),
        replace(rank(1, history(30, False)), groups={"0:default_pg": history(30, False), **tensor}),
        replace(rank(2, history(30, False)), stack=("model.py:7 forward",), thread_cpu=0.9),
    ]
    found = diagnosis.hang(ranks)
    assert (found.kind, found.ranks) == ("busy in Python", (2,)) and "model.py:7 forward" in found.sentence


def test_connections_to_ray_are_no_evidence() -> None:
    broken = Connection("A:1", "RAY:1", 50, 0, 9)
    between = [Connection("A:2", "B:2", 50, 0, 4), Connection("B:2", "A:2", 0, 8, 0)]
    ranks = [rank(0, history(31, True), connections=(broken, between[0])), rank(1, history(31, True), connections=(between[1],))]
    assert diagnosis.hang(ranks).ranks == (1,)
    ranks = [rank(0, history(31, True), connections=(broken,)), rank(1, history(31, True))]
    assert diagnosis.hang(ranks).ranks == (0, 1)


def test_first_death_is_named_and_its_consequences_are_not() -> None:
    gone = replace(rank(1, ()), gone=True, seen_at=100.0)
    later = replace(rank(0, ()), ended="raised", error="RuntimeError: ... Connection closed by peer", ended_at=100.1)
    found = diagnosis.dead([later, gone])
    assert found and (found.kind, found.ranks) == ("process died", (1,))
    raised = replace(rank(0, ()), ended="raised", error="ValueError: row 7", ended_at=99.0)
    found = diagnosis.dead([raised, gone])
    assert found and (found.kind, found.ranks) == ("error raised", (0,)) and "row 7" in found.sentence
    assert diagnosis.dead([later]) is None and diagnosis.dead([replace(rank(0, ()), ended="finished", gone=True)]) is None


def test_damaged_and_older_reports_are_left_out(tmp_path) -> None:
    (tmp_path / "rank-0.json").write_text("{")
    (tmp_path / "rank-1.json").write_text('{"status": {}, "process": {"gone": true, "at": 1}}')
    assert evidence.read(tmp_path) == [] and evidence.read(tmp_path / "none") == []
