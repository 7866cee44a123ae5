"""Draft model of an endpoint: its folder, and checks before engines start.

vLLM verifies drafts by token id. A draft with another vocabulary would propose ids of other words, and one with a larger
vocabulary ids that the target's embedding does not have.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.model_families import source
from strata.platform.recipe import ServeSection
from strata.serving.models import head_size_check, hybrid_check, model_dir, quantization_check
from strata.serving.speculation import dense

KEY = "serve.speculative.draft"
# vLLM 0.29 takes a draft for another kind of model if its path has one of these words, whatever method is set.
MISTAKEN = ("eagle-", "eagle3", "dflash", "dspark")
# Parts of the class names of models that are no language models of their own.
HEADS = ("eagle", "medusa", "mtp", "speculator", "dflash", "dspark")
OTHER_VOCABULARY = "Use a draft with the tokenizer of the served model, such as a smaller run on the same data."


def folder(given: str) -> Path:
    """Folder of a draft: a run's export, a folder, or the copy of a remote model. Raises UserError."""
    path = Path(given).expanduser()
    if path.is_absolute():
        return path
    if path.is_dir():
        return path.resolve()
    if source.is_remote(given):
        return source.snapshot(given).resolve()
    if not source.RUN.fullmatch(given):
        raise UserError(f"{KEY}={given}: there is no such folder.", "Give a run's name or a model folder.")
    run = runs.find(given)
    if not (run.export / "config.json").is_file():
        raise UserError(f"{KEY}={given}: the run has no export.", f"Write one: strata export {given}")
    return run.export.resolve()


def resolved(serve: ServeSection) -> ServeSection:
    """The section with the draft's absolute folder, which processes with another working directory find, too."""
    if serve.speculative is None or serve.speculative.draft is None:
        return serve
    place = serve.speculative.model_copy(update={"draft": str(folder(serve.speculative.draft))})
    return serve.model_copy(update={"speculative": place})


def on_cpu(serve: ServeSection, found: Path) -> bool:
    """True for a draft in `found` that Strata's own drafter runs."""
    return serve.device == "cpu" and dense.section_of(found) is not None


def check(serve: ServeSection, target: Path) -> None:
    """Raises UserError for a draft that cannot speculate for the model in `target`."""
    if serve.speculative is None or serve.speculative.draft is None:
        return
    found = folder(serve.speculative.draft)
    model_dir.check(found)
    quantization_check.check_folder(serve, found)
    if serve.device == "cpu" and not on_cpu(serve, found):
        head_size_check.check_folder(found)
    config, own = _config(target), _config(found)
    _check_kind(found, own)
    if config.get("vision_config") or config.get("audio_config"):
        raise UserError(f"{target} reads images or audio, which a draft does not see.", "Set serve.speculative.method=ngram.")
    _check_vocabulary(target, found, config, own)
    _check_capacity(serve, found, serve.speculative.tokens)
    if serve.prefill.replicas > 0 and not on_cpu(serve, found):
        hybrid_check.check_config(own)
        _check_same_cache(config, own)


def weights_gib(serve: ServeSection) -> float:
    """Weights of the draft, which every engine of the pools holds."""
    given = serve.speculative.draft if serve.speculative is not None else None
    return model_dir.weights_gib(folder(given)) if given is not None else 0.0


def _check_kind(found: Path, own: Mapping[str, Any]) -> None:
    names = [str(name) for name in own.get("architectures", ())]
    if head := next((name for name in names if any(part in name.lower() for part in HEADS)), None):
        cause = f"{KEY}: {found} has a {head}, which drafts from the hidden states of its target, not a language model."
        raise UserError(cause, "Use a smaller language model, such as a run.")
    if word := next((word for word in MISTAKEN if word in str(found).lower()), None):
        cause = f"{KEY}: vLLM takes a folder with '{word}' in its path for another kind of model: {found}."
        raise UserError(cause, "Rename the folder.")


def _check_vocabulary(target: Path, found: Path, config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    sizes = _text(config).get("vocab_size"), _text(own).get("vocab_size")
    if sizes[0] != sizes[1]:
        cause = f"{KEY}: {found} has a vocabulary of {sizes[1]} tokens, and the served model one of {sizes[0]}."
        raise UserError(cause, OTHER_VOCABULARY)
    if _vocabulary(target) != _vocabulary(found):
        raise UserError(f"{KEY}: the tokenizers of {found} and {target} have different tokens.", OTHER_VOCABULARY)


def _check_capacity(serve: ServeSection, found: Path, tokens: int) -> None:
    """Refuses a draft with which Strata's own drafter would draft nothing."""
    section = dense.section_of(found) if serve.device == "cpu" else None
    if section is None:
        return
    capacity, least = dense.capacity(section, serve.max_sequences), dense.least_capacity(tokens)
    if capacity < least:
        cause = (
            f"{KEY}: the draft's KV cache holds {capacity} tokens of each of {serve.max_sequences} sequences, and drafts of "
            f"{tokens} tokens need {least}."
        )
        raise UserError(cause, "Lower serve.max_sequences or serve.speculative.tokens, or use a smaller draft.")


def _vocabulary(model: Path) -> object:
    """Tokens with their ids; the file itself where it is not of the `tokenizers` library."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return next((path.read_bytes() for name in ("tokenizer.model", "vocab.json") if (path := model / name).is_file()), None)
    try:
        tree = json.loads(file.read_bytes())
        words = tree["model"]["vocab"]
        listed = words.items() if isinstance(words, dict) else ((word[0], number) for number, word in enumerate(words))
        return dict(listed) | {added["content"]: added["id"] for added in tree.get("added_tokens") or ()}
    except (ValueError, KeyError, TypeError, IndexError):
        raise UserError(f"{file} is no tokenizer of the 'tokenizers' library.", "Export or copy it again.") from None


def _check_same_cache(config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """With two kinds of KV cache, vLLM has two cache groups: the case that `hybrid_check` refuses."""
    windows = _window(config), _window(own)
    if windows[0] != windows[1]:
        raise UserError(
            f"{KEY}: the draft's attention window is {windows[1]} tokens, and the served model's {windows[0]} (None: no window). "
            "With a prefill pool, a prompt can get the answer of another (vllm-project/vllm 52234).",
            "Use a draft with the same window, or set serve.prefill.replicas=0.",
        )


def _window(config: Mapping[str, Any]) -> int | None:
    text = _text(config)
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    return int(window) if window else None


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or config


def _config(model: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((model / "config.json").read_text())
    return tree
