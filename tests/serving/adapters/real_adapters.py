"""A tiny base model, adapters on it in peft's format, and the log probabilities of the merged weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata.platform import recipe_file
from strata.platform.recipe import LoraSection, ModelSection
from strata.training.checkpoint import adapter
from strata.training.checkpoint.export import write_folder
from strata.training.data import tokenizer
from strata.training.model.llama import Llama

CONTEXT = 256


@dataclass(frozen=True)
class Base:
    folder: Path
    section: ModelSection
    weights: dict[str, torch.Tensor]


def base(folder: Path, seed: int = 1) -> Base:
    section = recipe_file.load("laptop", [f"model.context={CONTEXT}"]).model
    model, noise = Llama(section), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # so that no two logits are within rounding
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    folder.mkdir(parents=True)
    tokenizer.save(tokenizer.train(["a few words of a text"] * 3, 400), folder, section.context)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    write_folder(folder, weights, section, torch.float32)
    return Base(folder, section, weights)


def write(on: Base, folder: Path, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """Writes a random adapter. Returns the merged weights."""
    lora = LoraSection(rank=rank, alpha=2 * rank)
    imported = recipe_file.load("laptop", [f"model.from={on.folder}", f"model.context={CONTEXT}"]).model
    names = adapter.adapted(imported, lora)
    noise = torch.Generator().manual_seed(seed)
    parts: dict[str, Any] = {}
    for name in names:
        outputs, inputs = on.weights[name].shape
        path = name.removesuffix(".weight")
        parts[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=noise) * 0.1
        parts[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=noise) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    adapter.write(folder, parts.__getitem__, imported, lora)
    merged = adapter.merging((on.weights | parts).__getitem__, names, lora)
    return {name: merged(name) for name in on.weights}


def greedy(
    on: Base, weights: dict[str, torch.Tensor], folder: Path, prompt: list[int], new: int
) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities, by transformers on the merged weights."""
    from transformers import AutoModelForCausalLM

    if not folder.exists():
        folder.mkdir(parents=True)
        write_folder(folder, weights, on.section, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None)
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    answer = tokens[0, len(prompt) :].tolist()
    return answer, [float(logits[place, token]) for place, token in enumerate(answer)]
