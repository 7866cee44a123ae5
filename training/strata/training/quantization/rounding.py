"""Rounds the linear layers of a model to a format, layer by layer, then the output layer, and returns the tensors to store."""

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn

from strata.platform.errors import UserError
from strata.training.quantization import grid, scaling
from strata.training.quantization.calibration import LayerPass, Statistics
from strata.training.quantization.gptq import gptq
from strata.training.quantization.layers import Plan, decoder_layers

GEMMA = "gemma"  # models whose norms multiply by 1 + weight

Stored = dict[str, dict[str, Tensor]]


class Rounding:
    """Changes the model in place: afterwards its weights are the values that the stored ones stand for."""

    def __init__(self, model: Any, plan: Plan, stored: torch.dtype) -> None:
        self._model, self._plan, self._stored = model, plan, stored
        self._scheme: QuantizationScheme = plan.format.scheme(plan.group_size, plan.head)
        assert self._scheme.weights
        self._args = self._scheme.weights
        self._compressor = BaseCompressor.get_value_from_registry(infer_module_format(nn.Linear, self._scheme).value)
        self.tensors: Stored = {}  # of each quantized layer, by their names in the layer
        self.changed: set[str] = set()  # modules that are not quantized but have other weights than before

    @torch.no_grad()
    def run(self, rows: Tensor | None, advance: Callable[[], None]) -> None:
        """`rows` of the calibration, [rows, tokens]; None for formats without one."""
        layers = decoder_layers(self._model)
        prefix = next(name for name, module in self._model.named_modules() if module is layers)
        hidden = LayerPass(self._model, rows) if rows is not None else None
        for number in range(len(layers)):
            try:
                self._layer(layers[number], f"{prefix}.{number}.", hidden, number)
            except ArithmeticError as error:
                cause = f"Layer {number} cannot be calibrated: {error}."
                raise UserError(cause, "Check the model with 'strata eval', or use --format w8a8-fp8.") from None
            advance()
        if self._plan.head is not None:
            try:
                self._head(self._plan.head, hidden)
            except ArithmeticError as error:
                cause = f"The output layer cannot be calibrated: {error}."
                raise UserError(cause, "Leave --head out, or use --format w8a8-fp8.") from None

    def _head(self, name: str, hidden: LayerPass | None) -> None:
        statistics = hidden.after(self._model.base_model.norm) if hidden is not None else None
        self._round(name, self._model.get_output_embeddings(), statistics)

    def _layer(self, layer: nn.Module, prefix: str, hidden: LayerPass | None, number: int) -> None:
        linear = {
            f"{prefix}{name}": module
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear) and f"{prefix}{name}" in self._plan.quantized
        }
        statistics = hidden.gather(number, linear) if hidden is not None else {}
        choose = self._scales()
        if choose is not None:
            for pair in scaling.pairs(layer, prefix, set(linear)):
                self._scale(pair, linear, statistics, choose)
        for name, module in linear.items():
            self._round(name, module, statistics.get(name))
        if hidden is not None:
            hidden.advance(number)

    def _scales(self) -> scaling.Choose | None:
        if self._plan.format.method == "awq":
            return scaling.awq(self._args, self._stored)
        return scaling.smooth if self._plan.format.method == "smooth" else None

    def _scale(
        self, pair: scaling.Pair, linear: dict[str, nn.Linear], statistics: dict[str, Statistics], choose: scaling.Choose
    ) -> None:
        known = statistics[pair.after[0]]
        scales = choose([linear[name].weight.float() for name in pair.after], known)
        one_added = self._model.config.model_type.startswith(GEMMA)
        applied = known.scaled(scaling.apply(pair, linear, scales, one_added, self._stored))
        statistics.update(dict.fromkeys(pair.after, applied))
        self.changed.add(next(name for name, module in self._model.named_modules() if module is pair.before))

    def _round(self, name: str, module: nn.Linear, statistics: Statistics | None) -> None:
        four_bit = self._plan.format.grouped
        importance = statistics.hessian.diagonal() if four_bit and statistics is not None else None
        fitted = grid.fit(module.weight, self._args, self._stored, importance)
        if self._plan.format.method == "gptq":
            assert statistics is not None
            rounded = gptq(module.weight, statistics.hessian, fitted)
        else:
            rounded = fitted.round(module.weight)
        if not rounded.isfinite().all():
            raise ArithmeticError(f"the weights of {name} are not finite")
        state = {"weight": rounded, "weight_scale": fitted.scale, "weight_zero_point": fitted.zero}
        compressed = self._compressor.compress(state, self._scheme)
        self.tensors[name] = {key: tensor.cpu().contiguous() for key, tensor in compressed.items()}
        module.weight.data.copy_(rounded)
