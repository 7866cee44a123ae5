"""Passes calibration rows through the decoder, one layer after the other, and gathers statistics of the linear layers' inputs.

Only the hidden states between two layers are in memory, and every layer sees the output of the quantized layers before it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strata.training.quantization.layers import decoder_layers


class Statistics:
    """Second moments and magnitudes of a linear layer's input."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.hessian = torch.zeros(inputs, inputs, device=device)  # sum of x x^T
        self.total = torch.zeros(inputs, device=device)  # sum of |x|
        self.largest = torch.zeros(inputs, device=device)  # of |x|
        self.tokens = 0

    def add(self, activations: Tensor) -> None:
        """Adds activations of [..., inputs]."""
        flat = activations.detach().reshape(-1, activations.shape[-1]).float()
        self.hessian.addmm_(flat.T, flat)
        magnitudes = flat.abs()
        self.total += magnitudes.sum(0)
        self.largest = torch.maximum(self.largest, magnitudes.amax(0))
        self.tokens += len(flat)

    @property
    def mean(self) -> Tensor:
        return self.total / self.tokens

    def scaled(self, scales: Tensor) -> "Statistics":
        """Statistics of the same input divided by a scale of each channel."""
        other = Statistics(0, self.hessian.device)
        other.hessian = self.hessian / scales / scales[:, None]
        other.total, other.largest, other.tokens = self.total / scales, self.largest / scales, self.tokens
        return other


class LayerPass:
    """Calibration rows on their way through the decoder. Iteration order: `gather`, then changes of the layer, then `advance`; in
    the end, `after` of the last norm."""

    def __init__(self, model: Any, rows: Tensor) -> None:
        """`rows`: [rows, tokens]. One row at a time, so that masks and positions of the first are those of all."""
        self._layers = decoder_layers(model)
        self._arguments = _arguments(model, self._layers, rows[:1])
        self._states = [_first_input(model, self._layers[0], row[None]) for row in rows]

    def gather(self, number: int, wanted: Mapping[str, nn.Linear]) -> dict[str, Statistics]:
        """Statistics of linear layers, by their names. Layers with the same input, such as q, k and v, share theirs."""
        with _gathering(wanted) as found:
            for state in self._states:
                self._layers[number](state, **self._arguments[number])
        return found

    def advance(self, number: int) -> None:
        layer, arguments = self._layers[number], self._arguments[number]
        self._states = [_hidden(layer(state, **arguments)) for state in self._states]

    def after(self, norm: nn.Module) -> Statistics:
        """Statistics of the decoder's output behind its norm."""
        found = Statistics(self._states[0].shape[-1], self._states[0].device)
        for state in self._states:
            found.add(norm(state))
        return found


@contextmanager
def _gathering(wanted: Mapping[str, nn.Linear]) -> Iterator[dict[str, Statistics]]:
    found: dict[str, Statistics] = {}
    owners: set[str] = set()
    last: dict[str, tuple[Tensor, str]] = {}

    def hook(name: str) -> Any:
        def add(module: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
            if name not in found:
                same = last.get("input")
                if same is not None and same[0] is inputs[0]:
                    found[name] = found[same[1]]
                    return
                found[name] = Statistics(module.in_features, inputs[0].device)
                owners.add(name)
            if name in owners:
                found[name].add(inputs[0])
                last["input"] = (inputs[0], name)

        return add

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in wanted.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _arguments(model: Any, layers: nn.ModuleList, row: Tensor) -> list[dict[str, Any]]:
    """Keyword arguments of each layer: masks and rotary embeddings differ between kinds of layers."""
    found: list[dict[str, Any]] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        found.append({key: value for key, value in arguments.items() if key != "hidden_states"})

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        model.base_model(row, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Reached(Exception):
    """The first layer's input is known."""


def _first_input(model: Any, first: nn.Module, row: Tensor) -> Tensor:
    found: list[Tensor] = []

    def stop(module: nn.Module, inputs: tuple[Tensor, ...], arguments: dict[str, Any]) -> None:
        found.append(inputs[0] if inputs else arguments["hidden_states"])
        raise _Reached

    handle = first.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model.base_model(row, use_cache=False)
    except _Reached:
        pass
    finally:
        handle.remove()
    return found[0]


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
