"""A simulated engine: continuous batching over a block cache, by the rules of vLLM's V1 scheduler.

Each step has a budget of tokens. Running sequences come first, one token each; then the prompt that the last step left unfinished
(chunked prefill); then waiting requests in their order, while blocks and budget last. A sequence whose next block is not free
preempts the youngest, which is computed again later. With asynchronous scheduling, a step is scheduled when the step before it
begins, so a request waits for the end of two steps and not of one. Steps that only decode and in which nothing begins or ends are
one event: `_began` and the two terms of their duration say when each of them ends, so an arrival can cut them short.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence as Names
from dataclasses import dataclass
from typing import Protocol

from strata.serving.simulation.block_cache import BlockCache
from strata.serving.simulation.front_end import FrontEnd, Parsing
from strata.serving.simulation.histogram import Histogram
from strata.serving.simulation.requests import Text
from strata.serving.simulation.sequence import Sequence


class Times(Protocol):
    """Step times in seconds, such as the planner's `StepTimes`."""

    def decode_terms(self, sequences: int, /) -> tuple[float, float]: ...

    def step(self, sequences: float, context: float, tokens: float, pairs: float, prompts: float = 0.0, /) -> float: ...

    def least(self, sequences: float, /) -> float:
        """Time that the host needs for a step, beside the accelerator."""
        ...

    def __hash__(self) -> int: ...


class Listener(Protocol):
    def wake_at(self, engine: "Engine", at: float) -> None:
        """Requests a call of `Engine.wake` with the engine's present `version`."""

    def began(self, sequence: Sequence, now: float) -> None:
        """A sequence emitted its first token on this engine."""

    def ended(self, sequence: Sequence, now: float) -> None: ...

    def reads(self, sequence: Sequence, tokens: int) -> None:
        """A remote sequence has its blocks and reads `tokens` tokens from a prefill engine."""


class Announced(Protocol):
    """Receives the events of an engine's block cache."""

    def named(self, names: Names[int], start: int) -> None:
        """Public blocks of a text from the block `start` on are cached."""

    def released(self, text: Text, own: int) -> None:
        """The first `own` blocks of a text after its public ones are cached."""

    def evicted(self, key: int, first: int, stop: int) -> None: ...

    def close(self) -> None:
        """The engine is gone."""


@dataclass(frozen=True)
class EngineSettings:
    blocks: int
    block_size: int
    max_sequences: int
    step_tokens: int  # at least max_sequences
    prefix_caching: bool = True
    async_scheduling: bool = False


class Engine:
    def __init__(
        self, times: Times, settings: EngineSettings, listener: Listener, itl: Histogram, front: FrontEnd | None = None
    ) -> None:
        assert settings.step_tokens >= settings.max_sequences
        self.front = front or FrontEnd(0.0, 0.0)
        self._times, self._settings, self._listener, self._itl = times, settings, listener, itl
        self.cache = BlockCache(settings.blocks, settings.prefix_caching)
        self._waiting: deque[Sequence] = deque()
        self._reading: dict[Sequence, None] = {}  # waiting for their blocks from a prefill engine
        self._arrived: deque[Sequence] = deque()  # with their blocks read
        self._running: dict[Sequence, None] = {}  # in the order of their admission
        self._partial: Sequence | None = None  # the youngest running one, while its prompt is unfinished
        self._chunks: list[tuple[Sequence, int]] = []  # prompt tokens of the current step
        # Sequences that decode. Their state changes only when they join and leave.
        self._decoding = 0
        self._decoding_of: dict[Histogram, int] = {}  # those of each tenant
        self._context = 0  # tokens of their KV entries
        self._ticks = 0  # decode steps so far
        self._ends: list[tuple[int, int, Sequence]] = []  # heap of (tick, order, sequence); left ones stay until popped
        self._phases = [0] * settings.block_size  # sequences that need a block, by tick modulo block size
        self._order = 0
        # The current run of steps.
        self._steps = 0  # 0: idle
        self._asked = False  # idle, and a wake is on its way
        self._began = 0.0
        self._first_s = self._growth_s = 0.0
        self._idle_since = 0.0
        self.version = 0  # of the wake that counts
        self.steps = self.preemptions = self.queried_tokens = self.hit_tokens = 0
        self.busy_s = self.block_seconds = 0.0
        self.peak_blocks = 0
        self.announcements: Announced | None = None

    def announce(self, announcements: Announced) -> None:
        """Sends the events of the block cache from now on."""
        self.announcements = announcements
        self.cache.evicted = announcements.evicted

    def cached_tokens(self, text: Text, tokens: int) -> int:
        """Tokens of a prompt's longest cached prefix. Never all: the last token is computed, for its logits."""
        hits, _, own = self.look_up(text, self.public_names(text, tokens), tokens)
        return (hits + own) * self._settings.block_size

    def public_names(self, text: Text, tokens: int) -> Names[int]:
        """Names of the public blocks that a prompt can find in a cache."""
        return text.names(0, min(self._most(tokens), text.public))

    def look_up(self, text: Text, names: Names[int], tokens: int) -> tuple[int, int, int]:
        """Number of a prompt's public blocks that are cached, of these the free ones, and cached blocks of its own."""
        hits, unused = self.cache.leading(names)
        own = min(self.cache.own(text.number), self._most(tokens) - hits) if hits == text.public else 0
        return hits, unused, own

    def _most(self, tokens: int) -> int:
        return (tokens - 1) // self._settings.block_size if self.cache.reuse else 0

    @property
    def running(self) -> int:
        return len(self._running)

    def accept(self, now: float) -> Parsing:
        """Lets the front end parse a request that arrives now."""
        if self._steps and self.front.token_s:
            self.front.stepped(self._began, self._seconds, self._steps_within(now - self._began), self._streams)
        return self.front.accepts(now, self._streams)

    @property
    def _streams(self) -> int:
        """Sequences that get a token in each step of the current run."""
        return self._decoding + len(self._chunks)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._reading) + len(self._arrived)

    def submit(self, sequence: Sequence, now: float) -> None:
        sequence.submitted_at = sequence.ready_at = now
        self._waiting.append(sequence)
        self._notice(now, behind=len(self._waiting) > 1)

    def transferred(self, sequence: Sequence, now: float) -> None:
        """The blocks of a remote sequence were read. Its last token is computed here, for the logits."""
        del self._reading[sequence]
        self._name(sequence, sequence.tokens // self._settings.block_size)
        sequence.remote = False
        sequence.computed = sequence.tokens - 1
        sequence.ready_at = now
        self._arrived.append(sequence)
        self._notice(now, behind=False)

    def withdraw(self, sequence: Sequence, now: float) -> None:
        """Removes a sequence that waits for a remote prefill's blocks."""
        if sequence in self._reading:
            del self._reading[sequence]
            sequence.computed = 0  # nothing arrived, so its new blocks have no content
            self._rest(now)
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
        self._notice(now, behind=False)

    def release(self, sequence: Sequence, now: float) -> None:
        """Frees the blocks of a prefill that another engine has read."""
        self._rest(now)
        self._release(sequence)
        self._notice(now, behind=False)

    def wake(self, now: float) -> None:
        self._asked = False
        self._rest(now)
        scheduled_at = now
        if self._steps:
            scheduled_at = self._began + self._seconds(self._steps - 1) if self._settings.async_scheduling else now
            self._finish(now)
            if not self._decoding and self._partial is None:
                scheduled_at = now  # there was nothing to schedule earlier
        self._begin(now, scheduled_at)

    def _rest(self, now: float) -> None:
        """Counts the blocks in use while the engine was idle."""
        if not self._steps:
            self.block_seconds += self.cache.used * (now - self._idle_since)
            self._idle_since = now

    def kill(self, now: float) -> None:
        """Ends the engine. Its sequences have the tokens of the steps that had ended."""
        self.version += 1
        ended = self._began
        if self._steps:
            done = self._steps_within(now - self._began)
            if self._decoding:
                self._record(done)
            self._ticks += done
            self._context += done * self._decoding
            self.steps += done
            self.busy_s += now - self._began
            self.block_seconds += self.cache.used * (now - self._began)
            ended = self._began + self._seconds(done)
        for sequence in self._running:
            if sequence.finish >= 0:
                self._leave(sequence)
                sequence.last_token_at = ended

    def _record(self, steps: int) -> None:
        """Records the latencies of the first `steps` steps of the current run."""
        # Clients see the slower of engine and front end.
        first_s, growth_s = self._first_s, self._growth_s
        if (front_s := self.front.token_s * self._decoding) > first_s:
            first_s, growth_s = front_s, 0.0
        self._itl.add_run(first_s, growth_s, steps, self._decoding)
        for itl, decoding in self._decoding_of.items():
            itl.add_run(first_s, growth_s, steps, decoding)

    def _seconds(self, steps: int) -> float:
        """Duration of the first `steps` steps of the current run."""
        return steps * self._first_s + self._growth_s * (steps * (steps - 1) / 2)

    def _steps_within(self, seconds: float) -> int:
        """Largest number of steps of the current run that end within `seconds`."""
        first, growth = self._first_s, self._growth_s
        linear = first - growth / 2
        guess = (math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth if growth > 0 else seconds / first
        steps = max(0, min(self._steps, int(guess)))
        while steps < self._steps and self._seconds(steps + 1) <= seconds:
            steps += 1
        while steps and self._seconds(steps) > seconds:
            steps -= 1
        return steps

    def _notice(self, now: float, behind: bool) -> None:
        """Begins a step for a new sequence, or ends the current run after its present step. Not where the sequence is `behind`
        another that waits or the batch is full: nothing can begin before a sequence ends."""
        if not self._steps:
            if not self._asked and self.waiting:
                self._asked = True
                self._wake(now)
        elif self._steps > 1 and not behind and self.waiting and len(self._running) < self._settings.max_sequences:
            elapsed = now - self._began
            steps = self._steps_within(elapsed)
            steps += (self._seconds(steps) < elapsed or not steps) + self._settings.async_scheduling
            if steps < self._steps:
                self._steps = steps
                self._wake(self._began + self._seconds(steps))

    def _wake(self, at: float) -> None:
        self.version += 1
        self._listener.wake_at(self, at)

    def _begin(self, now: float, scheduled_at: float) -> None:
        cache, running = self.cache, self._running
        preempted, phase, taken = False, self._ticks % self._settings.block_size, 0
        while self._phases[phase] - taken > cache.free:
            # Older sequences take what is free before the youngest gives up its blocks.
            taken += cache.free
            cache.take(cache.free)
            self._preempt(next(reversed(running)), now)
            preempted = True
        cache.take(self._phases[phase] - taken)
        budget = self._settings.step_tokens - self._decoding
        if self._partial is not None and budget:
            chunk = min(self._partial.tokens - self._partial.computed, budget)
            if self._extend(self._partial, self._partial.computed + chunk):
                self._chunks.append((self._partial, chunk))
                budget -= chunk
            else:
                self._preempt(self._partial, now)
                preempted = True
        if not preempted or not (self._decoding or self._chunks):
            self._admit(budget, now, scheduled_at)
        self.peak_blocks = max(self.peak_blocks, cache.used)
        self._began = now
        if self._chunks:
            self._steps, self._growth_s = 1, 0.0
            tokens = sum(chunk for _, chunk in self._chunks)
            pairs = sum(chunk * (sequence.computed + chunk / 2) for sequence, chunk in self._chunks)
            self._first_s = self._times.step(self._decoding, self._context + self._decoding, tokens, pairs, len(self._chunks))
        elif self._decoding:
            constant, per_token = self._times.decode_terms(self._decoding)
            self._first_s = constant + per_token * (self._context + self._decoding)
            self._growth_s = per_token * self._decoding
            if (least_s := self._times.least(self._decoding)) > self._first_s:  # contexts grow little within a run
                self._first_s, self._growth_s = least_s, 0.0
            # The next step may admit again.
            self._steps = 1 if preempted or self._came_after(scheduled_at) else self._run_length()
        else:
            self._steps, self._idle_since = 0, now
            return
        self._wake(now + self._seconds(self._steps))

    def _came_after(self, scheduled_at: float) -> bool:
        return any(each[0].ready_at > scheduled_at for each in (self._arrived, self._waiting) if each)

    def _run_length(self) -> int:
        """Steps until a sequence ends or until there are too few blocks. Those of the first step have been taken."""
        ends, size, decoding, free = self._ends, self._settings.block_size, self._decoding, self.cache.free
        while ends[0][2].finish != ends[0][0]:
            heapq.heappop(ends)
        steps = ends[0][0] - self._ticks
        if ((steps - 1) // size + 1) * decoding <= free:
            return steps
        periods = min((steps - 1) // size, free // decoding)
        free -= periods * decoding
        done = 1 + periods * size
        while done < steps and (need := self._phases[(self._ticks + done) % size]) <= free:
            free -= need
            done += 1
        return done

    def _finish(self, now: float) -> None:
        steps, cache = self._steps, self.cache
        used = cache.used
        if steps > 1:
            cache.take(self._blocks_of(self._ticks + 1, steps - 1))
            self.peak_blocks = max(self.peak_blocks, cache.used)
        self.block_seconds += (used + cache.used) / 2 * (now - self._began)
        self.busy_s += now - self._began
        if self._decoding:
            self._record(steps)
        if self.front.token_s:
            self.front.stepped(self._began, self._seconds, steps, self._streams)
            self.front.run_ended()
        self.steps += steps
        self._ticks += steps
        self._context += steps * self._decoding
        ends = self._ends
        while ends and ends[0][0] <= self._ticks:
            tick, _, sequence = heapq.heappop(ends)
            if sequence.finish == tick:
                self._leave(sequence)
                self._end(sequence, now)
        chunks, self._chunks = self._chunks, []
        for sequence, chunk in chunks:
            sequence.computed += chunk
            if sequence.computed < sequence.tokens:
                self._partial = sequence
                continue
            if sequence is self._partial:
                self._partial = None
            self._emit(sequence, now)

    def _blocks_of(self, tick: int, steps: int) -> int:
        """Blocks that the decoding sequences need in `steps` steps from `tick` on."""
        size = self._settings.block_size
        periods, rest = divmod(steps, size)
        start = tick % size
        later = self._phases[start : start + rest]
        return periods * self._decoding + sum(later) + sum(self._phases[: rest - len(later)])

    def _admit(self, budget: int, now: float, scheduled_at: float) -> None:
        cache, size = self.cache, self._settings.block_size
        while budget and len(self._running) < self._settings.max_sequences:
            if self._arrived and self._arrived[0].ready_at <= scheduled_at:
                sequence = self._arrived.popleft()
            elif self._waiting and self._waiting[0].ready_at <= scheduled_at:
                sequence = self._waiting[0]
                if sequence.cancelled:
                    self._waiting.popleft()
                    self._listener.ended(sequence, now)
                    continue
                blocks = -(-sequence.tokens // size)
                text = sequence.request.text
                names = self.public_names(text, sequence.tokens)
                hits, unused, own = self.look_up(text, names, sequence.tokens)
                if blocks - hits + unused > cache.free:  # the whole prompt must fit
                    return
                self._waiting.popleft()
                cache.hold(names[:hits])
                if own:
                    cache.hold_own(text.number, own)
                sequence.named = list(names[:hits])
                hits += own
                sequence.blocks = sequence.base = hits
                sequence.computed = hits * size
                if sequence.cached < 0:
                    sequence.cached, sequence.admitted_at = sequence.computed, now
                    self.queried_tokens += sequence.tokens
                    self.hit_tokens += sequence.computed
                if sequence.remote:
                    cache.take(blocks - hits)
                    sequence.blocks = blocks
                    self._reading[sequence] = None
                    self._listener.reads(sequence, sequence.tokens - sequence.computed)
                    continue
            else:
                return
            chunk = min(sequence.tokens - sequence.computed, budget)
            fits = self._extend(sequence, sequence.computed + chunk)
            assert fits
            self._running[sequence] = None
            self._chunks.append((sequence, chunk))
            budget -= chunk

    def _extend(self, sequence: Sequence, tokens: int) -> bool:
        """Takes the blocks for the first `tokens` tokens and names the full ones. False where there are too few."""
        size = self._settings.block_size
        need = max(0, -(-tokens // size) - sequence.blocks)
        if need > self.cache.free:
            return False
        self.cache.take(need)
        sequence.blocks += need
        self._name(sequence, tokens // size)
        return True

    def _name(self, sequence: Sequence, full: int) -> None:
        """Names the public ones of the first `full` blocks."""
        text = sequence.request.text
        if full > sequence.base < text.public:
            names = text.names(sequence.base, min(full, text.public))
            sequence.named += self.cache.name(names)
            if self.announcements is not None and self.cache.reuse:
                self.announcements.named(names, sequence.base)
        sequence.base = max(sequence.base, full)

    def _emit(self, sequence: Sequence, now: float) -> None:
        """Ends a prefill: the sequence has its next token, and decodes from the next step on."""
        if sequence.last_token_at:
            self._itl.add(now - sequence.last_token_at)
            if sequence.itl is not None:
                sequence.itl.add(now - sequence.last_token_at)
        sequence.emitted += 1
        sequence.tokens += 1
        sequence.last_token_at = now
        if not sequence.begun:
            sequence.begun = True
            self._listener.began(sequence, now)
        if sequence.emitted == sequence.output:
            self._end(sequence, now)
            return
        self._order += 1
        sequence.joined = self._ticks
        sequence.finish = self._ticks + sequence.output - sequence.emitted
        heapq.heappush(self._ends, (sequence.finish, self._order, sequence))
        self._phases[(sequence.joined - sequence.computed) % self._settings.block_size] += 1
        self._decoding += 1
        if sequence.itl is not None:
            self._decoding_of[sequence.itl] = self._decoding_of.get(sequence.itl, 0) + 1
        self._context += sequence.computed

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the decode steps, with the tokens that it got in them."""
        size = self._settings.block_size
        self._phases[(sequence.joined - sequence.computed) % size] -= 1
        steps = self._ticks - sequence.joined
        sequence.emitted += steps
        sequence.tokens += steps
        sequence.computed += steps
        sequence.blocks = -(-sequence.computed // size)
        sequence.finish = -1
        self._decoding -= 1
        if sequence.itl is not None:
            self._decoding_of[sequence.itl] -= 1
        self._context -= sequence.computed

    def _end(self, sequence: Sequence, now: float) -> None:
        del self._running[sequence]
        if not sequence.held:
            self._release(sequence)
        self._listener.ended(sequence, now)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        del self._running[sequence]
        if sequence is self._partial:
            self._partial = None
        else:
            self._leave(sequence)
            sequence.last_token_at = now
        self._release(sequence)
        self.preemptions += 1
        self._waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        text, full = sequence.request.text, sequence.computed // self._settings.block_size
        own = max(0, full - text.public)
        self.cache.release(sequence.named, text.number, own, sequence.blocks - len(sequence.named) - own)
        if self.announcements is not None and own and self.cache.reuse:
            self.announcements.released(text, own)
        sequence.named, sequence.blocks, sequence.base, sequence.computed = [], 0, 0, 0
