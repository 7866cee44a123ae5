"""Adapters of a vLLM engine: loads them, and gives a request's adapter to vLLM's classes.

vLLM's classes know an adapter by its public name, which answers repeat. The engine knows it by its engine name, so that KV blocks
of different revisions differ; `disaggregation.Engine` gives it that one.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from strata.platform.errors import UserError, shown
from strata.serving.adapters import folder
from strata.serving.adapters.entry import Entry
from strata.serving.adapters.loaded import Loaded
from strata.serving.adapters.recipe import AdapterSpec
from strata.serving.adapters.registry import INSPECT, LOAD
from strata.serving.metrics.telemetry import Replica as Telemetry
from strata.serving.transport.link import Call


class Lora:
    def __init__(self, vllm: Any, models: Any, spec: AdapterSpec, telemetry: Telemetry) -> None:
        """`models` are vLLM's OpenAIServingModels."""
        self._vllm, self._public, self._rule = vllm, models.lora_requests, spec.rule
        self._open: Counter[str] = Counter()  # requests, by public name
        self.loaded = Loaded(self._add, self._remove, spec.slots, spec.in_memory, telemetry)

    @asynccontextmanager
    async def used(self, tree: Mapping[str, Any]) -> AsyncIterator[LoRARequest]:
        """Holds the adapter of a request, as the gateway named it, in the engine."""
        entry = Entry(**tree)
        async with self.loaded.used(entry) as number:
            self._open[entry.name] += 1
            self._public[entry.name] = LoRARequest(entry.name, number, entry.folder)
            try:
                yield LoRARequest(entry.engine_name, number, entry.folder)
            finally:
                self._open[entry.name] -= 1
                if not self._open[entry.name]:
                    del self._open[entry.name], self._public[entry.name]

    async def handle(self, call: Call) -> None:
        """Answers the registry of a gateway."""
        try:
            if call.method == INSPECT:
                call.end(asdict(await asyncio.to_thread(folder.inspect, call.meta["folder"], self._rule)))
            else:
                assert call.method == LOAD
                call.end({"loaded": await self.loaded.load(Entry(**call.meta))})
        except UserError as error:
            call.end({"refused": f"{error.cause} {error.fix}"})
        except Exception as error:
            if self._vllm.errored:
                raise
            call.end({"refused": f"The adapter cannot be loaded: {shown(error, 300)}"})

    async def _add(self, entry: Entry, number: int) -> None:
        # The directory of adapters outlives the weights for which an adapter was added.
        await asyncio.to_thread(folder.check_weights, Path(entry.folder), Path(self._rule.base), entry.rank)
        if not await self._vllm.add_lora(LoRARequest(entry.engine_name, number, entry.folder)):
            raise RuntimeError(f"the engine did not load {entry.engine_name}")

    async def _remove(self, number: int) -> None:
        await self._vllm.remove_lora(number)
