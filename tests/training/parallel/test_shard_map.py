"""Shards of every rank against slices of whole parameters. Nothing starts a process."""

from itertools import product

import pytest
import torch

from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.layout import Place
from strata.training.parallel import expert, tensor
from strata.training.parallel.shard_map import Cut, Shard, local_shards, whole_name

MODEL = ModelSection(layers=3, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=512, context=32)
HERE = Place(0, 0, 0, 0)
LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("cut", "shape"),
    [(None, (6, 4, 5)), (Cut(0, 2, 5), (3, 4, 5)), (Cut(1, 1, 3), (6, 2, 5)), (Cut(2, 0, 4), (6, 4, 4))],
)
def test_shape_of_a_slice(cut: Cut | None, shape: tuple[int, ...]) -> None:
    shard = Shard("w", (6, 4, 5), cut, 7)
    assert shard.local_shape == shape
    assert shard.numel == torch.zeros(shape).numel()


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", 0),
        (f"{LAYER}.self_attn.k_proj.weight", 0),
        (f"{LAYER}.self_attn.v_proj.weight", 0),
        (f"{LAYER}.self_attn.o_proj.weight", 1),
        (f"{LAYER}.mlp.gate_proj.weight", 0),
        (f"{LAYER}.mlp.up_proj.weight", 0),
        (f"{LAYER}.mlp.down_proj.weight", 1),
        (f"{LAYER}.mlp.experts.3.down_proj.weight", 1),
        (f"{LAYER}.mlp.gate.weight", None),
        (f"{LAYER}.input_layernorm.weight", None),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", None),
        (f"{LAYER}.self_attn.q_proj.weight.more", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensor_parallel_shards_join_to_the_whole(name: str, dim: int | None, size: int) -> None:
    """Matrices that read the residual stream are divided by rows of the weight, matrices that write to it by columns."""
    whole = torch.arange(8 * 12).view(8, 12)
    parallel = ParallelSection(workers=size, tensor=size)
    assert tensor.split_dimension(name) == dim
    if dim is None or size == 1:
        for rank in range(size):
            assert local_shards(name, (8, 12), MODEL, parallel, Place(0, 0, 0, rank)) == [Shard(name, (8, 12), None, 0)]
        return
    for rank, local in enumerate(whole.chunk(size, dim)):
        [shard] = local_shards(name, tuple(local.shape), MODEL, parallel, Place(0, 0, 0, rank))
        assert (shard.name, shard.shape, shard.offset, shard.local_shape) == (name, (8, 12), 0, tuple(local.shape))
        assert shard.cut is not None
        selected = (slice(None),) * shard.cut.dim + (slice(shard.cut.start, shard.cut.stop),)
        assert torch.equal(whole[selected], local)


@pytest.mark.parametrize(("data", "size"), [(2, 2), (4, 2), (6, 3)])
def test_expert_parallel_shards_cover_every_expert_once(data: int, size: int) -> None:
    """Six experts, stacked as [experts, 24, 16] on each rank. Ranks beyond the expert dimension repeat the experts."""
    parallel, count = ParallelSection(workers=data, expert=size), 6 // size
    for part, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        for rank in range(data):
            found = local_shards(f"{LAYER}.mlp.experts.{part}", (count, 24, 16), MODEL, parallel, Place(0, rank, 0, 0))
            experts = list(range(6))[rank % size * count :][:count]
            assert [shard.name for shard in found] == [f"{LAYER}.mlp.experts.{e}.{theirs}.weight" for e in experts]
            assert [shard.offset for shard in found] == [384 * i for i in range(count)]
            assert {(shard.shape, shard.cut) for shard in found} == {((24, 16), None)}


def test_stacked_experts_are_divided_only_with_expert_parallelism() -> None:
    name = f"{LAYER}.mlp.experts.w1"
    assert local_shards(name, (6, 24, 16), MODEL, ParallelSection(), HERE) == [Shard(name, (6, 24, 16), None, 0)]
    router = f"{LAYER}.mlp.router.gate.weight"
    [shard] = local_shards(router, (6, 16), MODEL, ParallelSection(workers=2, expert=2), HERE)
    assert shard == Shard(f"{LAYER}.mlp.gate.weight", (6, 16), None, 0)


@pytest.mark.parametrize(
    ("local", "whole"),
    [
        ("tied_modules.embed.weight", "model.embed_tokens.weight"),
        ("0.weight", "model.embed_tokens.weight"),
        ("1.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("2.mlp.gate.weight", "model.layers.1.mlp.gate.weight"),
        ("3.input_layernorm.weight", "model.layers.2.input_layernorm.weight"),
        ("4.weight", "model.norm.weight"),
        ("5.weight", "lm_head.weight"),
    ],
)
def test_names_in_a_pipeline_stage(local: str, whole: str) -> None:
    """Modules of 3 layers: number 0 is the embedding, 1 to 3 are the layers, 4 is the norm and 5 the output head."""
    parallel = ParallelSection(workers=2, pipeline=2)
    assert whole_name(local, MODEL, parallel) == whole
    [shard] = local_shards(local, (8, 12), MODEL, parallel, HERE)
    assert shard.name == whole


@pytest.mark.parametrize(
    ("local", "whole"),
    [
        (f"{LAYER}.mlp.router.gate.weight", f"{LAYER}.mlp.gate.weight"),
        (f"{LAYER}.mlp.shared_experts.up_proj.weight", f"{LAYER}.mlp.shared_expert.up_proj.weight"),
        (f"{LAYER}.mlp.shared_experts_gate.weight", f"{LAYER}.mlp.shared_expert_gate.weight"),
        (f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.q_proj.weight"),
    ],
)
def test_names_with_expert_parallelism(local: str, whole: str) -> None:
    assert whole_name(local, MODEL, ParallelSection(workers=2, expert=2)) == whole
    assert whole_name(local, MODEL, ParallelSection(workers=2)) == local


def test_tensor_parallel_stage_shards_the_whole_models_parameter() -> None:
    parallel = ParallelSection(workers=8, tensor=2, pipeline=2)
    for stage, data, rank in product(range(2), repeat=3):
        [shard] = local_shards("2.mlp.down_proj.weight", (16, 12), MODEL, parallel, Place(stage, data, 0, rank))
        assert shard == Shard(f"{LAYER}.mlp.down_proj.weight", (16, 24), Cut(1, 12 * rank, 12 * rank + 12), 0)


def test_deepspeed_section_of_tensor_parallelism() -> None:
    section = tensor.config(4)
    column, row, skip = section["partition_config"]["layer_specs"]
    assert section["autotp_size"] == 4 and section["partition_config"]["use_default_specs"] is False
    assert [spec["partition_type"] for spec in (column, row, skip)] == ["column", "row", "skip"]
    assert skip["patterns"] == [".*"]


@pytest.mark.parametrize(("shared_ffn", "shared"), [(0, False), (1, True), (40, True)])
def test_deepspeed_section_of_expert_parallelism(shared_ffn: int, shared: bool) -> None:
    moe = {"experts": 8, "top_k": 3, "shared_ffn": shared_ffn}
    section = ModelSection.model_validate(MODEL.model_dump() | {"moe": moe}).moe
    assert section is not None
    config = expert.config(4, section)
    assert (config["enabled"], config["autoep_size"], config["top_k"]) == (True, 4, 3)
    assert config["has_shared_experts"] is shared and config["route_norm"] is True
