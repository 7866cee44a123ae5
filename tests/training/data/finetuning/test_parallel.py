"""Choice between Ray Data, processes and one after another, and the work handed to Ray Data."""

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection
from strata.training.data.finetuning import parallel, prepare

from . import tiny
from .tiny import chats, write_jsonl


class Dataset:
    """Stand-in for a Ray dataset: pickles what it hands on, as Ray does, and reorders it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def map_batches(self, function: Callable[[dict[str, Any]], dict[str, Any]], batch_size: int) -> "Dataset":
        assert batch_size == 1
        function = pickle.loads(pickle.dumps(function))
        results = []
        for row in reversed(self._rows):
            batch = function({key: np.array([value], object) for key, value in row.items()})
            results.append({key: values[0] for key, values in batch.items()})
        return Dataset(results)

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand-in for Ray, connected to a cluster. Records the number of blocks of each dataset."""
    module, data, blocks = ModuleType("ray"), ModuleType("ray.data"), list[int]()

    def from_items(items: list[dict[str, Any]], override_num_blocks: int) -> Dataset:
        blocks.append(override_num_blocks)
        return Dataset(items)

    module.is_initialized, module.data, data.from_items = lambda: True, data, from_items  # type: ignore[attr-defined]
    module.available_resources = lambda: {"CPU": 1.0}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.data", data)
    return blocks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tokenizer(tmp_path_factory.mktemp("tokenizer"), tiny.CHATML)


def write(folder: Path, count: int) -> DataSection:
    for number in range(count):
        write_jsonl(folder / f"{number}.jsonl", chats(5, 5 * number))
    return DataSection(path=folder, kind="chat")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_ray_data_writes_the_same_bytes(
    tokenizer: Path, tmp_path: Path, own_home: Path, ray: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "in", parallel.RAY_LEAST_INPUTS)
    seen: list[tuple[int, int]] = []
    prepare.prepare(data, tokenizer, 64, print, lambda done, total: seen.append((done, total)))
    assert ray == [8] and seen == [(done, 8) for done in range(9)]
    (own_home / ".strata").rename(tmp_path / "ray")
    monkeypatch.delitem(sys.modules, "ray")
    prepare.prepare(data, tokenizer, 64)
    assert content(own_home / ".strata/rows") == content(tmp_path / "ray/rows")
    assert content(own_home / ".strata/rendered") == content(tmp_path / "ray/rendered")


def test_few_inputs_are_rendered_here(tokenizer: Path, tmp_path: Path, ray: list[int]) -> None:
    prepare.prepare(write(tmp_path / "in", parallel.RAY_LEAST_INPUTS - 1), tokenizer, 64)
    assert ray == []


def test_inputs_are_rendered_here_if_all_cpus_of_the_cluster_are_in_use(
    tokenizer: Path, tmp_path: Path, own_home: Path, ray: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["ray"], "available_resources", dict)
    seen: list[tuple[int, int]] = []
    data = write(tmp_path / "in", parallel.RAY_LEAST_INPUTS)
    prepare.prepare(data, tokenizer, 64, print, lambda done, total: seen.append((done, total)))
    assert ray == [] and seen[-1] == (8, 8)


def test_first_error_is_raised_and_the_rest_is_cached(tokenizer: Path, tmp_path: Path, own_home: Path, ray: list[int]) -> None:
    data = write(tmp_path / "in", 9)
    for name in ("2.jsonl", "5.jsonl"):
        (tmp_path / "in" / name).write_text('{"messages": 1}\n')
    with pytest.raises(UserError, match=r"Line 1 of .*2.jsonl has 'messages' that is a number") as raised:
        prepare.prepare(data, tokenizer, 64)
    assert raised.value.fix and ray == [9]
    assert len(list((own_home / ".strata/rendered").iterdir())) == 7


def test_a_cluster_that_exists_is_joined(
    tokenizer: Path, tmp_path: Path, own_home: Path, ray: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data are prepared before a run's workers connect to the cluster."""
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    joined: list[int] = []

    @contextmanager
    def connected(cpus: int) -> Iterator[bool]:
        joined.append(cpus)
        yield False

    monkeypatch.setattr(parallel.cluster, "connected", connected)
    monkeypatch.setattr(parallel.cluster, "is_given", lambda: True)
    prepare.prepare(write(tmp_path / "in", parallel.RAY_LEAST_INPUTS), tokenizer, 64)
    assert joined == [1] and ray == [8]


def test_ray_is_used_only_if_it_is_connected(monkeypatch: pytest.MonkeyPatch, ray: list[int]) -> None:
    assert parallel._is_connected()
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    assert not parallel._is_connected()
    monkeypatch.delitem(sys.modules, "ray")
    assert not parallel._is_connected()


@pytest.mark.parametrize(("cores", "least", "pool"), [(2, 0, True), (1, 0, False), (2, 10**9, False), (None, 0, False)])
def test_processes_are_for_large_inputs(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None, least: int, pool: bool
) -> None:
    data = write(tmp_path / "in", 3)
    used: list[int] = []

    def with_processes(jobs: Any, progress: Any, processes: int) -> None:
        used.append(processes)
        for job in jobs:
            parallel.render(job)

    monkeypatch.setattr(parallel, "_with_processes", with_processes)
    monkeypatch.setattr(parallel, "POOL_LEAST_BYTES", least)
    monkeypatch.setattr(parallel.os, "cpu_count", lambda: cores)
    prepare.prepare(data, tokenizer, 64)
    assert used == ([2] if pool else [])


def test_killed_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        _processes = None

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def map(self, *_: Any) -> Iterator[None]:
            raise parallel.BrokenProcessPool
            yield

        def shutdown(self, cancel_futures: bool) -> None: ...

    monkeypatch.setattr(parallel, "ProcessPoolExecutor", Pool)
    with pytest.raises(UserError, match="was killed, perhaps for lack of memory"):
        parallel._with_processes([], lambda done, total: None, 2)
