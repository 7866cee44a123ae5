"""Every layout of a picture model trains like one process of plain torch, resumes exactly, and averages its weights alike."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.platform import recipe_file
from strata.platform.recipe import Recipe
from strata.training.checkpoint import format, resharding
from strata.training.checkpoint.storage import folder
from strata.training.data.pictures import draws, prepare
from strata.training.diffusion.model import PictureModel
from strata.training.loop import Job
from strata.training.parallel.optimizer_state import AVERAGE

from ..parallel.ranks import train

pytestmark = pytest.mark.slow

STEPS, MORE = 8, 2
SMALL = (
    *("model.layers=2", "model.hidden=32", "model.heads=4", "model.picture.size=16", "model.picture.text_hidden=32"),
    *("train.steps=40", "train.time_budget_s=3600", "train.batch=8", "train.micro_batch=2", "train.warmup=1", "train.lr=1e-2"),
    *("train.weight_decay=0.1", "train.embedding_lr_ratio=2", "train.eval_sequences=5", "train.flow.average=0.5"),
)
LAYOUTS = {
    "ZeRO-0": "workers=2 zero=0",
    "ZeRO-1": "workers=2 zero=1",
    "ZeRO-2, offloaded optimizer": "workers=2 zero=2 offload=optimizer",
    "ZeRO-3": "workers=2 zero=3",
    "ZeRO-3, offloaded parameters": "workers=2 zero=3 offload=all",
    "tensor": "workers=2 tensor=2 zero=0",
    "data x tensor, ZeRO-3": "workers=4 tensor=2 zero=3",
    "tensor, recompute some": "workers=2 tensor=2 zero=1 train.recompute=selective",
    "sequence": "workers=2 sequence=2 zero=0",
    "data x sequence, ZeRO-3": "workers=4 sequence=2 zero=3",
    "ZeRO-1, recompute all": "workers=2 zero=1 train.recompute=full",
}
ALWAYS = ("sequence",)


def recipe(layout: str) -> Recipe:
    overrides = [key if "." in key else f"parallel.{key}" for key in layout.split()]
    return recipe_file.load("pictures", [*SMALL, *overrides])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_HOME", str(tmp_path_factory.mktemp("home")))
        chosen = recipe("workers=1")
        return prepare.prepare(chosen.data, chosen.model)


class Plain:
    """The same run in plain torch: whole batches, one process, no DeepSpeed."""

    def __init__(self, prepared: Path) -> None:
        chosen = recipe("workers=1")
        train, flow = chosen.train, chosen.train.flow
        assert flow
        data = draws.training_data(prepared, chosen.model, train)
        model = PictureModel(chosen.model, train.seed)
        named = dict(model.named_parameters())
        tables = {name for name in named if name.endswith("_embedding.weight")}
        groups = [
            {"params": [named[name] for name in tables], "weight_decay": 0.0, "ratio": train.embedding_lr_ratio},
            {"params": [p for name, p in named.items() if name not in tables and p.ndim > 1], "weight_decay": 0.1, "ratio": 1.0},
            {"params": [p for name, p in named.items() if p.ndim == 1], "weight_decay": 0.0, "ratio": 1.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(0.9, 0.95))
        self.average = {name: weight.detach().clone() for name, weight in named.items()}
        self.losses = []
        for step in range(STEPS + MORE):
            rate = train.lr / 2 if step == 0 else train.lr  # one step of warm-up, then constant for half of the steps
            for group in optimizer.param_groups:
                group["lr"] = rate * group["ratio"]
            loss = self._loss(model, data.train, range(step * train.batch, (step + 1) * train.batch))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            self.losses.append(loss.item())
            decay = min(flow.average, (1 + step) / (10 + step))
            if step < STEPS:
                for name, weight in named.items():
                    self.average[name] = decay * self.average[name] + (1 - decay) * weight.detach()
            if step == STEPS - 1:
                with torch.no_grad():
                    self.val_loss = self._loss(model, data.validation, data.validation.evenly(train.eval_sequences)).item()

    @staticmethod
    def _loss(model: PictureModel, rows: object, numbers: object) -> Tensor:
        assert isinstance(rows, draws.Draws)
        read = rows.read(torch.tensor(list(numbers)).numpy())  # type: ignore[call-overload]
        assert read.pictures
        inputs = (torch.from_numpy(array) for array in (read.pictures.pixels, read.pictures.noise, read.pictures.times))
        count = len(read.tokens)
        loss: Tensor = model(*inputs, torch.from_numpy(read.tokens), torch.ones(count), torch.tensor(16.0 * count))
        return loss


@pytest.fixture(scope="module")
def plain(prepared: Path) -> Plain:
    return Plain(prepared)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of the checkpoints, and the newest one, which another layout has written."""
    return {"all": tmp_path_factory.mktemp("layouts")}


@pytest.mark.parametrize("name", [each if each in ALWAYS else pytest.param(each, marks=pytest.mark.rotation) for each in LAYOUTS])
def test_a_layout_trains_like_plain_torch(name: str, plain: Plain, prepared: Path, saved: dict[str, Path]) -> None:
    chosen = recipe(LAYOUTS[name])
    job = Job(saved["all"] / "run", prepared, chosen.model, chosen.train, chosen.parallel)
    own = saved["all"] / name
    other = saved.get("newest")
    found = train(job, STEPS, MORE, other or own / "start", own)
    assert found.losses == pytest.approx(plain.losses, abs=1e-4)
    assert found.val_loss == pytest.approx(plain.val_loss, abs=1e-4)
    assert found.from_own == found.losses[STEPS:], "a resumed run repeats the uninterrupted one"
    if other:
        assert found.from_other == pytest.approx(plain.losses[STEPS:], abs=1e-4), "the checkpoint of another layout"
    reader = resharding.Reader(format.examine(folder(own / "end")))
    assert set(reader.names()) == set(plain.average)
    for key, expected in plain.average.items():
        assert torch.allclose(reader.whole(key, AVERAGE), expected, atol=2e-3), key
    saved["newest"] = own / "end"
