"""Components of a picture model, loaded from a folder in diffusers' layout."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata.platform.errors import UserError
from strata.serving.diffusion import attention
from strata.serving.diffusion.cuda_graphs import CudaGraphs
from strata.serving.diffusion.families import FAMILIES, Condition, Family
from strata.serving.diffusion.joined_layers import join_activations, split_last_products
from strata.serving.diffusion.step_modulations import StepModulations
from strata.serving.diffusion.text import encoder_of

INDEX = "model_index.json"
OWN = "StrataPicturePipeline"
DIFFUSERS = ("StableDiffusion3Pipeline", "FluxPipeline", "PixArtAlphaPipeline", "PixArtSigmaPipeline", "DiTPipeline")


@dataclass(frozen=True)
class Conditions:
    """Inputs of the two passes of classifier-free guidance, one row per picture each."""

    positive: Condition
    negative: Condition


@dataclass
class Pipeline:
    """Components of one process. `encoder` turns prompts into the transformer's conditions."""

    family: Family
    transformer: Any
    scheduler: Any
    vae: Any | None
    encoder: Callable[[Sequence[str]], Condition]
    size: tuple[int, int] | None = None  # (height, width) in pixels where the model's own size is not the transformer's
    seam: attention.Seam = field(default_factory=attention.Seam)
    graphs: CudaGraphs | None = None
    modulations: StepModulations | None = None

    def __post_init__(self) -> None:
        attention.install(self.transformer, self.seam)
        join_activations(self.transformer)
        split_last_products(self.transformer)

    def use_graphs(self) -> None:
        """Replay a step of the transformer as a CUDA graph, and compute the projections of all steps before the first."""
        self.graphs, self.modulations = CudaGraphs(), StepModulations(self.transformer)

    @property
    def vae_factor(self) -> int:
        """Pixels per latent pixel, in each direction."""
        return 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def own_size(self) -> tuple[int, int]:
        """(height, width) of pictures that name none."""
        if self.size is not None:
            return self.size
        latent = getattr(self.transformer.config, "sample_size", None) or 128  # FLUX names none: 1024 pixels
        return latent * self.vae_factor, latent * self.vae_factor

    @property
    def heads(self) -> int:
        return int(self.transformer.config.num_attention_heads)

    @property
    def blocks(self) -> int:
        return len(self.family.blocks(self.transformer))

    @property
    def multiple(self) -> int:
        """Number of which width and height must be multiples: pixels per token."""
        return self.vae_factor * self.family.patch(self.transformer)

    @property
    def largest(self) -> int | None:
        """Most pixels of a side, where the model's position table has an end."""
        table = getattr(self.transformer.config, "pos_embed_max_size", None)
        return None if table is None else table * self.multiple

    def check_size(self, height: int, width: int) -> None:
        sides = {"width": width, "height": height}
        for name, side in sides.items():
            if side < self.multiple or side % self.multiple:
                raise UserError(
                    f"A {name} of {side} pixels is not a positive multiple of {self.multiple}.", f"Use a {name} that is one."
                )
            if self.largest is not None and side > self.largest:
                raise UserError(f"A {name} of {side} pixels exceeds the model's {self.largest}.", f"Use a smaller {name}.")

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return height // self.multiple, width // self.multiple

    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditions:
        null = self.family.null(self.transformer, len(negatives))
        return Conditions(self.encoder(prompts), self.encoder(negatives) if null is None else null)

    def decode_scaled(self, latents: Tensor) -> Tensor:
        """Latents as the autoencoder takes them."""
        assert self.vae is not None
        shift = getattr(self.vae.config, "shift_factor", None) or 0.0
        return latents / self.vae.config.scaling_factor + shift  # type: ignore[no-any-return]


def load_pipeline(
    folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32, compile_blocks: bool = False
) -> Pipeline:
    """Load Strata's own picture models and diffusers' folders of SD3, FLUX, PixArt and DiT. `compile_blocks` compiles one block
    of each kind and reuses it for the others, which takes seconds instead of minutes."""
    index = _index(folder)
    name = index["_class_name"]
    transformer_class = (index.get("transformer") or [None, None])[1]
    if name not in (OWN, *DIFFUSERS) or transformer_class not in FAMILIES:
        raise UserError(
            f"{folder} is a {name} with a {transformer_class or 'no'} transformer, which is not supported.",
            f"Use a folder of {OWN}, {', '.join(DIFFUSERS)}.",
        )
    try:
        parts = _own_parts(folder, index, dtype) if name == OWN else _diffusers_parts(folder, dtype)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as e:
        raise UserError(f"{folder} does not load: {e}", "Export or download the model again.") from e
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            part.to(device).eval().requires_grad_(False)
            # diffusers ignores the dtype where accelerate is not installed; text encoders may have layers that stay in fp32.
            if name in ("transformer", "vae") and part.dtype != dtype:
                part.to(dtype)
    picture = index.get("picture") or {}
    size = (picture["size"], picture["size"]) if "size" in picture else None
    family = FAMILIES[transformer_class]
    vae = parts.get("vae")
    pipeline = Pipeline(family, parts["transformer"], parts["scheduler"], vae, encoder_of(family, parts, device), size)
    if compile_blocks:
        for block in family.blocks(pipeline.transformer):
            block.compile(dynamic=False)
        if torch.device(device).type == "cuda":
            pipeline.use_graphs()
    return pipeline


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} has no {INDEX}.", "Name the folder of a picture model in diffusers' layout.") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is not readable: {e}", "Export or download the model again.") from e
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise UserError(f"{path} names no _class_name.", "Export or download the model again.")
    return index


def _own_parts(folder: Path, index: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The components that the index names as [library, class], each loaded by its own `from_pretrained`."""
    import diffusers
    import transformers

    libraries = {"diffusers": diffusers, "transformers": transformers}
    parts: dict[str, Any] = {}
    for name, entry in index.items():
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] not in libraries:
            continue
        kind = getattr(libraries[entry[0]], entry[1])
        weights = isinstance(kind, type) and issubclass(kind, torch.nn.Module)
        options: dict[str, Any] = {"dtype": dtype} if weights else {}
        if weights and entry[0] == "diffusers":
            options["low_cpu_mem_usage"] = False  # the alternative needs accelerate
        parts[name] = kind.from_pretrained(folder / name, local_files_only=True, **options)
    return parts


def _diffusers_parts(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    from diffusers import DiffusionPipeline

    whole = DiffusionPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True, low_cpu_mem_usage=False)
    return {**whole.components, "whole": whole}
