"""Two turns of a conversation on one engine, in its own process: the second with KV blocks in three states.

The same tokens are asked with three cache salts, which share no blocks: the second turn at once, after other prompts have filled
the KV cache, and without a first turn. So all three compute the same, and only the place of the blocks differs.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from strata.platform.recipe import ServeSection
from strata.serving.bench.offload.run import QUESTION, Load
from strata.serving.spec import EngineSpec, Network

WARM_UP = "warm-up"


class Turns:
    def __init__(self, started: Any, load: Load, vocab: int) -> None:
        from vllm import SamplingParams

        self._engine, self._load, self._vocab = started.vllm, load, vocab
        cache = started.vllm.vllm_config.cache_config
        self._cache_tokens = cache.num_gpu_blocks * cache.block_size
        self._params = SamplingParams
        self._asked = 0
        self._tokens = random.Random(0)

    def draw(self, count: int) -> list[int]:
        return [self._tokens.randrange(2, self._vocab) for _ in range(count)]

    async def ask(self, ids: list[int], salt: str, tokens: int) -> tuple[float, list[int], int]:
        """Returns the TTFT, the answer, and the prompt tokens that were not computed."""
        self._asked += 1
        began, first, outputs = time.perf_counter(), 0.0, []
        params = self._params(max_tokens=tokens, temperature=0, ignore_eos=True)
        async for output in self._engine.generate({"prompt_token_ids": ids, "cache_salt": salt}, params, str(self._asked)):
            first = first or time.perf_counter() - began
            outputs.append(output)
        return first, list(outputs[-1].outputs[0].token_ids), outputs[-1].num_cached_tokens or 0

    async def fill_cache(self) -> None:
        """Evicts everything else from the KV cache."""
        written = 0
        while written < self._cache_tokens:
            await self.ask(self.draw(self._load.input), f"other-{self._asked}", 1)
            written += self._load.input

    async def conversation(self, name: str) -> dict[str, tuple[float, list[int], int]]:
        load, begin, question = self._load, self.draw(self._load.input), self.draw(QUESTION)
        found = {}
        answer: list[int] = []
        for state in ("cached", "tier", "computed"):
            salt = f"{name}-{state}"
            if state != "computed":
                _, own, _ = await self.ask(begin, salt, load.output)
                answer = answer or own
            if state == "tier":
                await self.fill_cache()
            found[state] = await self.ask(begin + answer + question, salt, load.output)
        return found


async def measure(section: ServeSection, folder: Path, load: Load, vocab: int) -> dict[str, Any]:
    from strata.serving.engine import engine

    spec = EngineSpec.of("decode", section, folder, "bench", Network.within(one_machine=True))
    started = await engine.start(spec, "bench", "127.0.0.1")
    try:
        turns = Turns(started, load, vocab)
        await turns.conversation(WARM_UP)
        rounds = [await turns.conversation(str(number)) for number in range(load.rounds)]
    finally:
        started.vllm.shutdown()
    states = rounds[0].keys()
    return {
        "ttft_s": {state: [each[state][0] for each in rounds] for state in states},
        "answers": {state: [each[state][1] for each in rounds] for state in states},
        "tier_tokens": [each["tier"][2] for each in rounds],
    }


def main() -> None:
    task = json.loads(sys.argv[1])
    section = ServeSection.model_validate(task["section"])
    found = asyncio.run(measure(section, Path(task["folder"]), Load(**task["load"]), task["vocab"]))
    Path(task["answer"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
