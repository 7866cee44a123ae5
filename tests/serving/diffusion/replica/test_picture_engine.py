"""Engine of a picture replica with stand-in workers: batches, events, cancellation, and lost workers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata.platform import metrics
from strata.platform.errors import UserError
from strata.platform.recipe import PictureServingSection
from strata.serving.api.pictures import Order, order
from strata.serving.api.requests import ApiError
from strata.serving.diffusion.replica import engine as engine_module
from strata.serving.diffusion.replica.engine import Completed, Engine, Event, Job, Partial, Stepped
from strata.serving.diffusion.replica.messages import Unusable
from strata.serving.diffusion.replica.worker_group import GroupLost

from .stand_in_workers import MODEL, Plan, engine, until


def wanted(prompt: str = "x", **body: object) -> Order:
    return order({"prompt": prompt, "seed": 7, "steps": 3} | body, MODEL, PictureServingSection())


class Client:
    """Submits the pictures of an order and records their events."""

    def __init__(self, engine: Engine, made: Order) -> None:
        self.events: list[tuple[int, Event]] = []
        send = lambda index, event: self.events.append((index, event))  # noqa: E731
        self.jobs: list[Job] = [engine.submit(made, index, send) for index in range(made.count)]

    def of(self, index: int = 0) -> list[Event]:
        return [event for place, event in self.events if place == index]

    @property
    def done(self) -> bool:
        ends = [event for _, event in self.events if isinstance(event, Completed | ApiError | GroupLost)]
        return len(ends) == len(self.jobs)


def run(plan: Plan, test: Callable[[Engine], Awaitable[None]], **section: object) -> None:
    async def inside() -> None:
        async with engine(plan, **section) as one:
            await asyncio.wait_for(test(one), 20)

    asyncio.run(inside())


def steps(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, Stepped)]


def test_pictures_have_their_events_in_order() -> None:
    async def test(one: Engine) -> None:
        client = Client(one, wanted(steps=4, stream=True, partial_images=2))
        await until(lambda: client.done)
        kinds = [type(event) for event in client.of()]
        # Of four steps, partial pictures follow the first and the second.
        assert kinds == [Stepped, Partial, Stepped, Partial, Stepped, Stepped, Completed]
        assert [event.number for event in client.of() if isinstance(event, Partial)] == [0, 1]
        assert steps(client.of()) == [1, 2, 3, 4]

    run(Plan(), test)


def test_requests_share_a_batch_and_a_large_one_is_split() -> None:
    async def test(one: Engine) -> None:
        clients = [
            Client(one, wanted("a", n=3, seed=10)),
            Client(one, wanted("b", seed=99)),
            Client(one, wanted("c", n=2, steps=2)),
        ]
        await until(lambda: all(client.done for client in clients))
        shown = [[(each.prompt, each.seed, each.steps) for each in batch.pictures] for batch in plan.batches]
        assert shown == [[("a", 10, 3), ("a", 11, 3)], [("a", 12, 3), ("b", 99, 3)], [("c", 7, 2), ("c", 8, 2)]]
        for client, seeds in zip(clients, ((10, 11, 12), (99,), (7, 8)), strict=True):
            for index, seed in enumerate(seeds):
                last = client.of(index)[-1]
                assert isinstance(last, Completed) and last.picture[0, 0, 0] == seed

    plan = Plan()
    run(plan, test, max_batch=2)


def test_arrivals_wait_for_the_running_batch_and_mixed_sizes_take_turns() -> None:
    async def test(one: Engine) -> None:
        plan.held = asyncio.Event()
        clients = [Client(one, wanted("first"))]
        await until(lambda: bool(plan.batches))
        for number in range(3):
            clients += [Client(one, wanted(f"s{number}")), Client(one, wanted(f"l{number}", size="64x64"))]
        await asyncio.sleep(0.03)
        assert len(plan.batches) == 1
        plan.held.set()
        await until(lambda: all(client.done for client in clients))
        # A 64x64 picture has the area of four: it is alone in its batch.
        assert ["".join(each.prompt for each in batch.pictures) for batch in plan.batches] == [
            "first",
            "s0s1s2",
            "l0",
            "l1",
            "l2",
        ]

    plan = Plan()
    run(plan, test, max_batch=4)


def test_guided_and_unguided_pictures_do_not_share_a_batch() -> None:
    async def test(one: Engine) -> None:
        clients = [Client(one, wanted(guidance=guidance)) for guidance in (4, 1, 1.5, 0)]
        await until(lambda: all(client.done for client in clients))
        assert [[each.guidance for each in batch.pictures] for batch in plan.batches] == [[4, 1.5], [1, 0]]

    plan = Plan()
    run(plan, test)


def test_cancelled_batch_ends_within_a_step() -> None:
    async def test(one: Engine) -> None:
        client = Client(one, wanted(steps=50))
        await until(lambda: plan.steps >= 2)
        one.cancel(client.jobs[0])
        seen = plan.steps
        other = Client(one, wanted("next"))
        await until(lambda: other.done)
        assert plan.cancelled == [1] and plan.steps <= seen + 1 + 3
        assert not any(isinstance(event, Completed) for event in client.of())
        samples = [each for family in text_string_to_metric_families(one._telemetry.text()) for each in family.samples]
        outcomes = {each.labels["outcome"]: each.value for each in samples if each.name == metrics.SERVE_PICTURES.name}
        assert outcomes == {"completed": 1, "cancelled": 1, "failed": 0}

    plan = Plan(step_s=0.005)
    run(plan, test)


def test_batch_goes_on_for_the_pictures_that_are_still_wanted() -> None:
    async def test(one: Engine) -> None:
        plan.held = asyncio.Event()
        first, second = Client(one, wanted("a")), Client(one, wanted("b"))
        await until(lambda: bool(plan.batches))
        one.cancel(first.jobs[0])
        plan.held.set()
        await until(lambda: second.done)
        assert plan.cancelled == [] and first.of() == [] and steps(second.of()) == [1, 2, 3]

    plan = Plan()
    run(plan, test)


def test_waiting_picture_is_cancelled_without_a_batch() -> None:
    async def test(one: Engine) -> None:
        plan.held = asyncio.Event()
        first = Client(one, wanted("a"))
        await until(lambda: bool(plan.batches))
        waiting = Client(one, wanted("b", steps=9))
        one.cancel(waiting.jobs[0])
        plan.held.set()
        await until(lambda: first.done)
        await asyncio.sleep(0.03)
        assert len(plan.batches) == 1 and waiting.of() == []

    plan = Plan()
    run(plan, test)


def test_pictures_of_lost_workers_are_made_by_new_ones_and_repeat_no_event() -> None:
    async def test(one: Engine) -> None:
        clients = [Client(one, wanted("a", steps=4, stream=True, partial_images=3)), Client(one, wanted("b", steps=4))]
        await until(lambda: all(client.done for client in clients))
        assert plan.groups == 2 and len(plan.batches) == 2 and plan.batches[0].pictures == plan.batches[1].pictures
        for client in clients:
            assert steps(client.of()) == [1, 2, 3, 4] and isinstance(client.of()[-1], Completed)
        assert [event.number for event in clients[0].of() if isinstance(event, Partial)] == [0, 1, 2]
        assert "strata_serve_worker_restarts_total{" in one._telemetry.text() and one.healthy

    plan = Plan(losses=[3])
    run(plan, test)


def test_picture_under_which_workers_end_is_refused_and_others_are_made() -> None:
    async def test(one: Engine) -> None:
        clients = [Client(one, wanted("a")), Client(one, wanted("b"))]
        await until(lambda: all(client.done for client in clients))
        refused = clients[0].of()[-1]
        assert isinstance(refused, ApiError) and refused.status == 500
        assert isinstance(clients[1].of()[-1], Completed)
        assert ["".join(each.prompt for each in batch.pictures) for batch in plan.batches] == ["ab", "ab", "a", "b"]

    plan = Plan(losses=[1, 1, 1, 0])
    run(plan, test)


def test_prompt_that_the_model_refuses_fails_alone() -> None:
    async def test(one: Engine) -> None:
        clients = [Client(one, wanted("a")), Client(one, wanted("not a class")), Client(one, wanted("b"))]
        await until(lambda: all(client.done for client in clients))
        refused = clients[1].of()[-1]
        assert isinstance(refused, ApiError) and refused.status == 400 and "no class" in str(refused)
        assert isinstance(clients[0].of()[-1], Completed) and isinstance(clients[2].of()[-1], Completed)
        assert plan.groups == 1

    plan = Plan()
    run(plan, test)


def test_workers_lost_while_idle_are_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LOOK_S", 0.01)

    async def test(one: Engine) -> None:
        one._workers.lose()  # type: ignore[union-attr]
        await until(lambda: plan.groups == 2 and one.healthy)
        client = Client(one, wanted())
        await until(lambda: client.done)
        assert isinstance(client.of()[-1], Completed)

    plan = Plan()
    run(plan, test)


def test_engine_whose_workers_cannot_start_again_gives_its_pictures_up() -> None:
    async def test(one: Engine) -> None:
        plan.losses, plan.failing_starts = [2], engine_module.STARTS
        running, waiting = Client(one, wanted()), Client(one, wanted(steps=5))
        await until(lambda: running.done and waiting.done)
        assert isinstance(running.of()[-1], GroupLost) and isinstance(waiting.of()[-1], GroupLost)
        late = Client(one, wanted())
        assert isinstance(late.of()[-1], GroupLost) and not one.healthy
        with pytest.raises(RuntimeError, match="cannot be started"):
            one.check_health()

    plan = Plan()
    run(plan, test)


def test_start_survives_lost_workers_but_not_a_model_that_does_not_load() -> None:
    async def test(one: Engine) -> None:
        assert plan.groups == 3 and one.model == MODEL

    plan = Plan(failing_starts=2)
    run(plan, test)
    with pytest.raises(UserError, match="does not load"):
        run(Plan(unusable=Unusable("The folder does not load.", "Export it again.")), test)
