"""Requests that kill engines: refused after two deaths, while concurrent requests are answered.

Gateway, links, replica calls and the quarantine are real; vLLM's engine is a stand-in that dies of chosen token ids.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from strata.serving.api.requests import ApiError
from strata.serving.engine import replica_api, request_context, suspect_requests
from strata.serving.engine.disaggregation import CrashesEngines, Engine
from strata.serving.engine.pool_load import PoolLoad
from strata.serving.engine.prefixes import Prefixes
from strata.serving.engine.replica_api import DecodeCalls, PrefillCalls
from strata.serving.engine.suspect_requests import Quarantine, cause_of_death, killed_for_memory
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.gateway.suspects import REFUSED_S, REMEMBERED, Content, Suspects
from strata.serving.metrics.telemetry import Gateway as GatewayTelemetry
from strata.serving.metrics.telemetry import Replica as Telemetry
from strata.serving.metrics.tracing import Tracer
from strata.serving.routing.policy import Rule
from strata.serving.transport.link import SECRET_BYTES, Link, Server
from strata.serving.transport.peers import Peer, Peers
from strata.serving.vllm_patches.engine_stats import EngineStats

SECRET = os.urandom(SECRET_BYTES)
TOKENS = 12
STEP_S = 0.01
AT_ONCE, LATE, KILLED = 666, 667, 668  # dies before the first token; after five; is killed from outside
POISON = [AT_ONCE, 1, 2]
ANSWER = "".join(f"<{number}>" for number in range(TOKENS))
NEVER = Rule(when="cheaper", min_tokens=10**6, max_queue_s=1.0, stall_weight=0.0)
ALWAYS = Rule(when="always", min_tokens=0, max_queue_s=1.0, stall_weight=0.0)


class Vllm:
    """Engine that counts up from the end of its prompt of three ids."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(model="tiny", get_vocab_size=lambda: 1000, is_multimodal_model=False)
        self.output_processor = SimpleNamespace(add_request=None, request_states={})
        self.process = SimpleNamespace(exitcode=None)
        manager = SimpleNamespace(processes=[self.process])
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
        self._death = asyncio.Event()

    @property
    def errored(self) -> bool:
        return self._death.is_set()

    def die(self, exit_code: int | None = None) -> None:
        self.process.exitcode = exit_code
        self._death.set()

    async def _step(self) -> None:
        await asyncio.sleep(STEP_S)
        if self._death.is_set():
            raise EngineDeadError

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[RequestOutput]:
        ids = prompt["prompt_token_ids"]
        state = self.output_processor.request_states[request_id] = SimpleNamespace(is_prefilling=True)
        try:
            if AT_ONCE in ids:
                self.die()
            if KILLED in ids:
                self.die(-signal.SIGKILL)
            for number in range(len(ids) - 3, TOKENS):
                await self._step()
                if LATE in ids and number >= 5:
                    self.die()
                    await self._step()
                state.is_prefilling = False
                part = CompletionOutput(0, f"<{number}>", [number], None, None, finish_reason=None)
                last = number == TOKENS - 1
                yield RequestOutput(
                    request_id, None, ids, None, [part], finished=last, kv_transfer_params={"remote_engine_id": "p"}
                )
        finally:
            del self.output_processor.request_states[request_id]


class Resumption:
    """Stand-in: resumption is not tested here."""

    def expect(self, request_id: str, prompt: list[int], emitted: tuple[int, ...], params: Any) -> Any:
        return params

    def replay(self, request_id: str, prompt: list[int], emitted: tuple[int, ...], params: Any) -> list[RequestOutput]:
        return [RequestOutput(request_id, None, prompt, None, [], finished=False)]

    def forget(self, request_id: str) -> None:
        pass


def content_of(method: str, tree: dict[str, Any]) -> Content:
    return Content(method, json.dumps(tree).encode())


def engine_of(vllm: Vllm, pool: Any = None, rule: Rule = NEVER) -> Engine:
    telemetry = Telemetry("tiny", "decode", "d")
    load = PoolLoad(EngineStats(telemetry, 1), rule.min_tokens)
    engine = Engine(vllm, pool, rule, Prefixes(), load, telemetry)
    engine._resumption = Resumption()  # type: ignore[assignment]
    return engine


def calls_of(engine: Engine) -> DecodeCalls:
    serving = SimpleServing(engine)
    names = ("openai_serving_completion", "openai_serving_chat", "openai_serving_responses", "anthropic_serving_messages")
    state = SimpleNamespace(**dict.fromkeys(names, serving), serving_tokenization=None)
    return DecodeCalls(state, engine, str, 64, "tiny", Tracer("decode", "d"))


class Decoder:
    """Decode replica with stand-ins for vLLM's OpenAI classes, which stream or answer at the end."""

    def __init__(self, name: str) -> None:
        self.name, self.vllm = name, Vllm()
        self.engine = engine_of(self.vllm)
        self.calls = calls_of(self.engine)
        self.server = Server(self.calls.handle, lambda: {"calls": self.server.calls}, SECRET)

    @property
    def dead(self) -> bool:
        return self.vllm.errored


class SimpleServing:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.create_completion = self._create  # on the instance: its class will be replaced

    async def _create(self, request: Any, _: None) -> Any:
        prompt = {"type": "token", "prompt_token_ids": request.prompt}
        params = request.to_sampling_params(TOKENS)
        outputs = self._engine.generate(prompt, params, f"cmpl-{request.request_id}-0")
        if request.stream:
            return stream_of(outputs)
        text = "".join([output.outputs[0].text async for output in outputs])
        return SimpleNamespace(
            model_dump_json=lambda: json.dumps({"text": text}), usage=SimpleNamespace(completion_tokens=TOKENS)
        )


async def stream_of(outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[str]:
    try:
        async for output in outputs:
            yield f"data: {output.outputs[0].text if output.outputs else ''}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield f"data: {json.dumps({'error': {'message': str(error), 'type': 'x', 'param': None, 'code': 500}})}\n\n"


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_api.os, "_exit", lambda code: None)


class Endpoint:
    """Gateway application, called directly without a network."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}
        decode, others = (Peers(self, role, SECRET, poll_s=0.05) for role in ("decode", "gateway"))  # type: ignore[arg-type]
        main = Pool(("tiny",), decode, None, Admission(lambda: 100), GatewayTelemetry("tiny", "g-1"))
        self.app = App("g-1", Pools(main), others)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://gateway", timeout=30)  # type: ignore[arg-type]

    async def add(self, replica: Decoder) -> None:
        self._addresses[replica.name] = await replica.server.listen("127.0.0.1")

    async def names(self, role: str) -> set[str]:
        return set(self._addresses) if role == "decode" else set()

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return {"address": self._addresses[name]} if name in self._addresses else None

    async def withdraw(self, role: str, name: str) -> None:
        self._addresses.pop(name, None)


def run(test: Callable[[Endpoint], Awaitable[None]]) -> None:
    async def inside() -> None:
        await asyncio.wait_for(test(Endpoint()), 30)

    asyncio.run(inside())


async def replicas(endpoint: Endpoint, count: int) -> list[Decoder]:
    made = [Decoder(f"d-{number}") for number in range(count)]
    for replica in made:
        await endpoint.add(replica)
    await asyncio.sleep(0.2)
    return made


async def ask(endpoint: Endpoint, prompt: list[int], stream: bool = False, **more: Any) -> tuple[int, Any]:
    """Status, and the text of the answer or the error."""
    body = {"prompt": prompt, "stream": stream, "temperature": 0} | more
    response = await endpoint.client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return response.status_code, response.json()["error"]
    if not stream:
        return 200, response.json()["text"]
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    if events[-1].startswith("{"):
        error = json.loads(events[-1])["error"]
        return error["code"], error
    assert events[-1] == "[DONE]"
    return 200, "".join(events[:-1])


def dead(replicas: list[Decoder]) -> int:
    return sum(replica.dead for replica in replicas)


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_kills_engines_is_refused_after_two_deaths(stream: bool) -> None:
    async def test(endpoint: Endpoint) -> None:
        pool = await replicas(endpoint, 4)
        status, error = await ask(endpoint, POISON, stream)
        assert status == 400 and error["type"] == "invalid_request_error"
        assert "is refused for" in error["message"] and "Send" not in error["message"]
        assert dead(pool) == 2
        # The same content from any client, streamed or not, reaches no engine.
        for more in ({"user": "another"}, {"stream": not stream}, {"seed": 5}, {"metadata": {"a": "b"}}):
            assert (await ask(endpoint, POISON, **more))[0] == 400
        assert dead(pool) == 2
        assert await ask(endpoint, [1, 2, 3]) == (200, ANSWER)

    run(test)


@pytest.mark.parametrize("poison", [AT_ONCE, LATE])
def test_concurrent_requests_survive_a_request_that_kills_engines(poison: int) -> None:
    async def test(endpoint: Endpoint) -> None:
        pool = await replicas(endpoint, 6)
        innocent = [asyncio.ensure_future(ask(endpoint, [number, 1, 2], stream=bool(number % 3))) for number in range(1, 19)]
        await asyncio.sleep(4 * STEP_S)
        guilty = asyncio.ensure_future(ask(endpoint, [poison, 1, 2]))
        assert [await each for each in innocent] == [(200, ANSWER)] * len(innocent)
        assert (await guilty)[0] == 400
        assert dead(pool) <= 3

    run(test)


def test_concurrent_requests_survive_several_requests_that_kill_engines() -> None:
    async def test(endpoint: Endpoint) -> None:
        pool = await replicas(endpoint, 12)
        guilty = [asyncio.ensure_future(ask(endpoint, [AT_ONCE, number, 2])) for number in range(4)]
        innocent = [asyncio.ensure_future(ask(endpoint, [number, 1, 2], stream=bool(number % 2))) for number in range(1, 13)]
        assert [await each for each in innocent] == [(200, ANSWER)] * len(innocent)
        assert [(await each)[0] for each in guilty] == [400] * len(guilty)
        assert dead(pool) <= 8

    run(test)


def test_identical_requests_are_one_suspect() -> None:
    async def test(endpoint: Endpoint) -> None:
        pool = await replicas(endpoint, 8)
        found = await asyncio.gather(*(ask(endpoint, POISON, user=f"u{number}") for number in range(6)))
        assert [status for status, _ in found] == [400] * 6
        assert dead(pool) <= 7, "six at once, and one more on probation"
        copies = await asyncio.gather(*(ask(endpoint, POISON) for _ in range(6)))
        assert [status for status, _ in copies] == [400] * 6 and dead(pool) <= 7

    run(test)


@pytest.mark.slow
def test_reconnecting_client_is_refused_after_two_deaths() -> None:
    async def test(endpoint: Endpoint) -> None:
        pool = await replicas(endpoint, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(endpoint, POISON), 0.5)
        more = await replicas(endpoint, 3)
        assert (await ask(endpoint, POISON))[0] == 400
        assert dead(pool) == 1 and dead(more) == 1

    run(test)


async def working(pool: list[Decoder], asked: "asyncio.Future[Any]") -> Decoder | None:
    """Replica that works on the request; waits while the request moves between replicas. None once it is answered."""
    while not asked.done():
        for replica in pool:
            if replica.server.calls and not replica.dead:
                return replica
        await asyncio.sleep(STEP_S / 4)
    return None


def test_externally_killed_engine_marks_no_suspect() -> None:
    async def test(endpoint: Endpoint) -> None:
        pool = await replicas(endpoint, 7)
        for number in range(2):  # twice the same content, three victims each
            asked = asyncio.ensure_future(ask(endpoint, [1, 2, 3], stream=True))
            for _ in range(3):
                await asyncio.sleep(4 * STEP_S)
                if busy := await working(pool, asked):
                    busy.vllm.die(-signal.SIGKILL)
            assert await asked == (200, ANSWER), number
        assert dead(pool) >= 2

    run(test)


def test_request_fails_after_four_externally_killed_engines() -> None:
    async def test(endpoint: Endpoint) -> None:
        pool = await replicas(endpoint, 6)
        status, _ = await ask(endpoint, [KILLED, 1, 2])
        assert status == 503 and dead(pool) == 4

    run(test)


def prefilled(prefillers: list[Vllm], decoder: Vllm, prompt: list[int]) -> str | CrashesEngines | EngineDeadError:
    """Answer or error of a decode engine with a pool of prefill replicas."""

    async def inside() -> str | CrashesEngines | EngineDeadError:
        servers = [Server(PrefillCalls(vllm, calls_of(engine_of(vllm)), {}).handle, dict, SECRET) for vllm in prefillers]
        links = [await Link.connect(await server.listen("127.0.0.1"), SECRET, lambda _: None) for server in servers]
        peers = [Peer(f"p-{number}", link, {}) for number, link in enumerate(links)]

        def alive() -> list[Peer]:
            return [peer for peer in peers if peer.link.alive]

        def least_busy(without: frozenset[str], cost: Callable[[Peer], float]) -> Peer | None:
            return next((peer for peer in alive() if peer.name not in without), None)

        pool: Any = SimpleNamespace(all=alive, least_busy=least_busy)
        engine = engine_of(decoder, pool, ALWAYS)
        request_context.current.set(request_context.RequestContext())
        params = SimpleNamespace(n=1, prompt_logprobs=None, extra_args=None)
        params.clone = lambda: params
        asked = {"type": "token", "prompt_token_ids": prompt}
        try:
            return "".join([output.outputs[0].text async for output in engine.generate(asked, params, "r")])
        except (CrashesEngines, EngineDeadError) as error:
            verdict = engine.quarantine.verdict(request_context.current.get().request)
            assert isinstance(error, CrashesEngines) or (verdict and verdict["guilty"])
            return error
        finally:
            for link in links:
                link.close()

    return asyncio.run(inside())


def test_deaths_of_prefill_engines_count() -> None:
    pool, decoder = [Vllm(), Vllm(), Vllm()], Vllm()
    assert isinstance(prefilled(pool, decoder, POISON), CrashesEngines)
    assert [vllm.errored for vllm in (*pool, decoder)] == [True, True, False, False]


def test_deaths_of_a_prefill_and_a_decode_engine_add_up() -> None:
    pool, decoder = [Vllm()], Vllm()
    assert isinstance(prefilled(pool, decoder, POISON), EngineDeadError)
    assert pool[0].errored and decoder.errored


def test_externally_killed_prefill_engine_marks_no_suspect() -> None:
    pool, decoder = [Vllm(), Vllm()], Vllm()
    for vllm in pool:
        vllm.die(-signal.SIGKILL)
    assert prefilled(pool, decoder, [1, 2, 3]) == ANSWER


def in_quarantine(test: Callable[[Quarantine, set[str]], Awaitable[None]]) -> None:
    async def inside() -> None:
        waiting: set[str] = set()
        await asyncio.wait_for(test(Quarantine(lambda: bool(waiting)), waiting), 10)

    asyncio.run(inside())


def test_suspect_does_not_start_beside_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspect_requests, "KNOWN_S", 0.05)

    async def test(quarantine: Quarantine, waiting: set[str]) -> None:
        waiting.add("fresh")
        await quarantine.enter("fresh", 0)
        suspect = asyncio.ensure_future(quarantine.enter("suspect", 1))
        await asyncio.sleep(0.1)
        assert not suspect.done() and quarantine.verdict("suspect") is None, "it is not on the engine"
        late = asyncio.ensure_future(quarantine.enter("late", 0))
        waiting.clear()
        await suspect
        waiting.add("suspect")
        await asyncio.sleep(0.1)
        assert not late.done()
        assert quarantine.verdict("suspect") == {"strikes": 2, "guilty": True}
        assert quarantine.verdict("fresh") == {"strikes": 1, "guilty": False}
        waiting.clear()
        await late
        assert quarantine.verdict("suspect") == {"strikes": 2, "guilty": False}, (
            "it has its first token, and another came after it"
        )
        quarantine.leave("late")
        assert quarantine.verdict("suspect") == {"strikes": 2, "guilty": True}

    in_quarantine(test)


def test_suspect_of_two_deaths_runs_alone() -> None:
    async def test(quarantine: Quarantine, waiting: set[str]) -> None:
        await quarantine.enter("fresh", 0)
        suspect = asyncio.ensure_future(quarantine.enter("suspect", 2))
        await asyncio.sleep(0.1)
        assert not suspect.done()
        quarantine.leave("fresh")
        await suspect
        late = asyncio.ensure_future(quarantine.enter("late", 0))
        await asyncio.sleep(0.1)
        assert not late.done() and quarantine.verdict("suspect") == {"strikes": 3, "guilty": True}
        quarantine.leave("suspect")
        await late

    in_quarantine(test)


def test_quarantine_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("PROBATION_S", "SETTLING_S", "ALONE_S"):
        monkeypatch.setattr(suspect_requests, limit, 0.2)

    async def test(quarantine: Quarantine, waiting: set[str]) -> None:
        waiting.add("stuck")
        await quarantine.enter("stuck", 0)
        await quarantine.enter("suspect", 1)
        assert quarantine.verdict("suspect") == {"strikes": 2, "guilty": False}, "the other may have killed it as well"
        await quarantine.enter("late", 0)
        gone = asyncio.ensure_future(quarantine.enter("gone", 2))
        await asyncio.sleep(0.05)
        gone.cancel()
        await quarantine.enter("next", 0)
        assert quarantine.verdict("gone") is None

    in_quarantine(test)


def test_sequences_of_one_suspect_enter_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspect_requests, "KNOWN_S", 0.05)

    async def test(quarantine: Quarantine, waiting: set[str]) -> None:
        await asyncio.gather(*(quarantine.enter("suspect", 1) for _ in range(3)))
        for _ in range(2):
            quarantine.leave("suspect")
        assert quarantine.verdict("suspect") is not None
        quarantine.leave("suspect")
        assert quarantine.verdict("suspect") is None

    in_quarantine(test)


@pytest.mark.parametrize(
    ("codes", "words", "failed"),
    [
        ([None], "it raised an exception", True),
        ([1], "exit code 1", True),
        ([-signal.SIGSEGV], "killed by SIGSEGV", True),
        ([-signal.SIGABRT], "killed by SIGABRT", True),
        ([-signal.SIGKILL], "killed by SIGKILL", False),
        ([-signal.SIGTERM], "killed by SIGTERM", False),
        ([0], "exit code 0", False),
        ([None, -signal.SIGKILL], "killed by SIGKILL", False),
    ],
)
def test_causes_of_death(codes: list[int | None], words: str, failed: bool) -> None:
    assert cause_of_death(codes, out_of_memory=False) == (words, failed)


def test_out_of_memory_kill_counts_as_a_failure() -> None:
    assert killed_for_memory() >= 0
    assert cause_of_death([-signal.SIGKILL], out_of_memory=True) == ("out of memory", True)
    assert cause_of_death([-signal.SIGTERM], out_of_memory=True) == ("killed by SIGTERM", False)


GUILTY = {"strikes": 2, "guilty": True}


def test_refusals_expire_and_are_bounded() -> None:
    now, sent = 0.0, []
    suspects = Suspects(lambda *heard: sent.append(heard), clock=lambda: now)
    content = content_of("chat", {"messages": [], "n": 1})
    assert suspects.judge(content, GUILTY) and sent == [(content.digest, GUILTY)]
    with pytest.raises(ApiError):
        suspects.strikes(content_of("chat", {"n": 1, "user": "x", "messages": [], "seed": None}))
    assert suspects.strikes(content_of("completions", {"messages": [], "n": 1})) == 0
    now = REFUSED_S + 1
    assert suspects.strikes(content) == 0
    for number in range(2 * REMEMBERED):
        suspects.record(str(number), GUILTY)
        suspects.judge(content_of("chat", {"n": number}), {"strikes": 1, "guilty": False})
    assert len(suspects._refused) == len(suspects._strikes) == REMEMBERED


def test_answered_request_is_no_longer_a_suspect() -> None:
    suspects = Suspects(lambda *heard: None)
    content = content_of("chat", {"n": 1})
    suspects.judge(content, {"strikes": 1, "guilty": False})
    assert suspects.strikes(content) == 1
    suspects.clear(content)
    assert suspects.strikes(content) == 0


def test_internal_gateway_error_has_the_openai_format(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(endpoint: Endpoint) -> None:
        monkeypatch.setattr(endpoint.app._pools, "card", lambda name: 1 / 0)
        response = await endpoint.client.get("/v1/models")
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        assert response.headers["x-request-id"]

    run(test)


def test_gateways_share_verdicts() -> None:
    async def test(endpoint: Endpoint) -> None:
        heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def handle(call: Any) -> None:
            heard.put_nowait({call.method: call.meta})

        other = Server(handle, dict, SECRET)
        link = await Link.connect(await other.listen("127.0.0.1"), SECRET, lambda _: None)
        endpoint.app._gateways._peers["g-2"] = Peer("g-2", link, {})
        content = content_of("completions", {"prompt": [5]})
        endpoint.app.suspects.judge(content, GUILTY)
        assert await asyncio.wait_for(heard.get(), 5) == {"verdict": {"digest": content.digest, "verdict": GUILTY}}

    run(test)
