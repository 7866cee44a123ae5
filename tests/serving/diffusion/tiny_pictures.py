"""Folders of randomly initialized picture models, small and in diffusers' layout, one per family."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "red", "green", "blue", "small", "large", "circle", "square", "on", "two"]


def save(family: str, folder: Path) -> Path:
    """Save the tiny model of a family: own, sd3, flux, pixart or dit."""
    torch.manual_seed(0)
    MAKERS[family](folder)
    return folder


def _own(folder: Path) -> None:
    """Strata's own: SD3's transformer on pixels, one text encoder."""
    transformer = _sd3_transformer(in_channels=3, text=32, pooled=32, patch_size=4, sample_size=32, pos_embed_max_size=16)
    transformer.save_pretrained(folder / "transformer")
    _clip(CLIPTextModel).save_pretrained(folder / "text_encoder")
    _tokenizer(16).save_pretrained(folder / "tokenizer")
    FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "StrataPicturePipeline",
        "_diffusers_version": "0",
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "vae": [None, None],
        "picture": {"size": 32, "channels": 3},
    }
    (folder / "model_index.json").write_text(json.dumps(index))


def _sd3(folder: Path) -> None:
    StableDiffusion3Pipeline(
        transformer=_sd3_transformer(
            in_channels=4, text=64, pooled=64, patch_size=2, sample_size=16, pos_embed_max_size=16,
            dual_attention_layers=(0,), qk_norm="rms_norm",
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(shift=0.1),
        text_encoder=_clip(CLIPTextModelWithProjection),
        tokenizer=_tokenizer(16),
        text_encoder_2=_clip(CLIPTextModelWithProjection),
        tokenizer_2=_tokenizer(16),
        text_encoder_3=_t5(64),
        tokenizer_3=_tokenizer(256),
    ).save_pretrained(folder)  # fmt: skip


def _flux(folder: Path) -> None:
    FluxPipeline(
        transformer=_awake(
            FluxTransformer2DModel(
                in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=4,
                joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(2, 2, 4),
            )
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=_vae(shift=0.1),
        text_encoder=_clip(CLIPTextModel),
        tokenizer=_tokenizer(16),
        text_encoder_2=_t5(32),
        tokenizer_2=_tokenizer(512),
    ).save_pretrained(folder)  # fmt: skip


def _pixart(folder: Path) -> None:
    PixArtAlphaPipeline(
        transformer=_awake(
            PixArtTransformer2DModel(
                in_channels=4, out_channels=8, num_layers=3, attention_head_dim=12, num_attention_heads=4, sample_size=16,
                cross_attention_dim=48, caption_channels=24, use_additional_conditions=True,
            )
        ),
        scheduler=DPMSolverMultistepScheduler(),
        vae=_vae(),
        text_encoder=_t5(24),
        tokenizer=_tokenizer(120),
    ).save_pretrained(folder)  # fmt: skip


def _dit(folder: Path) -> None:
    DiTPipeline(
        transformer=_awake(
            DiTTransformer2DModel(
                in_channels=4, out_channels=8, num_layers=3, attention_head_dim=8, num_attention_heads=4, sample_size=16,
            )
        ),
        scheduler=DDIMScheduler(),
        vae=_vae(),
    ).save_pretrained(folder)  # fmt: skip
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": {"0": "white shark", "1": "hen, biddy"}}))


MAKERS: dict[str, Callable[[Path], None]] = {"own": _own, "sd3": _sd3, "flux": _flux, "pixart": _pixart, "dit": _dit}
FAMILIES = tuple(MAKERS)


def _sd3_transformer(text: int, pooled: int, **config: object) -> SD3Transformer2DModel:
    model = SD3Transformer2DModel(
        num_layers=3, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=text, caption_projection_dim=32,
        pooled_projection_dim=pooled, out_channels=config["in_channels"], **config,
    )  # fmt: skip
    return _awake(model)


def _awake(model: Any) -> Any:
    """Larger random weights, so that attention, text and time change the output; a fresh model is close to linear."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "pos_embed" not in name:
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5)
    return model


def _vae(shift: float | None = None) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 16), down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4, norm_num_groups=4, layers_per_block=1, shift_factor=shift,
    )  # fmt: skip


def _clip(kind: type) -> torch.nn.Module:
    config = CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, projection_dim=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return kind(config)


def _t5(width: int) -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=len(WORDS), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


def _tokenizer(length: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=length, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
