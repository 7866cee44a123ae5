"""Model folder, evaluated in this process with transformers."""

from pathlib import Path

import torch
from lm_eval.models.huggingface import HFLM

from strata.platform.errors import UserError, shown
from strata.training.evaluation.checked_requests import CheckedRequests
from strata.training.evaluation.progress import RequestProgress


class LocalModel(CheckedRequests, HFLM):  # type: ignore[misc]
    """The harness's transformers model."""


def open_folder(folder: Path, device: str | None, batch: int, truncate: bool, progress: RequestProgress) -> LocalModel:
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.device(chosen).type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device {chosen} needs a GPU, and there is none.", "Leave --device out.")
    except RuntimeError:
        raise UserError(f"There is no device '{shown(chosen)}'.", "Use --device cpu, cuda or cuda:0.") from None
    try:
        model = LocalModel(pretrained=str(folder.resolve()), device=chosen, batch_size=batch)
    except Exception as error:  # transformers and safetensors raise many kinds for a damaged folder
        cause = f"The model in {shown(folder, 200)} cannot be loaded: {shown(f'{type(error).__name__}: {error}', 200)}"
        raise UserError(cause, "Export it again, or name another folder.") from error
    model.watch(model.max_length, model.max_length + 1, batch, truncate, progress)
    return model
