"""Stand-in for a replica's workers: makes flat pictures whose colour is the seed, in steps that the test may hold back."""

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from strata.platform.recipe import PictureServingSection
from strata.serving.api.pictures import PictureModel
from strata.serving.diffusion.replica.calls import PictureCalls
from strata.serving.diffusion.replica.engine import Engine
from strata.serving.diffusion.replica.messages import Batch, Done, FromWorker, Ready, Refused, Step, Stopped, Unusable, Wanted
from strata.serving.diffusion.replica.worker_group import GroupLost
from strata.serving.gateway import http, routes
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.metrics.telemetry import Pictures as PicturesTelemetry
from strata.serving.transport.link import SECRET_BYTES, Server
from strata.serving.transport.peers import Peers

MODEL = PictureModel(width=32, height=32, multiple=4, largest=64)
SECRET = b"x" * SECRET_BYTES


def flat(wanted: Wanted, steps_left: int = 0) -> np.ndarray:
    return np.full((wanted.height, wanted.width, 3), (wanted.seed + steps_left) % 256, dtype=np.uint8)


@dataclass
class Plan:
    """Behaviour of the workers of a test, and a record of what they were asked to do."""

    step_s: float = 0.0
    held: asyncio.Event | None = None  # batches wait for it before their first step
    losses: list[int] = field(default_factory=list)  # steps after which the group of each next batch is lost; 0: none
    batches: list[Batch] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    steps: int = 0
    groups: int = 0
    failing_starts: int = 0
    unusable: Unusable | None = None


class StandIn:
    """A group of workers."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._messages: asyncio.Queue[FromWorker | GroupLost] = asyncio.Queue()
        self._cancelled: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost: GroupLost | None = None
        plan.groups += 1
        if plan.failing_starts:
            plan.failing_starts -= 1
            self.lose()
        else:
            self._messages.put_nowait(plan.unusable or Ready(MODEL, guides_twice=True))

    def lose(self) -> None:
        self.lost = GroupLost("worker 0 was killed by signal 9")
        self._messages.put_nowait(self.lost)

    async def next(self) -> FromWorker:
        message = await self._messages.get()
        if isinstance(message, GroupLost):
            raise message
        return message

    def run(self, batch: Batch) -> None:
        task = asyncio.get_running_loop().create_task(self._sample(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, number: int) -> None:
        self._cancelled.add(number)
        self._plan.cancelled.append(number)

    def idle(self) -> None:
        pass

    def kill(self) -> None:
        pass

    async def _sample(self, batch: Batch) -> None:
        plan, first = self._plan, batch.pictures[0]
        plan.batches.append(batch)
        last = plan.losses.pop(0) if plan.losses else 0
        if any(wanted.prompt == "not a class" for wanted in batch.pictures):
            self._messages.put_nowait(Refused("'not a class' is no class of this model."))
            return
        if plan.held is not None:
            await plan.held.wait()
        for step in range(1, first.steps + 1):
            await asyncio.sleep(plan.step_s)
            if last == step:
                self.lose()
                return
            plan.steps += 1
            partials = {place: flat(batch.pictures[place], first.steps - step) for place in batch.partials.get(step, ())}
            self._messages.put_nowait(Step(step, plan.step_s, partials))
            if batch.number in self._cancelled:
                self._messages.put_nowait(Stopped())
                return
        pictures = tuple(flat(wanted) for wanted in batch.pictures)
        self._messages.put_nowait(Done(pictures, tuple(len(wanted.prompt.split()) for wanted in batch.pictures)))


@asynccontextmanager
async def engine(plan: Plan, **section: Any) -> Iterator[Engine]:  # type: ignore[misc]
    async def start() -> StandIn:
        return StandIn(plan)

    chosen = PictureServingSection(**section)
    one = Engine(start, PicturesTelemetry("tiny", "p-1"), chosen.max_batch, chosen.batch_wait_ms / 1000)
    await one.begin()
    try:
        yield one
    finally:
        await one.end()


class Directory:
    """Endpoints of one replica and up to two gateways."""

    def __init__(self, entries: dict[str, dict[str, str]]) -> None:
        self.entries = entries

    async def names(self, role: str) -> set[str]:
        return set(self.entries.get(role, ()))

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return {"address": self.entries[role][name], "node": "here"}

    async def withdraw(self, role: str, name: str) -> None:
        with suppress(KeyError):
            del self.entries[role][name]


@dataclass
class Endpoint:
    url: str
    client: httpx.AsyncClient
    app: App
    replicas: list[Server]

    async def create(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        tree = {"prompt": "a red circle", "seed": 7, "steps": 2} | body
        return await self.client.post("/v1/images/generations", json=tree, headers=headers)


@asynccontextmanager
async def endpoint(*plans: Plan, capacity: int = 100, **section: Any) -> Iterator[Endpoint]:  # type: ignore[misc]
    """A gateway and a replica with stand-in workers for each plan, in this process."""
    chosen = PictureServingSection(**section)
    servers: list[Server] = []
    entries: dict[str, dict[str, str]] = {"pictures": {}}
    engines = [engine(plan, **section) for plan in plans]
    started = [await each.__aenter__() for each in engines]
    for number, one in enumerate(started):
        calls = PictureCalls(one, chosen, lambda: "")
        server = Server(calls.handle, lambda number=number: {"calls": servers[number].calls, "healthy": True}, SECRET)
        servers.append(server)
        entries["pictures"][f"p-{number}"] = await server.listen("127.0.0.1")
    directory: Any = Directory(entries)
    pool, others = Peers(directory, "pictures", SECRET), Peers(directory, "gateway", SECRET)
    telemetry = Telemetry("tiny", "g")
    main = Pool(("tiny",), pool, None, Admission(lambda: capacity), telemetry)
    app = App("g", Pools(main), others, routes=routes.PICTURES)
    listener = http.listen("127.0.0.1", 0)
    url, server = f"http://127.0.0.1:{listener.getsockname()[1]}", http.server(app)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not (server.started and len(pool.all()) == len(plans)):
        await asyncio.sleep(0.005)
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield Endpoint(url, client, app, servers)
    server.should_exit = True
    await serving
    for each in servers:
        each.close()
    for context in engines:
        await context.__aexit__(None, None, None)


async def until(done: Any, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not done():
            await asyncio.sleep(0.005)
