"""Parts of batches: input lines, the journal, locks, slots, expiry, full disks, and the place of batches behind tenants."""

import asyncio
import errno
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_vision import data_url, image, message

from strata.serving.api import images
from strata.serving.api.requests import ApiError, refuse_early
from strata.serving.batches import executor, lines, lock, runner, slots, store
from strata.serving.batches.executor import Executor
from strata.serving.batches.in_process import Answered
from strata.serving.batches.journal import Journal
from strata.serving.batches.meter import Meter
from strata.serving.batches.records import Batch, StoredFile, new_id
from strata.serving.batches.slots import Slots
from strata.serving.batches.store import Space
from strata.serving.gateway.keys import Keys
from strata.serving.routing.kv import prefix_chain
from strata.serving.tenants.estimate import IMAGE_TOKENS, Estimate, estimate
from strata.serving.tenants.gate import Gate
from strata.serving.tenants.tenant import BACKGROUND, Caller, Limits, Tenant

PATH = "/v1/completions"


def line(name: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": PATH, "body": {"prompt": name} | body}).encode() + b"\n"


@pytest.fixture
def space(tmp_path: Path) -> Space:
    found = Space(tmp_path, "_")
    found.create()
    return found


def add(space: Space, content: bytes, expires: int = 2**40) -> Batch:
    file = StoredFile(new_id("file-"), "in", len(content), 0, "batch")
    space.content(file.id).write_bytes(content)
    space.add_file(file)
    batch = Batch(new_id("batch_"), PATH, file.id, "24h", 0, expires)
    space.add_batch(batch)
    return batch


async def upper(path: str, body: bytes, request: str) -> Answered:
    return Answered(200, json.dumps({"text": json.loads(body)["prompt"].upper()}).encode())


class Recorder:
    """Stand-in for the gateway's metrics."""

    def __init__(self) -> None:
        self.counts, self.endings = [(0, 0)], Counter[str]()

    def batch_requests(self, waiting: int, running: int) -> None:
        self.counts.append((waiting, running))

    def batch_request_ended(self, ending: str) -> None:
        self.endings[ending] += 1


def run(
    space: Space, batch: Batch, ask: Any = upper, free: int = 4, wall: Any = lambda: 0.0, recorder: Recorder | None = None
) -> Batch:
    meter = Meter(recorder or Recorder())

    async def within() -> None:
        await asyncio.wait_for(runner.Runner(space, batch, ask, Slots(lambda: free), meter, wall).run(), 30)

    asyncio.run(within())
    found = space.batch(batch.id)
    assert found is not None
    return found


def written(space: Space, name: str | None) -> list[dict[str, Any]]:
    return [json.loads(each) for each in space.content(name).read_bytes().splitlines()] if name else []


def test_lines_are_found_by_position(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(line("a") + b"\r\n" + line("é", n=3) + line("last").rstrip())
    found = lines.check(file, PATH)
    assert not found.errors and [each.custom_id for each in found.lines] == ["a", "é", "last"]
    assert [json.loads(lines.body(file, each))["prompt"] for each in found.lines] == ["a", "é", "last"]
    assert [each.sequences for each in found.lines] == [1, 3, 1]


def test_long_lines_and_too_many_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_BODY_BYTES", 200)
    monkeypatch.setattr(lines, "MAX_LINES", 3)
    file = tmp_path / "in"
    file.write_bytes(line("a") + line("b", prompt="x" * 1000) + line("c") + line("d") + line("e"))
    errors = lines.check(file, PATH).errors
    assert [(each["line"], each["code"]) for each in errors] == [(2, "line_too_large"), (5, "too_many_lines")]
    monkeypatch.setattr(lines, "MAX_ERRORS", 2)
    file.write_bytes(b"{\n" * 10)
    assert len(lines.check(file, PATH).errors) == 2


@pytest.mark.parametrize("torn", [b'{"custom_id": "b"', b'{"custom_id": "b"}', b"\x00" * 100, b'{"custom_id": 3}\n', b"\xff\n"])
def test_torn_lines_are_removed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out"
    whole = b'{"custom_id": "a"}\n'
    path.write_bytes(whole + torn)
    journal = Journal(path)
    assert journal.ids == {"a"} and path.read_bytes() == whole
    journal.append("b", b'{"custom_id": "b"}\n')
    journal.close()
    assert path.read_bytes() == whole + b'{"custom_id": "b"}\n'


def test_failed_write_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    full = Path("/dev/full")
    assert full.exists()
    path = tmp_path / "out"
    journal = Journal(path)
    journal.append("a", b'{"custom_id": "a"}\n')
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30)); "
    code = limit + "from pathlib import Path; from strata.serving.batches.journal import Journal; "
    code += f"Journal(Path({str(path)!r})).append('b', b'x' * 20)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "File too large" in done.stderr and path.read_bytes() == b'{"custom_id": "a"}\n'


def test_lock_excludes_others_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    code = "import sys; from pathlib import Path; from strata.serving.batches import lock; "
    code += f"held = lock.acquire(Path({str(path)!r})); print(held is not None, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        assert lock.acquire(path) is None
        other.kill()
        other.wait()
        held = lock.acquire(path)
        assert held is not None and lock.acquire(path) is None
        held.release()


def test_slots_leave_space_and_large_requests_still_run() -> None:
    assert [slots.idle(64, 0, 0), slots.idle(64, 60, 0), slots.idle(64, 32, 32), slots.idle(1, 0, 0)] == [32, 4, 0, 1]

    async def within() -> None:
        free = 0
        shared = Slots(lambda: free - shared.running)
        large = asyncio.ensure_future(shared.acquire(9))
        await asyncio.sleep(0.01)
        assert not large.done()
        free = 4
        await asyncio.wait_for(large, 5)  # nothing else of a batch runs
        small = asyncio.ensure_future(shared.acquire(1))
        await asyncio.sleep(0.01)
        assert not small.done()
        shared.release(9)
        await asyncio.wait_for(small, 5)

    asyncio.run(within())


def test_taken_over_batch_asks_only_for_what_is_missing(space: Space) -> None:
    batch = add(space, b"".join(line(str(number)) for number in range(5)))
    space.content(batch.output_id).write_bytes(b'{"custom_id": "1"}\n{"custom_id": "3"}\n{"custom')
    space.content(batch.errors_id).write_bytes(b'{"custom_id": "0"}\n')
    asked: list[str] = []

    async def ask(path: str, body: bytes, request: str) -> Answered:
        asked.append(json.loads(body)["prompt"])
        return await upper(path, body, request)

    done = run(space, batch, ask)
    assert sorted(asked) == ["2", "4"] and done.status == "completed"
    answered = [each["custom_id"] for each in written(space, done.output_file_id)]
    assert answered[:2] == ["1", "3"] and sorted(answered[2:]) == ["2", "4"]
    assert done.counts.completed == 4 and done.counts.failed == 1 and not space.pending_ids()


def test_expired_batch_names_what_did_not_run(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.01)
    batch = add(space, line("a") + line("b") + line("c"), expires=100)
    now = 0.0

    async def ask(path: str, body: bytes, request: str) -> Answered:
        nonlocal now
        if json.loads(body)["prompt"] != "a":
            now = 100.0
            await asyncio.sleep(60)
        return await upper(path, body, request)

    done = run(space, batch, ask, wall=lambda: now)
    assert done.status == "expired" and done.answer()["expired_at"] == 100
    assert [each["custom_id"] for each in written(space, done.output_file_id)] == ["a"]
    late = written(space, done.error_file_id)
    assert sorted(each["custom_id"] for each in late) == ["b", "c"]
    assert all(each["error"]["code"] == "batch_expired" and each["response"] is None for each in late)


def test_limits_of_a_tenant_pause_the_batch(space: Space) -> None:
    batch = add(space, b"".join(line(str(number)) for number in range(6)))
    asked: list[str] = []

    async def ask(path: str, body: bytes, request: str) -> Answered:
        asked.append(request)
        if len(asked) <= 3:
            return Answered(429, b"{}", 0.05)
        return await upper(path, body, request)

    done = run(space, batch, ask)
    assert done.counts.completed == 6 and len(asked) == 9

    async def never(path: str, body: bytes, request: str) -> Answered:
        return Answered(429, b'{"error": "larger than the limit"}')

    done = run(space, add(space, line("large")), never)
    assert done.counts.failed == 1


def test_full_disk_delays_the_batch_and_loses_nothing(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "DISK_S", 0.01)
    real, failures = Journal.append, [0]

    def append(self: Journal, name: str, content: bytes) -> None:
        failures[0] += 1
        if failures[0] <= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, name, content)

    monkeypatch.setattr(Journal, "append", append)
    done = run(space, add(space, line("a") + line("b")))
    assert done.counts.completed == 2 and failures[0] == 7
    assert sorted(each["custom_id"] for each in written(space, done.output_file_id)) == ["a", "b"]


def test_requests_are_counted_while_they_wait_run_and_end(space: Space) -> None:
    async def ask(path: str, body: bytes, request: str) -> Answered:
        if json.loads(body)["prompt"] == "wrong":
            return Answered(400, b"{}")
        return await upper(path, body, request)

    recorder = Recorder()
    run(space, add(space, line("a") + line("wrong") + line("c")), ask, recorder=recorder)
    assert recorder.endings == {"completed": 2, "failed": 1} and recorder.counts[-1] == (0, 0)
    assert (3, 0) in recorder.counts and max(running for _, running in recorder.counts) >= 1
    assert all(waiting >= 0 and running >= 0 and waiting + running <= 3 for waiting, running in recorder.counts)
    expired = Recorder()
    run(space, add(space, line("a"), expires=0), _never, wall=lambda: 1.0, recorder=expired)
    assert expired.endings == {"expired": 1} and expired.counts[-1] == (0, 0)


async def _never(path: str, body: bytes, request: str) -> Answered:
    await asyncio.sleep(60)
    raise AssertionError


def test_executor_takes_what_nobody_runs(tmp_path: Path, space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, taken, unborn = add(space, line("a")), add(space, line("b")), space.pending_mark(new_id("batch_"))
    held = lock.acquire(space.lock_file(taken.id))
    unborn.touch()
    monkeypatch.setattr(executor, "UNBORN_S", -1.0)

    async def ask(name: str, path: str, body: bytes, request: str) -> Answered:
        assert name == "_"
        return await upper(path, body, request)

    async def within() -> None:
        works = Executor(tmp_path, ask, Slots(lambda: 4), Meter(Recorder()))
        for _ in range(3):
            await works.look()
        await asyncio.wait_for(asyncio.wait([task for _, task in works._active.values()]), 20)
        await works.stop()

    asyncio.run(within())
    assert [each.status for name in (mine.id, taken.id) if (each := space.batch(name))] == ["completed", "validating"]
    assert space.pending_ids() == [taken.id] and not unborn.exists()
    assert held is not None


def test_abandoned_uploads_are_deleted(tmp_path: Path, space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = space.files / f"{store.PARTIAL}x"
    partial.touch()
    store.remove_abandoned(tmp_path)
    assert partial.exists(), "it may be in progress"
    monkeypatch.setattr(store, "ABANDONED_S", -1.0)
    store.remove_abandoned(tmp_path)
    assert not partial.exists()


def test_batches_wait_behind_tenants_and_cost_their_tenant() -> None:
    gate = Gate(lambda: 2, 10, b"s" * 32)
    tenant = Tenant("acme", Limits(tokens_per_minute=100, concurrency=2))
    usual, background = Caller(tenant, "key"), Caller(tenant, "batch", background=True)

    async def within() -> None:
        with gate.entered(background, Estimate(1, 10, 0)) as first, gate.entered(background, Estimate(1, 10, 0)) as second:
            await first.turn()
            await second.turn()
            assert gate.load()[BACKGROUND.name][0] == 2, "other gateways see the slots in use"
            assert gate.queue.running("acme") == 0

    asyncio.run(within())
    order: list[str] = []

    async def queued() -> None:
        async def enter(caller: Caller, name: str) -> None:
            with gate.entered(caller, Estimate(1, 10, 0)) as entry:
                await entry.turn()
                order.append(name)
                await asyncio.sleep(0.01)

        blocker = Caller(Tenant("other"), "key")
        callers = (blocker, blocker, background, usual)
        names = ("held", "held", "batch", "tenant")
        await asyncio.gather(*(enter(each, name) for each, name in zip(callers, names, strict=True)))

    asyncio.run(queued())
    assert order == ["held", "tenant", "held", "batch"] or order == ["held", "held", "tenant", "batch"]


def test_tenant_without_a_valid_key_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    keys = Keys(file)
    caller = keys.check([(b"authorization", b"Bearer one")])
    assert caller is not None and keys.tenant(caller.tenant.name) == caller.tenant
    file.write_text("another\n")
    assert keys.tenant(caller.tenant.name) is None


def test_images_count_as_tokens_not_as_bytes() -> None:
    url = "data:image/png;base64," + "A" * 400_000
    tree = {"messages": [message("hello", url, url)], "max_tokens": 10}
    found = estimate(tree, len(json.dumps(tree)), None)
    assert 2 * IMAGE_TOKENS < found.input < 2 * IMAGE_TOKENS + 200
    assert estimate({"messages": [{"content": [{"image_url": 3}]}, 4]}, 40, None).input == 10


def test_prefixes_end_at_the_first_image() -> None:
    system = {"role": "system", "content": "x" * 2000}
    after = {"role": "user", "content": "y" * 2000}
    plain = prefix_chain.of("chat", {"messages": [system]}, "m")
    seen = prefix_chain.of("chat", {"messages": [system, message("what?", "data:image/png;base64,AAAA"), after]}, "m")
    assert plain is not None and seen is not None and plain.points and seen.points == plain.points


def test_images_are_checked_before_vllm_sees_them() -> None:
    images.check({"messages": [message("x", data_url(image(1)))]})
    for url in ("https://x/y.png", "data:text/html;base64,AAAA", "data:image/png,AAAA", data_url(image(1))[:200] + "!"):
        with pytest.raises(ApiError):
            images.check({"messages": [message("x", url)]})
    with pytest.raises(ApiError, match="accepts only text: content of type 'image_url'"):
        refuse_early({"messages": [message("x", data_url(image(1)))]})
    with pytest.raises(ApiError, match="has no 'image_url'"):
        refuse_early({"messages": [{"role": "user", "content": [{"image_url": "http://x"}]}]})
