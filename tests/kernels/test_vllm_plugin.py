"""vLLM plugin inside vLLM's own classes, on a CPU: registration, unsupported configurations, and results of its layers."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels import vllm_plugin
from strata.kernels.ops.fp8_cache import FP8

pytest.importorskip("vllm")

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 4, 2, 64, 16


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes vLLM assume a CUDA platform, and removes the plugin's registrations afterwards."""
    from vllm import ir
    from vllm.model_executor import custom_op
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # Modules of vLLM that they import look at the platform: before it changes.
    from strata.kernels.vllm_plugin import attention, layers, linear  # noqa: F401

    current_platform.import_kernels()
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(custom_op, "op_registry_oot", dict(custom_op.op_registry_oot))
    monkeypatch.setattr(layers, "op_registry_oot", custom_op.op_registry_oot)
    yield
    AttentionBackendEnum.CUSTOM.clear_override()
    for operator in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        operator.impls.pop(vllm_plugin.PROVIDER, None)


@pytest.fixture
def vllm_config() -> Iterator[Any]:
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    with set_current_vllm_config(config):
        yield config


def switch_on(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    monkeypatch.setenv(vllm_plugin.SWITCH, ",".join(parts))


def test_nothing_is_imported_unless_enabled() -> None:
    probe = (
        "import sys\nfrom strata.kernels import vllm_plugin\nvllm_plugin.register()\n"
        "assert not {'vllm', 'torch', 'triton'} & set(sys.modules), 'heavy'"
    )
    environment = {name: value for name, value in os.environ.items() if name != vllm_plugin.SWITCH}
    subprocess.run([sys.executable, "-c", probe], env=environment, check=True)


def test_unknown_part_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    switch_on(monkeypatch, "attention", "warp_drive")
    with pytest.raises(ValueError, match=r"unknown parts warp_drive; use attention,"):
        vllm_plugin.register()


def test_plugin_warns_and_is_disabled_on_a_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    switch_on(monkeypatch, *vllm_plugin.PARTS)
    vllm_plugin.register()
    assert not AttentionBackendEnum.CUSTOM.is_overridden()
    assert "Strata's kernels are disabled" in caplog.text and "serve.kernels: vllm" in caplog.text


def test_all_parts_are_registered(on_cuda: None, vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import ir
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from strata.kernels.vllm_plugin.attention import StrataAttentionBackend
    from strata.kernels.vllm_plugin.layers import StrataSiluAndMul

    switch_on(monkeypatch, *vllm_plugin.PARTS)
    for _ in range(2):  # vLLM may load a plugin twice
        vllm_plugin.register()
    assert AttentionBackendEnum[StrataAttentionBackend.get_name()].get_class() is StrataAttentionBackend
    assert vllm_plugin.PROVIDER in ir.ops.rms_norm.impls and vllm_plugin.PROVIDER in ir.ops.fused_add_rms_norm.impls
    layer = SiluAndMul()
    assert type(layer) is StrataSiluAndMul and layer.name == "silu_and_mul"


def test_vllm_accepts_the_engine_arguments(on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    switch_on(monkeypatch, *vllm_plugin.PARTS)
    monkeypatch.setattr("vllm.plugins.plugins_loaded", True)
    vllm_plugin.register()
    arguments = EngineArgs(model="none", **vllm_plugin.engine_arguments(vllm_plugin.PARTS))
    assert arguments.ir_op_priority.rms_norm == [vllm_plugin.PROVIDER]
    assert arguments.ir_op_priority.compute_hash()  # looks up every implementation
    assert arguments.compilation_config.custom_ops == ["+silu_and_mul"]
    assert arguments.compilation_config.cudagraph_mode is CUDAGraphMode.FULL
    assert type(arguments.attention_config).validate_backend_before(arguments.attention_backend) is AttentionBackendEnum.CUSTOM


def test_unsupported_configurations_are_rejected_at_start() -> None:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from strata.kernels.vllm_plugin.attention import StrataAttentionBackend

    def reasons(capability: tuple[int, int] = (9, 0), **other: Any) -> str:
        good = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
        config = AttentionSelectorConfig(**(good | other))._asdict()  # as vLLM calls it
        return "; ".join(StrataAttentionBackend.validate_configuration(device_capability=DeviceCapability(*capability), **config))

    assert not reasons() and not reasons(has_sliding_window=True) and not reasons(use_kv_connector=True)
    assert not reasons(block_size=256), "vLLM divides larger blocks"
    assert not reasons(head_size=80)
    assert "head_size=512: Strata's kernels support multiples of 8 up to 256; set serve.kernels: vllm" in reasons(head_size=512)
    assert reasons(use_mla=True) == "MLA not supported; set serve.kernels: vllm for this model"
    assert not reasons(kv_cache_dtype="fp8") and not reasons(kv_cache_dtype="fp8_e4m3")
    assert "kv_cache_dtype=fp8: needs compute capability 8.9" in reasons((8, 0), kv_cache_dtype="fp8")
    assert "kv_cache_dtype=fp8_e5m2: Strata's kernels need a cache in the model's dtype" in reasons(kv_cache_dtype="fp8_e5m2")
    assert "kv_cache_dtype=float16" in reasons(kv_cache_dtype="float16")
    assert "dtype not supported" in reasons(dtype=torch.float32)
    assert "sinks not supported" in reasons(has_sink=True)
    assert "encoder_only not supported" in reasons(attn_type="encoder_only")
    assert "compute capability not supported" in reasons(capability=(7, 5))


@pytest.mark.parametrize(("argument", "message"), [({"alibi_slopes": [0.5]}, "ALiBi"), ({"logits_soft_cap": 30.0}, "soft cap")])
def test_unsupported_layers_are_rejected(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{message}.*serve.kernels: vllm"):
        implementation(**argument)


def implementation(**further: Any) -> Any:
    from strata.kernels.vllm_plugin.attention import StrataAttentionImpl

    return StrataAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, **further)


class Batch:
    """Requests of (cached tokens, new tokens), their cache in vLLM's layout, and the expected attention in plain torch."""

    def __init__(self, requests: list[tuple[int, int]], layout: str, padding: int = 0) -> None:
        torch.manual_seed(0)
        self.requests = requests
        blocks = [-(-(old + new) // BLOCK) for old, new in requests]
        order = torch.randperm(sum(blocks)) + 1  # block 0 is unused
        self.table = torch.zeros(len(requests), max(blocks) + 2, dtype=torch.int32)
        for row, mine in zip(self.table, order.split(blocks), strict=True):
            row[: len(mine)] = mine
        shape = (sum(blocks) + 1, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
        self.cache = torch.full(shape, torch.nan, dtype=torch.float16)  # [blocks, kv_heads, block_size, 2 * head_size]
        if layout == "NHD":
            self.cache = self.cache.transpose(1, 2).contiguous().transpose(1, 2)
        self.keys = [torch.randn(old + new, KV_HEADS, HEAD_SIZE).half() for old, new in requests]
        self.values = [torch.randn(old + new, KV_HEADS, HEAD_SIZE).half() for old, new in requests]
        self.query = torch.randn(sum(new for _, new in requests) + padding, HEADS, HEAD_SIZE).half()
        self.slots = torch.cat(
            [self.slots_of(row, torch.arange(old, old + new)) for row, (old, new) in enumerate(requests)]
            + [torch.full((padding,), -1)]
        )
        for row, (old, _) in enumerate(requests):
            self.store(row, self.keys[row][:old], self.values[row][:old])

    def slots_of(self, row: int, position: Tensor) -> Tensor:
        return self.table[row][position // BLOCK].long() * BLOCK + position % BLOCK

    def store(self, row: int, keys: Tensor, values: Tensor) -> None:
        slots = self.slots_of(row, torch.arange(len(keys)))
        self.cache[slots // BLOCK, :, slots % BLOCK] = torch.cat([keys, values], -1)

    def new(self, states: list[Tensor]) -> Tensor:
        fresh = torch.cat([of[old:] for of, (old, _) in zip(states, self.requests, strict=True)])
        return torch.cat([fresh, fresh.new_zeros(len(self.query) - len(fresh), *fresh.shape[1:])])

    def metadata(self, long_prompt: int | None) -> Any:
        from strata.kernels.vllm_plugin.metadata import metadata_of

        return metadata_of(self.common(), long_prompt)

    def common(self) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *torch.tensor([new for _, new in self.requests]).cumsum(0)], dtype=torch.int32)
        lengths = torch.tensor([old + new for old, new in self.requests], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(self.requests),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(new for _, new in self.requests),
            max_seq_len=int(lengths.max()),
            block_table_tensor=self.table,
            slot_mapping=self.slots,
        )

    def expected(self, window: int | None) -> Tensor:
        outputs = []
        group = HEADS // KV_HEADS
        for query, (old, new), keys, values in zip(
            self.query[: sum(new for _, new in self.requests)].split([new for _, new in self.requests]),
            self.requests,
            self.keys,
            self.values,
            strict=True,
        ):
            keys, values = (states.double().repeat_interleave(group, 1) for states in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * HEAD_SIZE**-0.5
            back = torch.arange(old, old + new)[:, None] - torch.arange(old + new)
            seen = (back >= 0) & (back < (window or old + new))
            outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
        return torch.cat(outputs)


DECODES = [(5, 1), (16, 1), (100, 1)]
BATCHES = {
    "decodes": DECODES,
    "prompts": [(0, 17), (0, 300)],
    "a later chunk": [(33, 40)],
    "mixed": [*DECODES, (31, 20), (0, 2), (0, 300)],
    "a chunk after a prompt": [(3, 1), (0, 30), (64, 300)],
}


@pytest.mark.parametrize(("layout", "window"), [("NHD", None), ("HND", 20)])
@pytest.mark.parametrize("long_prompt", [None, 2, 100])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_equals_plain_torch(batch: str, layout: str, long_prompt: int | None, window: int | None) -> None:
    made = Batch(BATCHES[batch], layout, padding=3)
    layer = implementation(sliding_window=window)
    key, value = made.new(made.keys), made.new(made.values)
    layer.do_kv_cache_update(None, key, value, made.cache, made.slots)
    output = torch.full_like(made.query, 7.0)
    layer.forward(None, made.query, key, value, made.cache, made.metadata(long_prompt), output)
    expected = made.expected(window)
    assert torch.norm(output[:-3].double() - expected) / torch.norm(expected) < 2e-3
    assert (output[-3:] == 7.0).all(), "padding was written"
    for row, (old, new) in enumerate(made.requests):  # slots that NIXL and vLLM's own backends read
        slots = made.slots_of(row, torch.arange(old + new))
        assert torch.equal(made.cache[slots // BLOCK, :, slots % BLOCK], torch.cat([made.keys[row], made.values[row]], -1))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("long_prompt", [None, 2])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_with_an_fp8_cache_and_its_scales(batch: str, layout: str, long_prompt: int | None) -> None:
    """Keys and values that fp8 numbers times the scales represent, so that nothing is lost. vLLM allocates bytes."""
    made = Batch(BATCHES[batch], layout)
    scales = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.125))
    made.keys = [(keys * 2).to(FP8).half() / 2 for keys in made.keys]
    made.values = [(values * 8).to(FP8).half() / 8 for values in made.values]
    cache = torch.zeros_like(made.cache, dtype=torch.uint8)
    layer = implementation(kv_cache_dtype="fp8")
    for row, (old, _) in enumerate(made.requests):
        slots = made.slots_of(row, torch.arange(old))
        layer.do_kv_cache_update(scales, made.keys[row][:old], made.values[row][:old], cache, slots)
    key, value, output = made.new(made.keys), made.new(made.values), torch.empty_like(made.query)
    layer.do_kv_cache_update(scales, key, value, cache, made.slots)
    layer.forward(scales, made.query, key, value, cache, made.metadata(long_prompt), output)
    expected = made.expected(None)
    assert torch.norm(output.double() - expected) / torch.norm(expected) < 2e-3
    for row, (old, new) in enumerate(made.requests):  # bytes that NIXL moves and vLLM's own backends read
        slots = made.slots_of(row, torch.arange(old + new))
        stored = cache[slots // BLOCK, :, slots % BLOCK].view(FP8).half()
        assert torch.equal(stored, torch.cat([made.keys[row] * 2, made.values[row] * 8], -1))


def test_vllm_attention_layer_runs_on_the_backend(vllm_config: Any) -> None:
    """From the layer through vLLM's operators to the cache and back."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention

    from strata.kernels.vllm_plugin.attention import StrataAttentionBackend

    made = Batch(BATCHES["mixed"], "HND")
    layer = Attention(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, prefix="layers.0.attn", attn_backend=StrataAttentionBackend)
    layer.kv_cache = made.cache
    context = {"attn_metadata": {"layers.0.attn": made.metadata(2)}, "slot_mapping": {"layers.0.attn": made.slots}}
    with set_forward_context(vllm_config=vllm_config, **context):
        output = layer(*(states.flatten(1) for states in (made.query, made.new(made.keys), made.new(made.values))))
    expected = made.expected(None).flatten(1)
    assert torch.norm(output.double() - expected) / torch.norm(expected) < 2e-3


def test_uncached_prompts_at_the_end_of_a_batch_are_separated() -> None:
    prompts = Batch(BATCHES["mixed"], "NHD").metadata(2).prompts
    assert prompts.first_token == 23 and prompts.starts.tolist() == [0, 2, 302] and prompts.longest == 300
    assert (prompts.before.max_query_len, prompts.before.max_seq_len, len(prompts.before.seq_lens)) == (20, 101, 4)
    long = Batch(BATCHES["mixed"], "NHD").metadata(100).prompts
    assert long.first_token == 25 and long.starts.tolist() == [0, 300] and len(long.before.seq_lens) == 5
    assert Batch(BATCHES["prompts"], "NHD").metadata(2).prompts.before is None
    assert Batch(BATCHES["mixed"], "NHD").metadata(None).prompts is None
    for other in (DECODES, [(0, 1), (0, 1)], BATCHES["a chunk after a prompt"], BATCHES["a later chunk"]):
        assert Batch(other, "NHD").metadata(2).prompts is None


def builder(graphs: str = "FULL_AND_PIECEWISE", drafted: int = 0) -> Any:
    from vllm.config import CUDAGraphMode

    from strata.kernels.vllm_plugin.attention import StrataAttentionMetadataBuilder

    config = SimpleNamespace(
        model_config=SimpleNamespace(rswa_window=None),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[graphs]),
        num_speculative_tokens=drafted,
    )
    spec = SimpleNamespace(head_size=HEAD_SIZE, num_kv_heads=2)
    return StrataAttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def test_graph_capture_does_not_use_flash_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests vLLM captures with have as many keys as queries, but stand for decodes."""
    common = Batch([(0, 1024)], "NHD").common()
    switch_on(monkeypatch, "attention", "flash_prefill")
    assert builder().build(0, common).prompts.longest == 1024
    assert builder().build_for_cudagraph_capture(common).prompts is None
    switch_on(monkeypatch, "attention")
    assert builder().build(0, common).prompts is None


def test_full_graph_capture_allows_one_request_with_all_tokens() -> None:
    """vLLM captures with as many requests as tokens, and replays with prompts among them. Decode graphs stay decode graphs."""
    common = Batch([(0, 1)] * 6, "NHD").common()
    captured = builder("FULL", drafted=3).build_for_cudagraph_capture(common)
    assert (captured.max_query_len, captured.usual_query_len) == (6, 4)
    assert builder("FULL_AND_PIECEWISE").build_for_cudagraph_capture(common).max_query_len == 1
    assert builder("FULL").build(0, common).max_query_len == 1


def test_layers_that_share_a_cache_attend_to_it() -> None:
    """Their key and value inputs are not the cached ones."""
    made = Batch(BATCHES["prompts"], "NHD")
    for row in range(len(made.requests)):
        made.store(row, made.keys[row], made.values[row])
    layer = implementation(kv_sharing_target_layer_name="another")
    output = torch.empty_like(made.query)
    layer.forward(None, made.query, None, None, made.cache, made.metadata(2), output)
    expected = made.expected(None)
    assert torch.norm(output.double() - expected) / torch.norm(expected) < 2e-3


@pytest.mark.slow
def test_warm_up_batches_run() -> None:
    from strata.kernels.vllm_plugin import warm_up

    batches = list(warm_up._batches(100, 40, 16))
    assert {len(batch) for batch in batches} >= {1, 33} and max(sum(new for _, new in batch) for batch in batches) == 100
    for call in warm_up.calls(
        implementation(sliding_window=20), batches, BLOCK, torch.float16, torch.float16, 16, torch.device("cpu")
    ):
        call()


def test_forward_returns_zeros_during_memory_profiling() -> None:
    output = torch.ones(3, HEADS, HEAD_SIZE)
    implementation().forward(None, output, None, None, torch.tensor([]), None, output)
    assert not output.any()


def test_compiled_norms_are_lowered_to_strata(on_cuda: None, vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from vllm import ir
    from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass
    from vllm.config.kernel import IrOpPriorityConfig

    switch_on(monkeypatch, "rms_norm")
    vllm_plugin.register()

    def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, residual = ir.ops.fused_add_rms_norm(x, residual, weight, 1e-5)
        return ir.ops.rms_norm(y, weight, 1e-5), residual

    inputs = torch.randn(3, 64), torch.randn(3, 64), torch.rand(64)
    expected = model(*inputs)
    traced = make_fx(model, tracing_mode="fake")(*inputs)
    priority = IrOpPriorityConfig(rms_norm=["strata", "native"], fused_add_rms_norm=["strata", "native"])
    with priority.set_priority():
        VllmIRLoweringPass(vllm_config)(traced.graph)
    traced.recompile()
    targets = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    assert {"strata.rms_norm.default", "strata.add_rms_norm.default"} <= targets
    torch.testing.assert_close(traced(*inputs), expected)


def test_silu_and_mul_equals_vllm(vllm_config: Any) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    from strata.kernels.vllm_plugin.layers import StrataSiluAndMul

    x = torch.randn(5, 2 * 48)
    torch.testing.assert_close(StrataSiluAndMul().forward_cuda(x), SiluAndMul.forward_native(x))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [HEAD_SIZE, HEAD_SIZE // 2])
def test_rotary_embedding_equals_vllm(vllm_config: Any, neox: bool, rotary: int) -> None:
    from strata.kernels.vllm_plugin.layers import StrataRotaryEmbedding

    layer = StrataRotaryEmbedding(HEAD_SIZE, rotary, 64, 10000.0, neox, torch.float32)
    states = torch.randn(7, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    query, key, _ = states.split([HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE], dim=-1)
    positions = torch.tensor([0, 1, 5, 63, 2, 2, 9])
    expected = layer.forward_native(positions, query.clone(), key.clone())
    torch.testing.assert_close(layer.forward_cuda(positions, query, key), expected)


def test_paired_ratio_and_its_standard_error() -> None:
    """A host that is slow for one round slows both engines, so the ratio is unaffected."""
    from strata.kernels.bench.vllm_plugin import paired_ratio

    assert paired_ratio([110, 55, 220], [100, 50, 200]) == (pytest.approx(1.1), pytest.approx(0, abs=1e-9))
    ratio, error = paired_ratio([200, 50], [100, 100])
    assert ratio == pytest.approx(1) and error == pytest.approx(0.693, abs=1e-3)
    assert paired_ratio([120], [100]) == (pytest.approx(1.2), None)


def test_served_workload_varies_answer_lengths() -> None:
    from strata.kernels.bench.vllm_plugin import Workload

    prompts, lengths = Workload(64, 5, 100, concurrency=8).drawn(1000, seed=1)
    assert {len(prompt) for prompt in prompts} == {5} and len(set(lengths)) > 20
    assert min(lengths) >= 50 and max(lengths) <= 150
    assert Workload(3, 5, 100).drawn(1000, seed=1)[1] == [100] * 3


def test_next_prompt_starts_when_an_answer_finishes() -> None:
    from strata.kernels.bench.vllm_engine import generate

    class Counting:
        """Fake engine that generates one token per request and step."""

        def __init__(self) -> None:
            self.llm_engine = self
            self.left: dict[int, int] = {}
            self.begun = self.most = 0

        def enqueue(self, prompt: dict[str, list[int]], sampling: Any, use_tqdm: bool) -> None:
            self.left[self.begun] = sampling.max_tokens
            self.begun += 1
            self.most = max(self.most, len(self.left))

        def get_num_unfinished_requests(self) -> int:
            return len(self.left)

        def step(self) -> list[SimpleNamespace]:
            self.left = {request: left - 1 for request, left in self.left.items()}
            ended = [request for request, left in self.left.items() if not left]
            self.left = {request: left for request, left in self.left.items() if left}
            return [SimpleNamespace(request_id=str(one), finished=True, outputs=[f"answer {one}"]) for one in ended]

    engine = Counting()
    answers = generate(engine, [[1]] * 12, [3, 1, 2, 4, 1, 9, 1, 1, 1, 1, 2, 1], concurrency=2, top=None)
    assert answers == [f"answer {number}" for number in range(12)] and engine.most == 2
