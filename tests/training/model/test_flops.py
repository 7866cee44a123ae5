from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from strata.platform.hardware import cpu_peak
from strata.platform.recipe import ModelSection, MoESection, Precision
from strata.training.model.flops import flops_per_token, gpu_peak, mfu, peak_flops
from strata.training.model.llama import Llama

DENSE = ModelSection(layers=3, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=512, context=32)
MIXTURES = [MoESection(experts=4, top_k=2), MoESection(experts=3, top_k=1, shared_ffn=48)]
SECTIONS = [DENSE, DENSE.model_copy(update={"tie_embeddings": False}), *(DENSE.model_copy(update={"moe": m}) for m in MIXTURES)]


@pytest.mark.parametrize("section", SECTIONS, ids=["tied", "untied", "mixture", "shared expert"])
def test_formula_equals_torchs_flop_counter(section: ModelSection) -> None:
    """Uses attention as plain matrix products, because torch's counter does not cover every fused kernel."""
    tokens_bt = torch.randint(0, section.vocab, (2, section.context))
    model = Llama(section, kernels="torch")
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
        logits_btv = model(tokens_bt)
    assert forward.get_total_flops() * 3 == flops_per_token(section) * tokens_bt.numel()
    with FlopCounterMode(display=False) as backward:
        logits_btv.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


def test_adapters_need_no_gradients_of_the_weights() -> None:
    assert flops_per_token(DENSE, adapters=True) * 3 == flops_per_token(DENSE) * 2


def test_only_active_experts_count() -> None:
    few, many = (DENSE.model_copy(update={"moe": MoESection(experts=n, top_k=2)}) for n in (2, 64))
    router = DENSE.layers * DENSE.hidden * 62  # the only part that grows with the number of experts
    assert flops_per_token(many) - flops_per_token(few) == 6 * router


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148),
        ("NVIDIA H800", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_gpus_are_recognized_by_their_driver_name(name: str, bf16: float) -> None:
    assert gpu_peak(name, "bf16", tf32=False) == pytest.approx(bf16 * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4"])
def test_similar_gpu_name_has_no_peak(name: str) -> None:
    peak = gpu_peak(name, "bf16", tf32=False)
    assert peak is None
    assert mfu(1000.0, 1e9, 1, peak) is None


def test_v100_has_no_bf16() -> None:
    assert gpu_peak("Tesla V100-SXM2-32GB", "bf16", tf32=False) is None
    assert gpu_peak("Tesla V100-SXM2-32GB", "fp32", tf32=True) == 15.7e12
    assert gpu_peak("Tesla V100-PCIE-16GB", "fp32", tf32=True) == 14e12


def test_fp32_peak_depends_on_whether_tf32_is_allowed() -> None:
    assert gpu_peak("NVIDIA H200", "fp32", tf32=False) == 66.9e12
    assert gpu_peak("NVIDIA H200", "fp32", tf32=True) == 494.7e12


def test_cpu_peak_is_measured_once_and_restores_the_thread_count() -> None:
    before = torch.get_num_threads()
    peak = peak_flops("cpu", "fp32", 1)
    assert peak is not None and 1e9 < peak < 1e13
    assert peak_flops("cpu", "fp32", 1) == peak
    assert torch.get_num_threads() == before


def test_mfu_is_over_all_workers() -> None:
    assert mfu(tokens_per_s=1000, flops_per_token=2e9, workers=4, peak=1e12) == 0.5


def test_cpu_peak_is_the_fastest_product_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products of 4 x 4 matrices, 2 x 4^3 = 128 FLOPs each, in 40, 20 and 30 ms. The limit of 0.1 s is reached after."""
    clock = iter([0.0, 0.0, 0.0, 0.04, 0.04, 0.04, 0.06, 0.06, 0.06, 0.09, 0.1])
    monkeypatch.setattr(cpu_peak, "time", SimpleNamespace(perf_counter=clock.__next__))
    assert cpu_peak._best_of(4, torch.float32) == pytest.approx(128 / 0.02)
    assert not list(clock)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_cpu_peak_is_the_best_of_three_sizes(monkeypatch: pytest.MonkeyPatch, precision: Precision, dtype: torch.dtype) -> None:
    measured: list[tuple[int, torch.dtype, int]] = []

    def best_of(size: int, dtype: torch.dtype) -> float:
        measured.append((size, dtype, torch.get_num_threads()))
        return {256: 1e9, 512: 3e9, 1024: 2e9}[size]

    monkeypatch.setattr(cpu_peak, "_best_of", best_of)
    before = torch.get_num_threads()
    assert cpu_peak.measured.__wrapped__(precision, before + 1, "highest") == 3e9
    assert measured == [(size, dtype, before + 1) for size in (256, 512, 1024)]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("matmul", "peak"), [("highest", 66.9e12), ("high", 494.7e12), ("medium", 494.7e12)])
def test_gpu_peak_follows_torchs_matmul_precision(monkeypatch: pytest.MonkeyPatch, matmul: str, peak: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: matmul)
    assert peak_flops("gpu", "fp32", 1) == peak
    assert peak_flops("gpu", "bf16", 1) == 989.4e12


def test_flops_of_a_small_model() -> None:
    """Forward pass of a token: 2 FLOPs a weight, and 4 x hidden for each position of attention, masked positions included. The
    backward pass is twice that."""
    section = ModelSection(layers=1, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=512, context=32)
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16  # queries, keys and values with half of the heads, output
    weights = attention + 3 * 16 * 24 + 512 * 16
    assert flops_per_token(section) == 3 * (2 * weights + 4 * 32 * 16)
