"""Both sides of every bound of a recipe, its rules between keys, and its defaults."""

import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from strata.platform import recipe_file
from strata.platform.errors import UserError, shown
from strata.platform.recipe import PreferenceLoss, PreferenceSection, Recipe
from strata.platform.recipe_file import RecipeError

BASE: dict[str, Any] = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512, "context": 64},
    "train": {"steps": 100, "batch": 24, "micro_batch": 1, "lr": 0.001},
}
HALF = {"serve.decode.gpus": 0.5, "serve.decode.gpu_memory": 0.4}
SMALL = 1e-9  # just inside or outside an open bound
INFINITE = float("inf")


def recipe(changes: dict[str, Any]) -> Recipe:
    tree: dict[str, Any] = {name: dict(section) for name, section in BASE.items()}
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return Recipe.model_validate(tree)


def accepts(changes: dict[str, Any]) -> bool:
    try:
        recipe(changes)
    except ValidationError:
        return False
    return True


AT_LEAST_ONE = (
    *("model.layers", "model.ffn", "train.early_stop", "train.micro_batch", "train.eval_every", "train.eval_sequences"),
    *("train.checkpoint_every", "train.keep", "parallel.cpus_per_worker", "serve.start_timeout_s", "serve.kv_cache_gib"),
    *("serve.max_sequences", "serve.gateways", "deploy.gpus_per_node", "deploy.nodes", "deploy.cpus", "deploy.memory_gib"),
    *("serve.decode.replicas", "serve.decode.max_replicas", "parallel.tensor", "parallel.pipeline", "parallel.sequence"),
    *("parallel.expert", "parallel.workers", "serve.decode.tensor_parallel", "deploy.quota_gpus", "train.on_spike.most"),
    *("serve.files.file_mib", "serve.files.tenant_gib"),
)
AT_LEAST_ZERO = ("train.warmup", "train.max_failures", "serve.max_queue", "serve.prefill.replicas", "train.seed")
AT_LEAST_ZERO += ("serve.remote_prefill.min_tokens", "train.steps", "deploy.borrow_gpus", "train.watchdog.check_every")
AT_LEAST_ZERO += ("train.memory_copy_every",)


@pytest.mark.parametrize(("least", "key"), [*((1, key) for key in AT_LEAST_ONE), *((0, key) for key in AT_LEAST_ZERO)])
def test_smallest_counts(least: int, key: str) -> None:
    assert accepts({key: least})
    assert not accepts({key: least - 1})
    assert not accepts({key: least + 0.5})


@pytest.mark.parametrize(
    ("key", "accepted", "rejected"),
    [
        ("model.vocab", [512], [511]),
        ("model.context", [16], [15]),
        ("model.rope_theta", [SMALL], [0, -1]),
        ("model.norm_eps", [SMALL, 0.01 - SMALL], [0, 0.01]),
        ("data.holdout", [SMALL, 0.5 - SMALL], [0, 0.5]),
        ("train.lr", [SMALL, 1 - SMALL], [0, 1]),
        ("train.embedding_lr_ratio", [SMALL, 10], [0]),
        ("train.min_lr_ratio", [0, 1], [-SMALL, 1 + SMALL]),
        ("train.weight_decay", [0, 1 - SMALL], [-SMALL, 1]),
        ("train.clip", [SMALL, 5], [0]),
        ("train.seed", [2**31 - 1], [2**31]),
        ("train.watchdog.hang_s", [5], [5 - SMALL, INFINITE]),
        ("train.watchdog.straggler", [1 + SMALL], [1, INFINITE]),
        ("train.on_spike.factor", [1 + SMALL], [1, INFINITE]),
        ("train.preference.beta", [SMALL, 5], [0, INFINITE]),
        ("train.preference.label_smoothing", [0, 0.5 - SMALL], [-SMALL, 0.5]),
        ("train.preference.sft_weight", [0, 5], [-SMALL, INFINITE]),
        ("parallel.zero", [0, 1, 2, 3], [-1, 4]),
        ("serve.port", [1, 65535], [0, 65536]),
        ("serve.decode.gpu_memory", [SMALL, 1 - SMALL], [0, 1]),
        ("serve.remote_prefill.max_queue_s", [SMALL, 60], [0]),
        ("serve.remote_prefill.stall_weight", [0, 9], [-SMALL]),
    ],
)
def test_bounds(key: str, accepted: list[float], rejected: list[float]) -> None:
    assert [value for value in accepted if not accepts({key: value})] == []
    assert [value for value in rejected if accepts({key: value})] == []


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        # hidden is heads times an even number, heads a multiple of kv_heads.
        ({"model.hidden": 64, "model.heads": 32, "model.kv_heads": 8}, True),
        ({"model.hidden": 64, "model.heads": 64, "model.kv_heads": 8}, False),  # one dimension per head
        ({"model.hidden": 66, "model.heads": 4}, False),
        ({"model.hidden": 12, "model.heads": 4}, False),  # three dimensions per head
        ({"model.hidden": 24, "model.heads": 4}, True),
        ({"model.heads": 4, "model.kv_heads": 4}, True),
        ({"model.heads": 4, "model.kv_heads": 3}, False),
        ({"model.heads": 4, "model.kv_heads": 8}, False),
        # Mixture of experts.
        ({"model.moe": {"experts": 2}}, True),
        ({"model.moe": {"experts": 1, "top_k": 1}}, False),
        ({"model.moe": {"experts": 4, "top_k": 4}}, True),
        ({"model.moe": {"experts": 4, "top_k": 5}}, False),
        ({"model.moe": {"experts": 4, "top_k": 0}}, False),
        ({"model.moe": {"experts": 4, "shared_ffn": 0, "balance": 0}}, True),
        ({"model.moe": {"experts": 4, "shared_ffn": -1}}, False),
        ({"model.moe": {"experts": 4, "balance": -SMALL}}, False),
        # One source of data.
        ({"data.path": "/x"}, True),
        ({"data.hf": "x"}, True),
        ({"data.path": "/x", "data.hf": "x"}, False),
        ({"data.path": "s3://bucket/x"}, False),
        ({"data.sets": [{"path": "/x"}]}, True),
        ({"data.sets": [{"path": "/x"}], "data.path": "/y"}, False),
        ({"data.sets": [{"path": "/x"}], "data.hf": "y"}, False),
        ({"data.sets": [{"path": "/x", "hf": "y"}]}, False),
        ({"data.sets": [{"path": "/x", "uri": "s3://y"}]}, False),
        ({"data.sets": [{"name": "x"}]}, False),
        ({"data.sets": [{"uri": "s3://x/y.jsonl"}]}, True),
        ({"data.sets": [{"uri": "/x/y.jsonl"}]}, False),
        ({"data.sets": [{"uri": "s3://"}]}, False),
        ({"data.sets": [{"path": "s3://x"}]}, False),
        # Sets have different names, taken from their sources.
        ({"data.sets": [{"path": "/x/a"}, {"path": "/y/a"}]}, False),
        ({"data.sets": [{"path": "/x/a"}, {"path": "/y/a", "name": "b"}]}, True),
        ({"data.sets": [{"path": "/x/a/"}, {"hf": "a"}]}, False),
        # The kind belongs to the source.
        ({"data.kind": "chat"}, False),
        ({"data.kind": "chat", "data.path": "/x"}, True),
        ({"data.kind": "chat", "data.hf": "x"}, True),
        ({"data.kind": "chat", "data.sets": [{"path": "/x"}]}, False),
        # Preferences have a loss of their own.
        ({"data.sets": [{"path": "/x", "kind": "preference"}, {"path": "/y", "kind": "preference"}]}, True),
        ({"data.sets": [{"path": "/x", "kind": "preference"}, {"path": "/y", "kind": "chat"}]}, False),
        ({"data.sets": [{"path": "/x", "kind": "text"}, {"path": "/y", "kind": "chat"}]}, True),
        ({"data.kind": "preference", "data.path": "/x", "data.mask": "all"}, False),
        ({"data.kind": "chat", "data.path": "/x", "data.mask": "all"}, True),
        # Weights: positive, and none negligible.
        ({"data.sets": [{"path": "/x", "weight": 0}]}, False),
        ({"data.sets": [{"path": "/x", "weight": float("inf")}]}, False),
        ({"data.sets": [{"path": "/x", "weight": 1}, {"path": "/y", "weight": 9999}]}, True),
        ({"data.sets": [{"path": "/x", "weight": 1}, {"path": "/y", "weight": 10001}]}, False),
        # One objective.
        ({"train.distill": "/x", "train.preference": {}}, False),
        ({"train.distill": "/x"}, True),
        ({"train.distill": 5}, False),
        # Warm-up ends before the run.
        ({"train.warmup": 99}, True),
        ({"train.warmup": 100}, False),
        ({"train.samples": {"prompts": ["a"]}}, True),
        ({"train.samples": {"prompts": []}}, False),
        ({"train.samples": {"tokens": 4}}, False),
        ({"serve.adapter": "apart"}, True),
        ({"serve.adapter": "both"}, False),
        ({"serve.adapters": {}}, True),
        ({"serve.adapters": {"slots": 2, "in_memory": 2, "rank": 64, "roots": ["/a"], "load": {"a": "/a/b"}}}, True),
        ({"serve.adapters": {"slots": 3, "in_memory": 2}}, False),
        ({"serve.adapters": {"rank": 12}}, False),
        ({"serve.adapters": {}, "serve.adapter": "apart"}, False),
        # Keys of a preference loss.
        ({"train.preference": {}}, True),
        ({"train.preference": {"loss": "ppo"}}, False),
        ({"train.preference": {"loss": "dpo", "label_smoothing": 0.1, "sft_weight": 1}}, True),
        ({"train.preference": {"loss": "hinge", "sft_weight": 1}}, True),
        ({"train.preference": {"loss": "hinge", "label_smoothing": 0.1}}, False),
        ({"train.preference": {"loss": "ipo", "sft_weight": 1}}, True),
        ({"train.preference": {"loss": "ipo", "label_smoothing": 0.1}}, False),
        ({"train.preference": {"loss": "simpo", "gamma": 0, "sft_weight": 1}}, True),
        ({"train.preference": {"loss": "simpo", "gamma": -SMALL}}, False),
        ({"train.preference": {"loss": "dpo", "gamma": 0}}, False),
        ({"train.preference": {"loss": "orpo", "sft_weight": 1}}, False),
        ({"train.preference": {"loss": "kto", "sft_weight": 1}}, False),
        ({"train.preference": {"loss": "kto", "desirable_weight": 0, "undesirable_weight": 2}}, True),
        ({"train.preference": {"loss": "kto", "desirable_weight": -SMALL}}, False),
        ({"train.preference": {"loss": "dpo", "desirable_weight": 2}}, False),
        ({"train.preference": {"loss": "dpo", "undesirable_weight": 2}}, False),
        # Workers: tensor x pipeline x sequence divides them, experts the data-parallel rest.
        ({"parallel.workers": 12, "parallel.tensor": 2, "parallel.pipeline": 3, "parallel.sequence": 2}, True),
        ({"parallel.workers": 6, "parallel.tensor": 2, "parallel.pipeline": 3, "parallel.sequence": 2}, False),
        ({"parallel.workers": 24, "parallel.tensor": 2, "parallel.pipeline": 3, "parallel.expert": 4}, True),
        ({"parallel.workers": 24, "parallel.tensor": 2, "parallel.pipeline": 3, "parallel.expert": 3}, False),
        ({"parallel.workers": 24, "parallel.tensor": 2, "parallel.pipeline": 3, "parallel.expert": 8}, False),
        # The batch is a multiple of data-parallel workers x micro_batch.
        ({"parallel.workers": 12, "parallel.tensor": 2, "train.micro_batch": 4}, True),  # 24 of 6 x 4
        ({"parallel.workers": 12, "train.micro_batch": 4}, False),  # 48
        ({"parallel.workers": 6, "parallel.tensor": 2, "train.micro_batch": 5}, False),  # 15
        ({"parallel.workers": 3, "train.micro_batch": 8}, True),
        # A range needs one number of workers with a layout; its micro-batch may be smaller.
        ({"parallel.workers": "4..8"}, True),
        ({"parallel.workers": "8..8"}, True),
        ({"parallel.workers": "1..1"}, True),
        ({"parallel.workers": "8..4"}, False),
        ({"parallel.workers": "0..2"}, False),
        ({"parallel.workers": "-1..2"}, False),
        ({"parallel.workers": "4.."}, False),
        ({"parallel.workers": "4..8..9"}, False),
        ({"parallel.workers": "9..11"}, False),  # 24 is no multiple of any of them
        ({"parallel.workers": "9..12"}, True),
        ({"parallel.workers": "5..7", "parallel.tensor": 4}, False),
        ({"parallel.workers": "5..8", "parallel.tensor": 4}, True),
        ({"parallel.workers": "4..7", "parallel.expert": 8}, False),
        ({"parallel.workers": 12, "train.micro_batch": 4}, False),
        ({"parallel.workers": "12..12", "train.micro_batch": 4}, True),
        # Pools.
        ({"serve.decode.replicas": 3, "serve.decode.max_replicas": 3}, True),
        ({"serve.decode.replicas": 3, "serve.decode.max_replicas": 2}, False),
        ({"serve.prefill.replicas": 0, "serve.prefill.max_replicas": 2}, False),
        ({"serve.prefill.replicas": 0}, True),
        ({"serve.decode.replicas": 0}, False),
        ({"serve.decode.replicas": 0, "serve.decode.max_replicas": 2}, False),
        ({"serve.decode.replicas": 0, "serve.decode.max_replicas": 2, "serve.slo": {}}, True),
        ({"serve.decode.replicas": 0, "serve.slo": {}}, False),
        ({"serve.slo": {}}, False),
        ({"serve.prefill.max_replicas": 2, "serve.slo": {"ttft_s": 0.5}}, True),
        ({"serve.decode.max_replicas": 2, "serve.slo": {"itl_s": 0}}, False),
        ({**HALF, "serve.decode.gpu_memory": 0.5}, True),
        ({**HALF, "serve.decode.gpu_memory": 0.5 + SMALL}, False),
        ({"serve.decode.gpus": 1, "serve.decode.gpu_memory": 0.99}, True),
        ({"serve.decode.gpus": 0}, False),
        ({"serve.decode.gpus": 2, "serve.decode.tensor_parallel": 2}, True),
        ({"serve.decode.gpus": 2}, False),
        ({"serve.decode.gpus": 1, "serve.decode.tensor_parallel": 2}, False),
        ({"serve.decode.gpus": 1.5}, False),
        ({**HALF, "serve.decode.tensor_parallel": 2}, True),
        ({**HALF, "serve.decode.sm_share": 1}, True),
        ({**HALF, "serve.decode.sm_share": 1 + SMALL}, False),
        ({**HALF, "serve.decode.sm_share": 0}, False),
        ({"serve.decode.sm_share": 0.5}, False),
        # A step has a token of each stream.
        ({"serve.max_sequences": 8, "serve.decode.step_tokens": 8}, True),
        ({"serve.max_sequences": 8, "serve.decode.step_tokens": 7}, False),
        ({"serve.max_sequences": 8, "serve.prefill.step_tokens": 7}, False),
        ({"serve.max_sequences": 8, "serve.prefill.step_tokens": 9}, True),
        # Kernels and their devices.
        ({"serve.kernels": "strata"}, False),
        ({"serve.kernels": "strata", "serve.device": "gpu"}, True),
        ({"train.kernels": "liger"}, False),
        ({"train.kernels": "liger", "parallel.device": "gpu"}, True),
        ({"train.kernels": "torch"}, True),
        # Drafts and their method.
        ({"serve.speculative": {"method": "ngram"}}, True),
        ({"serve.speculative": {"method": "draft"}}, False),
        ({"serve.speculative": {"method": "draft", "draft": "small", "tokens": 16}}, True),
        ({"serve.speculative": {"method": "ngram", "tokens": 17}}, False),
        # Tiers of KV blocks.
        ({"serve.kv_offload": {}}, True),
        ({"serve.kv_offload": {"cpu_gib": 0.5}}, True),
        ({"serve.kv_offload": {"cpu_gib": 0}}, False),
        ({"serve.kv_offload": {"cpu_gib": INFINITE}}, False),
        ({"serve.kv_offload": {"disk": "/kv", "disk_gib": 10}}, True),
        ({"serve.kv_offload": {"disk": "kv", "disk_gib": 10}}, False),
        ({"serve.kv_offload": {"disk": "/kv", "disk_gib": 0}}, False),
        ({"serve.kv_offload": {"disk": "/kv"}}, False),
        ({"serve.kv_offload": {"disk_gib": 10}}, False),
        ({"serve.kv_offload": {}, "serve.prefix_caching": False}, False),
        ({"serve.kv_offload": {}, "serve.speculative": {"method": "ngram"}}, False),
        # vLLM arguments that other keys decide.
        ({"serve.engine": {"max_model_len": 8192}}, True),
        ({"serve.engine": {"max_num_seqs": 8}}, False),
        ({"serve.engine": {"kv_offloading_size": 8}}, False),
        ({"serve.decode.engine": {"block_size": 16}}, False),
        ({"serve.decode.engine": {"kv_cache_dtype": "fp8"}}, False),
        ({"serve.engine": {"kv_cache_dtype": "auto"}}, False),
        # The cache of both pools.
        ({"serve.kv_cache_dtype": "fp8"}, True),
        ({"serve.kv_cache_dtype": "fp8", "serve.device": "gpu", "serve.kernels": "strata"}, True),
        ({"serve.kv_cache_dtype": "fp8", "serve.speculative": {"method": "ngram"}}, True),
        ({"serve.kv_cache_dtype": "fp8", "serve.speculative": {"method": "draft", "draft": "small"}}, False),
        ({"serve.kv_cache_dtype": "int8_per_token_head"}, False),
        # Unknown keys.
        ({"serve.decode.replica": 1}, False),
        ({"serving": {}}, False),
    ],
)
def test_rules_between_keys(changes: dict[str, Any], accepted: bool) -> None:
    assert accepts(changes) is accepted


def test_a_range_of_workers_is_written_as_it_was_read() -> None:
    read = recipe({"parallel.workers": "4..8"})
    workers = read.parallel.workers
    assert (workers, workers.least, str(workers), workers.elastic) == (workers, 4, "4..8", True)
    assert int(workers) == 8 and read.parallel.data == 8
    for copy in (recipe_file.change(read, []), pickle.loads(pickle.dumps(read)), read.model_copy(deep=True)):
        assert copy == read and str(copy.parallel.workers) == "4..8"
    assert "workers: 4..8" in recipe_file.dump(read)
    assert recipe_file.change(read, ["parallel.workers=3..8"]) != read != recipe_file.change(read, ["parallel.workers=8"])
    fixed = recipe({"parallel.workers": 8}).parallel.workers
    assert (fixed.least, str(fixed), fixed.elastic) == (8, "8", False)


def test_derived_values() -> None:
    layout = {"parallel.workers": 24, "parallel.tensor": 2, "parallel.pipeline": 3, "parallel.sequence": 2, "train.batch": 2}
    assert recipe(layout).parallel.data == 2
    assert recipe({"model.hidden": 96}).model.head_dim == 24
    assert recipe({"serve.decode.replicas": 2}).serve.decode.most == 2
    assert recipe({"serve.decode.replicas": 2, "serve.decode.max_replicas": 5}).serve.decode.most == 5


@pytest.mark.parametrize("loss", get_args(PreferenceLoss))
def test_defaults_of_preference_losses(loss: PreferenceLoss) -> None:
    section = PreferenceSection(loss=loss)
    assert section.scale == (2.0 if loss == "simpo" else 0.1)
    assert PreferenceSection(loss=loss, beta=0.3).scale == 0.3
    assert section.needs_reference == (loss not in ("orpo", "simpo"))
    assert PreferenceSection() == PreferenceSection(loss="dpo", label_smoothing=0, sft_weight=0)


def test_keys_of_another_loss_are_named() -> None:
    with pytest.raises(ValidationError, match=r"gamma=0\.5 has no effect with loss=dpo: remove it, or use simpo"):
        PreferenceSection(gamma=0.5)


def test_defaults() -> None:
    pool = {
        "replicas": 1,
        "max_replicas": None,
        "gpus": 1.0,
        "tensor_parallel": 1,
        "gpu_memory": 0.9,
        "sm_share": None,
        "step_tokens": None,
        "engine": {},
    }
    assert recipe({"model.moe": {"experts": 4}}).model_dump() == {
        "model": {
            "from": None,
            "family": None,
            **BASE["model"],
            "rope_theta": 10_000.0,
            "norm_eps": 1e-5,
            "tie_embeddings": True,
            "moe": {
                "experts": 4,
                "top_k": 2,
                "shared_ffn": 0,
                "balance": 0.01,
                "normalize": True,
                "bias": False,
                "dense_layers": (),
                "dense_ffn": 0,
            },
            "architecture": {
                **dict.fromkeys(("qkv_bias", "output_bias", "norm_offset", "sinks"), False),
                **{"qk_norm": "none", "norms": "pre", "activation": "silu", "sliding_layers": (), "unrotated_layers": ()},
                **dict.fromkeys(("head_dim", "embedding_scale", "attention_scale", "attention_softcap", "logit_softcap"), None),
                **dict.fromkeys(("window", "sliding_rope_theta", "rope_scaling"), None),
            },
            "picture": None,
        },
        "data": {
            "path": None,
            "hf": None,
            "hf_config": None,
            "hf_split": "train",
            "text_field": "text",
            "holdout": 0.05,
            "kind": "text",
            "sets": (),
            "pack": True,
            "chat_template": None,
            "mask": "assistant",
            "on_long": "drop",
        },
        "train": {
            **BASE["train"],
            "embedding_lr_ratio": 1.0,
            "min_lr_ratio": 0.1,
            "warmup": 0,
            "weight_decay": 0.1,
            "schedule": "cosine",
            "time_budget_s": None,
            "clip": 1.0,
            "precision": "fp32",
            "matmul": "highest",
            "seed": 0,
            "eval_every": 100,
            "eval_sequences": 64,
            "samples": None,
            "checkpoint_every": 100,
            "recompute": "none",
            "kernels": "strata",
            "compile": False,
            "checkpoints": None,
            "checkpoint_upload": "async",
            "keep": 3,
            "keep_best": True,
            "lora": None,
            "freeze": (),
            "epochs": None,
            "early_stop": None,
            "trackers": (),
            "max_failures": 2,
            "memory_copy_every": 1,
            "watchdog": {"hang_s": 20.0, "straggler": 1.5, "replace_stragglers": False, "check_every": 50},
            "on_spike": None,
            "preference": None,
            "distill": None,
            "flow": None,
        },
        "parallel": {
            **dict.fromkeys(("workers", "zero", "tensor", "pipeline", "sequence", "expert", "cpus_per_worker"), 1),
            "schedule": "1f1b",
            "offload": "none",
            "device": "cpu",
        },
        "serve": {
            "host": "127.0.0.1",
            "port": 8000,
            "allow_unauthenticated": False,
            "start_timeout_s": None,
            "device": "cpu",
            "dtype": "auto",
            "adapter": "merged",
            "adapters": None,
            "eager": False,
            "kernels": "vllm",
            "kv_cache_gib": 1,
            "kv_cache_dtype": "auto",
            "max_sequences": 64,
            "max_queue": 256,
            "prefix_caching": True,
            "routing": "kv",
            "audit_log": None,
            "files": {"folder": None, "file_mib": 200, "tenant_gib": 10},
            "tool_parser": None,
            "reasoning_parser": None,
            "engine": {},
            "gateways": 1,
            "prefill": pool,
            "decode": pool,
            "remote_prefill": {"when": "cheaper", "min_tokens": 256, "max_queue_s": 2.0, "stall_weight": 0.25},
            "speculative": None,
            "kv_offload": None,
            "slo": None,
            "pictures": {
                **dict.fromkeys(("replicas", "ulysses", "ring", "cfg", "pipefusion"), 1),
                **{"patches": 0, "step_cache": 0.0, "max_batch": 8, "batch_wait_ms": 5.0, "max_queue": 64, "steps": 20},
                **{"guidance": 4.0, "max_steps": 100, "max_pictures": 10, "max_pixels": 4_194_304, "step_timeout_s": 300},
            },
            "models": {},
        },
        "deploy": {"name": "strata", "namespace": "strata", "priority": "normal", "model_cache_gib": 200}
        | dict.fromkeys(
            ("image", "storage", "gpu", "prefill_gpu", "decode_gpu", "gpus_per_node", "nodes", "cpus", "memory_gib"), None
        )
        | dict.fromkeys(("reservation", "quota_gpus", "borrow_gpus", "model", "network", "rdma_resource"), None),
    }


# Files and overrides


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = "model: {layers: 2, hidden: 64, heads: 4, kv_heads: 2, ffn: 128, vocab: 512, context: 64}\n"
    (tmp_path / "base.yaml").write_text(base + "train: {steps: 100, batch: 8, micro_batch: 1, lr: 0.001}\n")
    (tmp_path / "sub").mkdir()
    return tmp_path


def test_a_child_overrides_single_keys_of_its_parent(folder: Path) -> None:
    (folder / "sub" / "child.yaml").write_text("extends: ../base.yaml\ntrain: {steps: 7}\nserve: {port: 9}\n")
    (folder / "sub" / "grandchild.yml").write_text("extends: ./child.yaml\ntrain: {lr: 0.5}\ndata: {path: /x}\n")
    loaded = recipe_file.load(str(folder / "sub" / "grandchild.yml"))
    assert (loaded.train.steps, loaded.train.lr, loaded.train.batch) == (7, 0.5, 8)
    assert (loaded.serve.port, loaded.data.path) == (9, Path("/x"))


def test_a_child_replaces_a_section_by_a_value_and_a_value_by_a_section(folder: Path) -> None:
    (folder / "child.yaml").write_text("extends: ./base.yaml\nmodel: {moe: {experts: 4}}\n")
    (folder / "last.yaml").write_text("extends: ./child.yaml\nmodel: {moe: null}\n")
    assert recipe_file.load(str(folder / "child.yaml")).model.moe is not None
    assert recipe_file.load(str(folder / "last.yaml")).model.moe is None


def test_overrides_are_yaml_and_apply_in_order(folder: Path) -> None:
    changes = ["train.steps=1", "train.steps=9", "serve.engine={a: [1]}", "data.path=/a=b", "model.tie_embeddings=false"]
    loaded = recipe_file.load(str(folder / "base.yaml"), changes)
    assert (loaded.train.steps, loaded.serve.engine, loaded.data.path) == (9, {"a": [1]}, Path("/a=b"))
    assert loaded.model.tie_embeddings is False
    changed = recipe_file.change(loaded, ["train.steps=10"])
    assert (changed.train.steps, loaded.train.steps, changed.data.path) == (10, 9, Path("/a=b"))


@pytest.mark.parametrize("override", ["=3", "train.steps", ""])
def test_an_override_has_a_key_and_a_value(folder: Path, override: str) -> None:
    with pytest.raises(RecipeError, match="is not an override"):
        recipe_file.load(str(folder / "base.yaml"), [override])


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("train.stepz", "The nearest valid key is 'train.steps'."),
        ("rope_theta", "The nearest valid key is 'model.rope_theta'."),
        ("zero", "The nearest valid key is 'parallel.zero'."),
        ("train.lr.offload", "The nearest valid key is 'parallel.offload'."),
        ("serve.prefill.replica", "The nearest valid key is 'serve.prefill.replicas'."),
        ("training", "The nearest valid key is 'train'."),
        ("zzzzzzzzzzzz", "Valid sections: model, data, train, parallel, serve, deploy."),
    ],
)
def test_unknown_keys_suggest_a_valid_one(folder: Path, key: str, fix: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipe_file.load(str(folder / "base.yaml"), [f"{key}=1"])
    assert error.value.fix == fix


def test_errors_name_the_key_the_value_and_the_source(folder: Path) -> None:
    path = str(folder / "base.yaml")
    for change, cause in {
        "train.steps=-1": f"train.steps=-1 in recipe {path}: input should be greater than or equal to 0.",
        "train.warmup=200": f"train: warmup=200 must be below steps=100 (recipe {path}).",
        "parallel.workers=3": "train.batch=8 must be a multiple of data-parallel workers x train.micro_batch = 3 "
        f"(recipe {path}).",
        "parallel.workers=8..4": f"parallel.workers: the range 8..4 ends before it begins; write 4..8 (recipe {path}).",
        "parallel.workers=0..4": f"parallel.workers: the range 0..4 must begin at 1 worker or more (recipe {path}).",
        "parallel.workers=5..7": "parallel.workers=5..7 has no layout: train.batch=8 must be a multiple of the data-parallel "
        f"workers (7, 6, 5) (recipe {path}).",
        "train.x=1": f"Unknown recipe key 'train.x' in {path}.",
    }.items():
        with pytest.raises(RecipeError) as error:
            recipe_file.load(path, [change])
        assert error.value.cause == cause


def test_names_without_a_slash_or_suffix_are_built_in_recipes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert recipe_file.load("base.yaml").train.batch == 8
    (folder / "sub" / "plain").write_text((folder / "base.yaml").read_text())
    assert recipe_file.load("sub/plain").train.batch == 8
    with pytest.raises(RecipeError, match="No recipe 'base'"):
        recipe_file.load("base")
    with pytest.raises(RecipeError) as error:
        recipe_file.load("z" * 5000)
    assert error.value.cause == f"No recipe '{'z' * 200}'."
    assert error.value.fix.startswith("Pass the path of a YAML file, or one of: ")
    assert recipe_file.names() == sorted(recipe_file.names()) and "laptop" in recipe_file.names()


def test_empty_files_lack_their_sections(folder: Path) -> None:
    (folder / "empty.yaml").write_text("")
    with pytest.raises(RecipeError, match="lacks 'model'"):
        recipe_file.load(str(folder / "empty.yaml"))


def test_a_file_that_extends_itself(folder: Path) -> None:
    (folder / "self.yaml").write_text("extends: ./self.yaml\n")
    with pytest.raises(RecipeError, match=r"in a circle: self\.yaml -> self\.yaml"):
        recipe_file.load(str(folder / "self.yaml"))


# Errors


def test_an_error_has_a_cause_and_a_fix() -> None:
    error = UserError("It broke.", "Mend it.")
    assert (str(error), error.cause, error.fix) == ("It broke.\nMend it.", "It broke.", "Mend it.")


@pytest.mark.parametrize(
    ("value", "expected"), [("a" * 40, "a" * 40), ("a" * 41, "a" * 40 + "..."), (" a\n b ", "a b"), (12, "12")]
)
def test_values_in_errors_are_short(value: object, expected: str) -> None:
    assert shown(value) == expected
    assert shown("abcd", 3) == "abc..." and shown("abc", 3) == "abc"
