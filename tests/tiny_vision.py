"""A tiny Idefics 3 with random weights, and its greedy answers by transformers.

Of the vision models that vLLM runs on CPUs, it is one that needs no torchvision, which has no CPU build on PyPI.
"""

import base64
import io
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image

SPECIAL = ["<s>", "</s>", "<pad>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SPECIAL += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]  # an image is seen whole and in four tiles
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant: "
)
SIDE = 32  # pixels of a tile
VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}


def _tokenizer() -> tuple[Any, dict[str, int]]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL])}
    words = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    words.add_special_tokens(SPECIAL)
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    marks = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens=marks, **ends), vocabulary


class Reference:
    """The model in transformers, written to a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        words, vocabulary = _tokenizer()
        tiles = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
        self._processor = Idefics3Processor(tiles, words, image_seq_len=4, chat_template=TEMPLATE)
        ends = {"bos_token_id": vocabulary["<s>"], "eos_token_id": vocabulary["</s>"], "pad_token_id": vocabulary["<pad>"]}
        config = Idefics3Config(
            image_token_id=vocabulary["<image>"],
            scale_factor=2,
            pad_token_id=vocabulary["<pad>"],
            vision_config=VISION | {"image_size": SIDE, "patch_size": 8},
            text_config=TEXT | ends,
        )
        torch.manual_seed(1)
        self._model = Idefics3ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        self._model.save_pretrained(folder)
        self._processor.save_pretrained(folder)

    def tokens(self, text: str, images: list[Image.Image], count: int) -> list[int]:
        """Greedy answer to a message of images and then text."""
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        prompt = self._processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = self._processor(text=prompt, images=images or None, return_tensors="pt")
        output = self._model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)
        found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return found


def image(seed: int, width: int = 48, height: int = 40) -> Image.Image:
    draw = random.Random(seed)
    return Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))


def data_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def message(text: str, *urls: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}
