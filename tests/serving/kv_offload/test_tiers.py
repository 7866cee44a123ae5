"""Tiers with vLLM's scheduler and connector, without a model: each step checks and writes the content of KV blocks.

The content of a token is a hash of all tokens up to it, so a block that belongs to another prefix is noticed.
"""

import json
import time
import zlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.config import CacheConfig, KVEventsConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from strata.serving.engine.disaggregation import NOT_FROM_DISK
from strata.serving.kv_offload.settings import FOUND_TOKENS, KvOffload
from strata.serving.routing.kv.cached_blocks import Batch, CachedBlocks
from strata.serving.routing.kv.prefix_log import PrefixLog

BLOCK, BLOCKS, LAYERS = 16, 13, 2
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
PAGE = SPEC.page_size_bytes
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "num_hidden_layers": LAYERS, "intermediate_size": 128, "vocab_size": 256}
LLAMA |= {"max_position_embeddings": 512}
GENERATED = 7


def model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "weights.bin").write_bytes(weights)
    return folder


def chain(tokens: list[int], salt: str | None) -> list[int]:
    value, found = zlib.crc32((salt or "").encode()), []
    for token in tokens:
        value = zlib.crc32(array("I", [token]).tobytes(), value)
        found.append(value & 0xFFFFFF)  # exact in float32
    return found


@dataclass
class Engine:
    scheduler: Scheduler
    worker: Any
    caches: list[torch.Tensor]  # [blocks, heads, tokens, content] of each layer
    tables: dict[str, list[int]] = field(default_factory=dict)
    found: dict[str, float] = field(default_factory=dict)  # tokens by tier
    computed: dict[str, int] = field(default_factory=dict)  # tokens by request
    asked: int = 0
    index: CachedBlocks = field(default_factory=lambda: CachedBlocks(BLOCK, PrefixLog()))  # as in a replica

    @staticmethod
    def start(folder: Path, offload: KvOffload) -> "Engine":
        init_none_hash(sha256)
        config = VllmConfig(
            model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=512, max_model_len=512, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=BLOCK),
            kv_transfer_config=KVTransferConfig(**offload.connector([str(folder)], {}, whole_blocks=False)),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        names = [f"layer{number}" for number in range(LAYERS)]
        tensor = KVCacheTensor(LAYERS * BLOCKS * PAGE, names, layer_stride=BLOCKS * PAGE, block_stride=PAGE)
        cache = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, SPEC)])
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        caches = list(torch.zeros(LAYERS, BLOCKS, 2, BLOCK, 2 * 16))
        worker.register_kv_caches(dict(zip(names, caches, strict=True)))
        manager = StructuredOutputManager(config)
        engine = Engine(Scheduler(config, cache, manager, BLOCK, log_stats=True), worker, caches)
        engine.scheduler.kv_event_publisher = SimpleNamespace(publish=engine._apply, shutdown=lambda: None)
        return engine

    def _apply(self, batch: KVEventBatch) -> None:
        self.index.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch).events)

    def ask(
        self, tokens: list[int], answer: int = 1, salt: str | None = None, transfer: dict[str, Any] | None = None
    ) -> list[int]:
        """Runs a request. Returns its tokens. Asserts that every token reads the KV blocks of its own prefix."""
        self.asked += 1
        extra = {"kv_transfer_params": transfer} if transfer is not None else None
        params = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=extra)
        hasher = get_request_block_hasher(BLOCK, sha256)
        name = str(self.asked)
        request = Request(name, tokens, sampling_params=params, pooling_params=None, block_hasher=hasher, cache_salt=salt)
        self.scheduler.add_request(request)
        deadline = time.monotonic() + 30
        while self.scheduler.has_requests():
            assert time.monotonic() < deadline
            self._step({name: request}, salt)
        return list(request.all_token_ids)

    def _step(self, requests: dict[str, Request], salt: str | None) -> None:
        planned = self.scheduler.schedule()
        assert planned.kv_connector_metadata is not None
        self.worker.handle_preemptions(planned.kv_connector_metadata)
        self.worker.bind_connector_metadata(planned.kv_connector_metadata)
        for new in planned.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.computed[new.req_id] = len(new.prompt_token_ids or ()) - new.num_computed_tokens
            self._forward(requests[new.req_id], new.num_computed_tokens, planned.num_scheduled_tokens[new.req_id], salt)
        running = planned.scheduled_cached_reqs
        for name, blocks, done in zip(running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True):
            self.tables[name] += list(blocks[0]) if blocks else []
            self._forward(requests[name], done, planned.num_scheduled_tokens[name], salt)
        self.worker.start_load_kv(None)
        sent, received = self.worker.get_finished(planned.finished_req_ids)
        moved = KVConnectorOutput(sent, received, kv_connector_worker_meta=self.worker.build_connector_worker_meta())
        self.worker.clear_connector_metadata()
        names = list(planned.num_scheduled_tokens)
        numbers = {name: index for index, name in enumerate(names)}
        output = ModelRunnerOutput(names, numbers, [[GENERATED] for _ in names], kv_connector_output=moved)
        reports = self.scheduler.update_from_output(planned, output)
        for report in reports.values():
            stats = report.scheduler_stats.kv_connector_stats if report.scheduler_stats else None
            for (tier,), tokens in (stats or {"data": {}})["data"].get(FOUND_TOKENS, {}).items():
                self.found[tier] = self.found.get(tier, 0) + tokens

    def _forward(self, request: Request, done: int, count: int, salt: str | None) -> None:
        content, table = chain(list(request.all_token_ids), salt), self.tables[request.request_id]
        for position, value in enumerate(content[: done + count]):
            for layer, cache in enumerate(self.caches):
                place = cache[table[position // BLOCK], :, position % BLOCK]
                if position < done:
                    assert (place == value + layer).all(), f"token {position} has the KV of another prefix"
                else:
                    place.fill_(value + layer)

    def settle(self) -> None:
        """Waits for writes to the disk."""
        self.scheduler.connector.connector_scheduler.manager.secondary_tiers[0].drain_jobs()

    def stop(self) -> None:
        self.worker.shutdown()
        self.scheduler.connector.shutdown()


def prompt(seed: int, length: int = 70) -> list[int]:
    return [(number * 7 + seed * 31 + number * seed % 11) % 250 for number in range(length)]


def offload(host_blocks: int, folder: Path | None = None, size: int = 1 << 30) -> KvOffload:
    return KvOffload(host_blocks * LAYERS * PAGE, str(folder) if folder else None, size)


def evict(engine: Engine, first: int, prompts: int = 3) -> None:
    for seed in range(first, first + prompts):
        engine.ask(prompt(seed))


def test_second_turn_is_read_from_host_memory(tmp_path: Path) -> None:
    engine = Engine.start(model(tmp_path / "m"), offload(64))
    try:
        turn = engine.ask(prompt(1), answer=20) + prompt(2, 20)
        evict(engine, 10)
        assert engine.found == {}
        engine.ask(turn)
        blocks = (70 + 20 - 1) // BLOCK  # the KV of the last token was never computed
        assert engine.found == {"cpu": blocks * BLOCK}, "the answer is in the tier, too"
        assert engine.computed[str(engine.asked)] == len(turn) - blocks * BLOCK
        engine.ask(turn)
        assert engine.found == {"cpu": blocks * BLOCK}, "the KV cache has it"
        assert not list(Path("/dev/shm").glob("vllm_offload_*"))
    finally:
        engine.stop()


def test_tokens_in_host_memory_count_as_cached(tmp_path: Path) -> None:
    """For the choice between local and remote prefill, and for routing, until the tier has evicted them, too."""
    engine = Engine.start(model(tmp_path / "m"), offload(20))
    try:
        engine.ask(prompt(1))
        assert engine.index.cached_tokens(prompt(1), (None, None)) == 4 * BLOCK
        evict(engine, 10)
        assert engine.index.cached_tokens(prompt(1), (None, None)) == 4 * BLOCK
        engine.ask(prompt(1))
        assert engine.found == {"cpu": 4 * BLOCK}
        evict(engine, 20, 6)
        assert engine.index.cached_tokens(prompt(1), (None, None)) == 0
        engine.ask(prompt(1))
        assert engine.found == {"cpu": 4 * BLOCK}
    finally:
        engine.stop()


def test_remotely_prefilled_prompt_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    engine = Engine.start(model(tmp_path / "m"), offload(8, tmp_path / "kv"))
    try:
        engine.ask(prompt(1))
        evict(engine, 10, 6)
        engine.settle()
        engine.ask(prompt(1), transfer=dict(NOT_FROM_DISK))
        assert engine.found == {}
    finally:
        engine.stop()


def test_other_salts_share_no_blocks(tmp_path: Path) -> None:
    engine = Engine.start(model(tmp_path / "m"), offload(64))
    try:
        engine.ask(prompt(1), salt="a")
        evict(engine, 10)
        engine.ask(prompt(1), salt="b")
        engine.ask(prompt(1))
        assert engine.found == {}
        evict(engine, 20)
        engine.ask(prompt(1), salt="a")
        assert engine.found == {"cpu": 4 * BLOCK}
    finally:
        engine.stop()


def test_host_memory_is_bounded_and_evicts_by_use(tmp_path: Path) -> None:
    engine = Engine.start(model(tmp_path / "m"), offload(12))
    try:
        engine.ask(prompt(1))
        evict(engine, 10, 2)
        engine.ask(prompt(1))  # used
        evict(engine, 12, 1)
        engine.found.clear()
        evict(engine, 30, 1)
        engine.ask(prompt(10))
        assert engine.found == {}, "the least recently used was evicted"
        assert engine.scheduler.connector.connector_scheduler.manager.primary_tier._num_blocks == 12
    finally:
        engine.stop()


def test_blocks_come_back_from_the_disk(tmp_path: Path) -> None:
    engine = Engine.start(model(tmp_path / "m"), offload(8, tmp_path / "kv"))
    try:
        engine.ask(prompt(1))
        evict(engine, 10, 6)
        engine.settle()
        engine.ask(prompt(1))
        assert engine.found == {"disk": 4 * BLOCK}
        engine.ask(prompt(1))
        evict(engine, 20, 6)
        engine.settle()
        for number, file in enumerate((tmp_path / "kv").rglob("*.bin")):
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2] if number % 2 else bytes([whole[0] ^ 255]) + whole[1:])
        engine.found.clear()
        engine.ask(prompt(1))  # computed again; `ask` checks the content
        assert engine.found.get("disk", 0) == 0
    finally:
        engine.stop()


def test_engines_of_equal_weights_share_the_disk(tmp_path: Path) -> None:
    kv, first = tmp_path / "kv", model(tmp_path / "m")
    writer = Engine.start(first, offload(64, kv))
    try:
        writer.ask(prompt(1))
        writer.settle()
        reader = Engine.start(first, offload(64, kv))
        try:
            reader.ask(prompt(1))
            assert reader.found == {"disk": 4 * BLOCK}
        finally:
            reader.stop()
    finally:
        writer.stop()
    model(first, b"other weights")  # in the same folder
    changed = Engine.start(first, offload(64, kv))
    try:
        changed.ask(prompt(1))
        assert changed.found == {}
    finally:
        changed.stop()


def test_disk_that_cannot_be_written_costs_hits_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = tmp_path / "kv"
    engine = Engine.start(model(tmp_path / "m"), offload(8, kv))
    try:
        kv.rename(tmp_path / "away")
        kv.write_text("")
        evict(engine, 10, 6)
        engine.settle()
        engine.ask(prompt(10))
        assert engine.found.get("disk", 0) == 0
        warnings = [record for record in caplog.records if "cannot be written to the disk tier" in record.message]
        assert len(warnings) == 1, "once a minute"
    finally:
        engine.stop()


def test_host_memory_below_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no block of the KV cache: a block of 16 tokens has"):
        Engine.start(model(tmp_path / "m"), KvOffload(PAGE, None, 0))
