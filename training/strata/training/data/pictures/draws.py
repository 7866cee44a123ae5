"""Draws of a picture run: a picture with its caption, its noise and its timestep, each a function of seed and number.

The draws of a step are numbered by step and place in the global batch. So they are the same in every layout and in a resumed
run. Validation has draws of its own, the same ones at every evaluation.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.platform.recipe import ModelSection, TrainSection
from strata.training.data.pictures import captions, prepare, scenes
from strata.training.data.pictures.rendering import Pixels, from_bytes, render
from strata.training.data.rows import DrawnPictures, RowBatch, TrainingData
from strata.training.data.sampler import Indices, shuffled
from strata.training.data.shards import Split

GENERATED_VALIDATION = 4096  # validation draws of generated pictures
DRAW = 2  # stream of random numbers: 0 and 1 are those of scenes


@dataclass(frozen=True)
class Example:
    pixels: Pixels  # [3, size, size] from -1 to 1
    caption: str


class Generated:
    """Generated pictures, as many as are asked for."""

    def __init__(self, split: Split, holdout: float, size: int, seed: int) -> None:
        self._split, self._holdout, self._size, self._seed = split, holdout, size, seed

    def example(self, draw: int) -> Example:
        scene = scenes.scene(self._split, self._holdout, self._seed, draw)
        return Example(render(scene, self._size), scene.caption)


class Stored:
    """Pictures of a user's folder. Training draws each once per epoch, in an order of its own."""

    def __init__(self, prepared: Path, split: Split, seed: int) -> None:
        self._pictures = np.load(prepare.pictures_path(prepared, split), mmap_mode="r")
        self._captions = prepare.read_captions(prepared, split)
        self._shuffles, self._seed = split == "train", seed

    def __len__(self) -> int:
        return len(self._captions)

    def example(self, draw: int) -> Example:
        epoch, row = divmod(draw, len(self))
        if self._shuffles:
            row = int(shuffled(np.array([row]), len(self), self._seed, epoch)[0])
        return Example(from_bytes(self._pictures[row]), self._captions[row])


class Draws:
    """Draws of a split as rows of a training run."""

    def __init__(self, prepared: Path, split: Split, model: ModelSection, train: TrainSection) -> None:
        assert model.picture and train.flow
        meta = prepare.read_meta(prepared)
        self._model, self._flow, self._size, self._patches = model, train.flow, model.picture.size, model.picture.patches
        # Validation does not depend on the seed, so that runs can be compared.
        self._split, self._seed = split, train.seed if split == "train" else 0
        self._source: Generated | Stored
        if meta.generated:
            self._source = Generated(split, meta.holdout, self._size, self._seed)
        else:
            self._source = Stored(prepared, split, self._seed)
        self._tokenizer = captions.load(prepared, model.picture.caption_tokens)

    def __len__(self) -> int:
        """Pictures of an epoch; of generated ones, those of an evaluation at most."""
        return GENERATED_VALIDATION if isinstance(self._source, Generated) else len(self._source)

    def example(self, draw: int) -> Example:
        return self._source.example(draw)

    def read(self, indices: Indices) -> RowBatch:
        examples = [self._source.example(int(draw)) for draw in indices]
        noise, times, texts = [], [], []
        for draw, example in zip(indices, examples, strict=True):
            random = np.random.default_rng([self._seed, int(draw), DRAW, self._split == "validation"])
            noise.append(random.standard_normal((3, self._size, self._size), np.float32))
            logit = self._flow.logit_mean + self._flow.logit_std * random.standard_normal()
            times.append(1 / (1 + np.exp(-logit)))
            dropped = self._split == "train" and random.random() < self._flow.caption_dropout
            texts.append("" if dropped else example.caption)
        pictures = DrawnPictures(
            np.stack([example.pixels for example in examples]), np.stack(noise), np.asarray(times, np.float32)
        )
        return RowBatch(captions.encode(self._tokenizer, texts), np.zeros((len(indices), 1), np.int64), None, pictures=pictures)

    def loss_tokens(self, indices: Indices) -> Indices:
        return np.full(len(indices), self._patches, dtype=np.int64)

    def places(self, index: int) -> list[str]:
        return [f"draw {index:,}, {self._source.example(index).caption!r}"]

    def evenly(self, count: int) -> Indices:
        return np.unique(np.linspace(0, len(self) - 1, min(count, len(self)), dtype=np.int64))


def training_data(prepared: Path, model: ModelSection, train: TrainSection) -> TrainingData:
    def order(step: int, batch: int, rank: int, world: int, seed: int) -> Indices:
        per_rank = batch // world
        return step * batch + rank * per_rank + np.arange(per_rank, dtype=np.int64)

    return TrainingData(Draws(prepared, "train", model, train), Draws(prepared, "validation", model, train), order)
