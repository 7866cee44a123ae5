"""Export of a run with adapters: merged into the weights on disk, also where training held them in four bits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import ROWS

from strata.platform import recipe_file, runs
from strata.training.checkpoint import adapter, format, pretrained
from strata.training.checkpoint.export import ADAPTER, export_run
from strata.training.parallel.optimizer_state import Fragment
from strata.training.parallel.shard_map import Shard

from ..model.families.folders import save


@pytest.mark.parametrize("lora", ["rank: 3", "rank: 3, dora: true", "rank: 3, base: nf4", "rank: 3, base: nf4, dora: true"])
def test_adapters_are_merged_into_the_weights_on_disk(lora: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path / "home"))
    source = save(ROWS["qwen3"], tmp_path / "model", dtype=torch.bfloat16)
    recipe = recipe_file.load("laptop", ["model.context=32", f"model.from={source}", f"train.lora={{{lora}, targets: [q_proj]}}"])
    run = runs.create("adapted", recipe, "adapted")
    pretrained.prepare(recipe.model, run.path / pretrained.BASE)
    section = recipe.train.lora
    assert section
    original, own = load_file(source / "model.safetensors"), {}
    for name in adapter.adapted(recipe.model, section):
        path, (outputs, inputs) = name.removesuffix(".weight"), original[name].shape
        own |= {f"{path}.lora_A.weight": torch.randn(3, inputs), f"{path}.lora_B.weight": torch.randn(outputs, 3)}
        own |= {f"{path}.lora_magnitude_vector": torch.rand(outputs)} if section.dora else {}
    parts = [Fragment(Shard(name, tuple(w.shape), None, 0), "weight", 0, w.reshape(-1)) for name, w in own.items()]
    origin = format.Origin(recipe.model.model_dump(mode="json"), "tokens", recipe.train.batch, recipe.train.seed, run.id() or "")
    format.write(format.location(run, recipe.train) / format.folder_name(3), 0, 1, 3, origin, None, parts)

    exported = export_run(run, None, print)

    merged = load_file(exported / "model.safetensors")
    assert merged.keys() == original.keys()
    for name, weight in merged.items():
        expected = original[name].float()
        if f"{name.removesuffix('.weight')}.lora_A.weight" in own:
            path = name.removesuffix(".weight")
            expected += 32 / 3 * own[f"{path}.lora_B.weight"] @ own[f"{path}.lora_A.weight"]
            if section.dora:
                expected *= (own[f"{path}.lora_magnitude_vector"] / expected.norm(dim=1)).unsqueeze(1)
        torch.testing.assert_close(weight, expected.bfloat16())
    tensors = load_file(exported / ADAPTER / adapter.WEIGHTS)
    assert {name.removeprefix(adapter.PREFIX) for name in tensors} == own.keys()
    kind = ("Q" if section.base == "nf4" else "") + ("DoRA" if section.dora else "LoRA")
    assert f"({kind})" in (exported / "README.md").read_text()
