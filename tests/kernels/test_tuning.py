"""Lookup of launch configurations: measured on this machine, shipped, or the kernel's first candidate."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from strata.kernels import catalog
from strata.kernels.bench import tuner
from strata.kernels.tuning import tunable as tuning
from strata.kernels.tuning.tunable import Config, Key, Tunable, TuningCase, config
from strata.platform.errors import UserError

CPU = torch.device("cpu")
SLOW, FAST = config(num_warps=4, BLOCK=64), config(num_warps=8, num_stages=3, BLOCK=128)


@pytest.fixture(autouse=True)
def fresh_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are cached per process; each test uses its own."""
    monkeypatch.setattr(tuning, "shipped_path", lambda arch: tmp_path / "shipped" / f"sm_{arch}.json")
    tuning.shipped.cache_clear()
    tuning.measured.cache_clear()


def tunable(*candidates: Config) -> Tunable:
    return Tunable("toy", lambda arch, key: candidates or (SLOW, FAST))


def test_first_candidate_is_the_default() -> None:
    assert tunable().arguments((4096, True), CPU) == {"BLOCK": 64, "num_warps": 4, "num_stages": 2}


def test_measured_table_overrides_the_shipped_table() -> None:
    tuning.write(tuning.shipped_path(90), {"toy 4096": FAST})
    assert tunable().config((4096,), 90) == FAST
    assert tunable().config((8192,), 90) == SLOW
    tuning.write(tuning.measured_path(90), {"toy 4096": config(num_warps=2, BLOCK=32)})
    assert tunable().config((4096,), 90) == config(num_warps=2, BLOCK=32)
    assert tunable().config((4096,), 80) == SLOW  # tables are per architecture


def test_entry_of_an_older_kernel_is_ignored() -> None:
    tuning.write(tuning.measured_path(90), {"toy 4096": config(num_warps=2, BLOCK_ROWS=32)})
    assert tunable().config((4096,), 90) == SLOW


def test_tables_are_merged_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "sm_90.json"
    tuning.write(path, {"toy 1": SLOW, "toy 2": SLOW})
    tuning.write(path, {"toy 2": FAST})
    assert tuning.read(path) == {"toy 1": SLOW, "toy 2": FAST}
    assert json.loads(path.read_text())["toy 2"] == {"BLOCK": 128, "num_warps": 8, "num_stages": 3}
    assert [one.name for one in tmp_path.iterdir()] == ["sm_90.json"]  # no temporary file is left


def test_lookup_is_cached() -> None:
    lookups: list[Key] = []

    def candidates(arch: int, key: Key) -> Sequence[Config]:
        lookups.append(key)
        return [SLOW]

    one = Tunable("toy", candidates)
    assert one.arguments((1,), CPU) is one.arguments((1,), CPU)
    assert lookups == [(1,)]


@pytest.mark.parametrize(("size", "rounded"), [(0, 1), (1, 1), (2, 2), (3, 4), (127, 128), (128, 128), (129, 256), (4097, 8192)])
def test_sizes_share_a_configuration_up_to_the_next_power_of_two(size: int, rounded: int) -> None:
    assert tuning.bucket(size) == rounded


def test_tuning_orders_candidates_by_time_and_skips_those_that_do_not_fit() -> None:
    from triton.runtime.errors import OutOfResources

    too_big = config(BLOCK=4096)

    def run(candidate: Config) -> None:
        if candidate == too_big:
            raise OutOfResources(300_000, 232_448, "shared memory")

    def milliseconds(once: Callable[[], None]) -> float:
        once()
        return times.pop(0)

    times = [2.0, 1.0]
    case = TuningCase(tunable(too_big, SLOW, FAST), (7, "bf16"), run)
    assert tuning.tune([case], 90, milliseconds) == {"toy 7 bf16": [(FAST, 1.0), (SLOW, 2.0)]}


def test_other_errors_of_a_candidate_are_raised() -> None:
    def run(candidate: Config) -> None:
        raise ValueError("a bug")

    def milliseconds(once: Callable[[], None]) -> float:
        once()
        return 1.0

    with pytest.raises(ValueError, match="a bug"):
        tuning.tune([TuningCase(tunable(), (1,), run)], 90, milliseconds)


def test_shipped_tables_name_kernels_and_constants_that_exist() -> None:
    """An entry that no kernel looks up would silently be unused."""
    known = {one.name: one for one in tunables()}
    for path in (Path(tuning.__file__).parent / "tuned").glob("sm_*.json"):
        for line, shipped in tuning.read(path).items():
            name, *words = line.split()
            candidates = known[name].candidates(int(path.stem.removeprefix("sm_")), tuple(map(key_part, words)))
            assert shipped.constants.keys() == candidates[0].constants.keys(), line


@pytest.mark.parametrize("op", catalog.OPS, ids=lambda op: op.name)
def test_tuning_candidates_have_the_same_constants(op: catalog.Op) -> None:
    cases = [case for offer in catalog.functions_named(op, "tuning_cases") for case in offer(torch.device("meta"))]
    known = {one.name for one in tunables()}
    for arch in (80, 90, 100):
        for case in cases:
            candidates = case.tunable.candidates(arch, case.key)
            assert case.tunable.name in known and candidates
            assert len({tuple(sorted(one.constants)) for one in candidates}) == 1


def tunables() -> list[Tunable]:
    return [one for op in catalog.OPS for module in op.modules() for one in vars(module).values() if isinstance(one, Tunable)]


def key_part(word: str) -> int | str | bool:
    return word == "True" if word in ("True", "False") else int(word) if word.lstrip("-").isdigit() else word


def test_tune_without_a_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="no GPU"):
        tuner.tune([], ship=False)


def test_list_counts_tuned_shapes() -> None:
    from rich.console import Console

    name = tunables()[0].name
    tuning.write(tuning.measured_path(90), {f"{name} 1": SLOW, f"{name} 2": SLOW})
    console = Console(width=250)
    with console.capture() as capture:
        console.print(tuner.listing())
    lines = capture.get().splitlines()
    assert all(any(op.name in line for line in lines) for op in catalog.OPS)
    assert sum("sm_90: 2" in line for line in lines) == 1
