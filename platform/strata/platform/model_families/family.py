"""Model family: which configurations it reads, and where its tensors hold Strata's parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.parameters import shapes
from strata.platform.recipe import ModelSection

Tree = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Location:
    """Part of a Hugging Face tensor that is one parameter: `tensor[index]`, transposed if the layout is the other way around."""

    tensor: str
    shape: Shape  # of the whole tensor
    index: tuple[int | slice, ...] = ()
    transposed: bool = False


def same_name(name: str, shape: Shape, section: ModelSection) -> Location:
    return Location(name, shape)


@dataclass(frozen=True)
class Family:
    """Models with the same configuration class in transformers.

    `defaults` are the values of keys that a config.json may leave out. `section` returns the tree of a `ModelSection` without
    `from`, `family` and `context`, or raises a UserError for a configuration that Strata's model cannot compute.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    section: Callable[[Config], Tree]
    locate: Callable[[str, Shape, ModelSection], Location] = same_name
    refused: Mapping[str, str] = field(default_factory=dict)  # related architectures, with a way out for their users

    def tensors(self, section: ModelSection) -> dict[str, Location]:
        """Location of each parameter of the whole model."""
        return {name: self.locate(name, shape, section) for name, shape in shapes(section).items()}
