"""A checkpoint to a Hugging Face folder that `transformers` and vLLM load as they would any Llama."""

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection
from strata.platform.runs import Run
from strata.training import checkpoint, tokenizer

TOKENIZER = "tokenizer"  # a run keeps its own copy: the cache may be emptied


def export_run(run: Run, to: Path | None, say: Callable[[str], None]) -> Path:
    """From the newest good checkpoint. The folder appears whole: it is built beside its place and renamed."""
    found = checkpoint.newest(run.checkpoints, say)
    if found is None:
        cause = f"Run '{run.name}' has no checkpoint yet: there is nothing to export."
        raise UserError(cause, f"Go on with it: strata train --resume {run.name}.")
    if to is not None and to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists and is not an empty folder.", "Choose another one with --to.")
    target = (to or run.export).resolve()
    recipe = run.recipe()
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        dtype = torch.float32 if recipe.train.precision == "fp32" else torch.bfloat16
        write_folder(building, _weights(found), recipe.model, dtype)
        tokenizer.save(tokenizer.load(run.path / TOKENIZER), building, recipe.model.context)
        building.chmod(0o755)
        if target.exists():
            target.rename(building / "replaced")
        building.rename(target)
        shutil.rmtree(target / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def write_folder(folder: Path, weights: dict[str, Tensor], model: ModelSection, dtype: torch.dtype) -> None:
    shared = {"lm_head.weight"} if model.tie_embeddings else set()
    tensors = {name: weight.to(dtype).contiguous() for name, weight in weights.items() if name not in shared}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    end = tokenizer.END_OF_TEXT_ID
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = llama_config(model) | special | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2))


def llama_config(model: ModelSection) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # read by transformers 5
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _weights(source: checkpoint.Checkpoint) -> dict[str, Tensor]:
    """Up to ZeRO-2 every rank has the whole model and rank 0 has saved it; under ZeRO-3 the parts are put together."""
    if source.origin.zero < 3:
        state = torch.load(source.path / checkpoint.ENGINE / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
        module: dict[str, Tensor] = state["module"]
        return module
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        merged: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(source.path), tag=checkpoint.ENGINE)
    return merged
