"""Prompts to conditions: text encoders, or class labels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from strata.platform.errors import UserError, shown
from strata.serving.diffusion.families import Condition, Family

Encoder = Callable[[Sequence[str]], Condition]


def encoder_of(family: Family, parts: dict[str, Any], device: str) -> Encoder:
    """The encoder for a model's components. `whole` is the pipeline of diffusers, whose own encoding of prompts is used."""
    whole = parts.get("whole")
    if family.name == "dit":
        return _labels(getattr(whole, "labels", None) or {}, parts["transformer"].config.num_embeds_ada_norm, device)
    if whole is None:
        return _one_text_encoder(parts["tokenizer"], parts["text_encoder"], device)
    return {"sd3": _sd3, "flux": _flux, "pixart": _pixart}[family.name](whole, device)


def _one_text_encoder(tokenizer: Any, model: Any, device: str) -> Encoder:
    """Strata's own models: the last hidden states and the pooled output of one encoder."""
    length = min(tokenizer.model_max_length, model.config.max_position_embeddings)

    def encode(prompts: Sequence[str]) -> Condition:
        tokens = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        out = model(input_ids=tokens.input_ids.to(device))
        return Condition(text=out.last_hidden_state, pooled=out.pooler_output)

    return encode


def _sd3(whole: Any, device: str) -> Encoder:
    def encode(prompts: Sequence[str]) -> Condition:
        p = list(prompts)
        text, _, pooled, _ = whole.encode_prompt(p, p, p, device=device, do_classifier_free_guidance=False)
        return Condition(text=text, pooled=pooled)

    return encode


def _flux(whole: Any, device: str) -> Encoder:
    def encode(prompts: Sequence[str]) -> Condition:
        text, pooled, _ = whole.encode_prompt(list(prompts), device=device)
        return Condition(text=text, pooled=pooled)

    return encode


def _pixart(whole: Any, device: str) -> Encoder:
    def encode(prompts: Sequence[str]) -> Condition:
        text, mask, _, _ = whole.encode_prompt(list(prompts), do_classifier_free_guidance=False, device=device)
        return Condition(text=text, mask=mask)

    return encode


def _labels(names: dict[str, int], classes: int, device: str) -> Encoder:
    """Class-conditional models: a prompt is a class's name or its number."""

    def label(prompt: str) -> int:
        text = prompt.strip()
        found = names.get(text, int(text) if text.isascii() and text.isdecimal() else -1)
        if not 0 <= found < classes:
            raise UserError(
                f"{shown(prompt)} is no class of this model.", f"Use a class's name or a number from 0 to {classes - 1}."
            )
        return found

    def encode(prompts: Sequence[str]) -> Condition:
        return Condition(labels=torch.tensor([label(p) for p in prompts], device=device))

    return encode
