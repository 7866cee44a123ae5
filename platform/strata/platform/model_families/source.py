"""Sources of a model: a folder, a run, or an id on Hugging Face."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError, shown
from strata.platform.files import home

RUN = re.compile(r"[\w.-]{1,100}")
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
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
MOST_CONFIG = 2**24  # bytes


def local(source: str) -> Path | None:
    """Absolute path of a source that is a folder, or a run with an export; None for an id."""
    try:
        path = Path(source).expanduser()
        if source.strip() and path.is_dir():
            return path.resolve()
    except (OSError, RuntimeError, ValueError):  # such as a name that is too long, an unknown user, or a zero byte
        pass
    if ID.fullmatch(source):
        return None
    run = home() / "runs" / source
    if RUN.fullmatch(source) and run.is_dir():
        if (run / "export" / "config.json").is_file():
            return (run / "export").resolve()
        raise UserError(f"model.from={source} is a run without an export.", f"Write it: strata export {source}")
    fix = "Give a model's folder, a run's name, or an id on Hugging Face."
    raise UserError(f"model.from={shown(source, 200)} is neither a folder nor a run.", fix)


def read_config(source: str) -> dict[str, Any]:
    folder = local(source)
    if folder is None:
        return _parse(_download(source, lambda hub: hub.hf_hub_download(source, "config.json")))
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json.", "Give the folder of a Hugging Face model.")
    return _parse(folder / "config.json")


def snapshot(source: str) -> Path:
    """Folder with the model's files, downloaded into Hugging Face's cache if the source is an id."""
    folder = local(source)
    if folder is not None:
        return folder
    patterns = [*SMALL_FILES, *WEIGHTS]
    return _download(source, lambda hub: hub.snapshot_download(source, allow_patterns=patterns, ignore_patterns=["*/*"]))


def _download(source: str, call: Callable[[Any], str]) -> Path:
    import huggingface_hub
    from httpx import HTTPError
    from huggingface_hub import errors

    try:
        return Path(call(huggingface_hub))
    except errors.GatedRepoError:
        fix = f"Accept its terms on https://huggingface.co/{source}, and log in: hf auth login"
        raise UserError(f"Hugging Face's model {source} needs your consent to its terms.", fix) from None
    except errors.RepositoryNotFoundError:
        fix = "Correct the path or the id; a private model needs a login: hf auth login"
        raise UserError(f"There is no folder {source} here, and no such model on Hugging Face.", fix) from None
    except errors.RemoteEntryNotFoundError:
        raise UserError(f"Hugging Face's model {source} has no config.json.", "Use another model.") from None
    except (OSError, HTTPError, errors.HFValidationError) as error:  # among them all of the library's network errors
        cause = f"There is no folder {source} here, and Hugging Face's model of that id cannot be downloaded: {shown(error, 200)}"
        elsewhere = f"hf download {source} --local-dir FOLDER"
        fix = f"Connect this machine, or download the model on another ({elsewhere}) and set model.from=FOLDER."
        raise UserError(cause, fix) from None


def _parse(path: Path) -> dict[str, Any]:
    fix = "Restore the file, or use another model."
    try:
        if path.stat().st_size > MOST_CONFIG:
            raise UserError(f"{path} is too large for a model's configuration.", fix)
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not valid JSON: {shown(error, 120)}.", fix) from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not a model's configuration.", fix)
    return values
