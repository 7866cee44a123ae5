"""Streams and events: work runs after the call, in the order that streams and events give it. Errors arrive at the next wait."""

import os
import threading
import time

import pytest
import torch

from strata.kernels import device

device.load()


def sleep(seconds: float, index: int = 0) -> None:
    torch.ops.strata_device.sleep(index, seconds)


def test_work_runs_after_the_call() -> None:
    x = torch.zeros(8, device="strata")
    torch.strata.synchronize()
    begin = time.perf_counter()
    sleep(0.3)
    x.add_(1)
    assert time.perf_counter() - begin < 0.2 and not torch.strata.current_stream().query()
    assert x.sum().item() == 8 and time.perf_counter() - begin > 0.29
    assert torch.strata.current_stream().query()


def test_streams_run_beside_each_other() -> None:
    streams = [torch.Stream("strata") for _ in range(3)]
    begin = time.perf_counter()
    for stream in streams:
        with torch.strata.stream(stream):
            sleep(0.3)
    torch.strata.synchronize()
    assert 0.29 < time.perf_counter() - begin < 0.8


def test_a_stream_waits_for_an_event_of_another() -> None:
    first, second = torch.Stream("strata"), torch.Stream("strata")
    x, y = torch.zeros(4, device="strata"), torch.zeros(4, device="strata")
    torch.strata.synchronize()
    with torch.strata.stream(first):
        sleep(0.2)
        x.fill_(7)
        event = first.record_event()
        sleep(0.4)
        x.fill_(9)
    with torch.strata.stream(second):
        y.copy_(x)  # before the wait: the value from before
        seen_early = y.clone()
        second.wait_event(event)
        y.copy_(x)
    second.synchronize()
    with torch.strata.stream(second):
        assert seen_early.tolist() == [0] * 4
        assert y.tolist() == [7] * 4, "neither before the event nor after what follows it"
    first.synchronize()
    assert event.query()


def test_a_wait_is_for_the_recording_at_the_time_of_the_call() -> None:
    first, second = torch.Stream("strata"), torch.Stream("strata")
    event = torch.Event("strata")
    event.record(first)
    first.synchronize()
    second.wait_event(event)
    with torch.strata.stream(first):
        sleep(0.4)
    event.record(first)
    begin = time.perf_counter()
    second.synchronize()
    assert time.perf_counter() - begin < 0.3
    assert not event.query()
    event.synchronize()
    assert event.query() and time.perf_counter() - begin > 0.3


def test_an_event_without_a_recording_is_complete() -> None:
    event = torch.Event("strata")
    assert event.query()
    event.synchronize()
    torch.strata.current_stream().wait_event(event)


def test_elapsed_time() -> None:
    begin, end = (torch.Event("strata", enable_timing=True) for _ in range(2))
    begin.record()
    sleep(0.1)
    end.record()
    end.synchronize()
    assert 99 <= begin.elapsed_time(end) < 400
    assert end.elapsed_time(begin) < 0


def test_the_current_stream_is_of_a_thread_and_of_a_device() -> None:
    stream = torch.Stream("strata")
    default = torch.strata.default_stream()
    seen = []
    with torch.strata.stream(stream):
        assert torch.strata.current_stream() == stream
        assert torch.strata.current_stream(1).stream_id == 0
        thread = threading.Thread(target=lambda: seen.append(torch.strata.current_stream()))
        thread.start()
        thread.join()
    assert torch.strata.current_stream() == default == seen[0]


def test_more_streams_than_there_are_threads_share() -> None:
    ids = [torch.Stream("strata").stream_id for _ in range(70)]
    assert 0 not in ids and len(set(ids)) == 31 and max(ids) == 31


def test_backward_runs_on_the_stream_of_the_forward_pass() -> None:
    stream = torch.Stream("strata")
    x = torch.ones(4, device="strata", requires_grad=True)
    stream.wait_stream(torch.strata.current_stream())
    with torch.strata.stream(stream):
        y = (x * 3).sum()
        sleep(0.2)
        y.backward()
    torch.strata.current_stream().wait_stream(stream)
    assert x.grad is not None and x.grad.tolist() == [3] * 4


def test_numbers_of_the_host_are_those_of_the_call() -> None:
    x, factor = torch.ones(3, device="strata"), torch.tensor(2.0)
    sleep(0.1)
    y = x * factor
    factor.fill_(5)
    assert y.tolist() == [2] * 3


def test_an_error_of_a_kernel_is_raised_once_by_the_next_wait() -> None:
    table, wrong = torch.ones(3, 2, device="strata"), torch.tensor([7], device="strata")
    torch.nn.functional.embedding(wrong, table)
    with pytest.raises(IndexError, match=r"index out of range.*STRATA_LAUNCH_BLOCKING"):
        torch.strata.synchronize()
    torch.strata.synchronize()
    assert table.sum().item() == 6, "the device works on"


def test_a_wrong_shape_is_an_error_of_the_call() -> None:
    x, y = torch.ones(3, device="strata"), torch.ones(4, device="strata")
    for call in (lambda: x + y, lambda: x.add_(y), lambda: x @ y, lambda: torch.mm(x, y)):
        with pytest.raises((RuntimeError, ValueError)):
            call()
    torch.strata.synchronize()


def test_an_unknown_stream_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="has no stream 999"):
        torch.Stream(stream_id=999, device_index=0, device_type=20).synchronize()


def in_child(action: object) -> str:
    """Result of `action` in a forked child, or the error that it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = str(action())  # type: ignore[operator]
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writer, result.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def test_a_forked_child_gets_an_error_with_a_fix() -> None:
    x = torch.ones(3, device="strata")
    torch.strata.synchronize()
    for action in (lambda: x + 1, lambda: x.cpu(), lambda: torch.empty(3, device="strata"), torch.strata.synchronize):
        assert "cannot be used in a forked process" in in_child(action) and "spawn" in in_child(action)
    assert in_child(torch.strata._is_in_bad_fork) == "True" and not torch.strata._is_in_bad_fork()
    assert in_child(lambda: torch.manual_seed(1).initial_seed()) == "1", "seeding skips the device"
    assert x.sum().item() == 3


def test_host_work_of_a_forked_child_is_untouched() -> None:
    held = torch.ones(3, device="strata")
    assert in_child(lambda: (torch.ones(3) * 2).sum().item()) == "6.0"
    del held
