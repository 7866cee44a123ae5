"""Downloads of models from Hugging Face, with errors that name the fix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError, shown

# Files that decide the configuration, the tokenizer and the generation of a model. All of them are small.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "added_tokens.json",
)
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def config(model: str) -> Path:
    return _download(model, lambda hub: hub.hf_hub_download(model, "config.json"))


def snapshot(model: str, folder: Path | None = None) -> Path:
    """Downloads the model's files into a folder, or into Hugging Face's cache."""
    options: dict[str, Any] = {"allow_patterns": [*SMALL_FILES, *WEIGHTS], "ignore_patterns": ["*/*"]}
    if folder is not None:
        options["local_dir"] = folder
    return _download(model, lambda hub: hub.snapshot_download(model, **options))


def _download(model: str, call: Callable[[Any], str]) -> Path:
    import huggingface_hub
    from httpx import HTTPError
    from huggingface_hub import errors

    try:
        return Path(call(huggingface_hub))
    except errors.GatedRepoError:
        fix = f"Accept its terms on https://huggingface.co/{model}, and log in: hf auth login"
        raise UserError(f"Hugging Face's model {model} needs your consent to its terms.", fix) from None
    except errors.RepositoryNotFoundError:
        fix = "Correct the path or the id; a private model needs a login: hf auth login"
        raise UserError(f"There is no folder {model} here, and no such model on Hugging Face.", fix) from None
    except errors.RemoteEntryNotFoundError:
        raise UserError(f"Hugging Face's model {model} has no config.json.", "Use another model.") from None
    except (OSError, HTTPError, errors.HFValidationError) as error:  # among them all of the library's network errors
        cause = f"There is no folder {model} here, and Hugging Face's model of that id cannot be downloaded: {shown(error, 200)}"
        elsewhere = f"hf download {model} --local-dir FOLDER"
        fix = f"Connect this machine, or download the model on another ({elsewhere}) and set model.from=FOLDER."
        raise UserError(cause, fix) from None
