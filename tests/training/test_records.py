from pathlib import Path

from strata.training import records
from strata.training.records import Follower, Record


def record(step: int) -> Record:
    return Record(step=step, loss=1.0 / step, lr=0.1, grad_norm=None, tokens_per_s=10.0, time=0.0)


def steps(found: object) -> list[int]:
    return [item["step"] for item in found]  # type: ignore[attr-defined]


def test_follower_sees_each_record_once_and_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert steps(follower.new()) == []
    records.append(path, record(1))
    records.append(path, record(2))
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert steps(follower.new()) == [1, 2]
    assert steps(follower.new()) == []
    with path.open("a") as file:
        file.write('ss": 0.5}\n')
    assert steps(follower.new()) == [3]


def test_cut_forgets_later_steps_and_a_half_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 6):
        records.append(path, record(step))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    follower = Follower(path)
    assert steps(follower.new()) == [1, 2, 3, 4, 5]
    records.cut(path, 3)
    records.append(path, record(4))
    assert steps(records.read(path)) == [1, 2, 3, 4]
    assert steps(follower.new()) == [1, 2, 3, 4]
