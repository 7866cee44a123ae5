"""Strata's operations in a Hugging Face model, without a compiler: `strata.kernels.patch(model)`.

Only the instance changes, not transformers' classes and functions. A model is patched as a whole or not at all: it consists of
classes whose computation is known here, and any other class is an error that names the module.

In training with labels, the patched model returns no logits: the loss is computed without them. In evaluation it returns both.
"""

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from strata.kernels.ops.flash_attention.flash_attention import DTYPES, MAX_HEAD_DIM, flash_attention
from strata.kernels.ops.linear_cross_entropy.linear_cross_entropy import linear_cross_entropy
from strata.kernels.ops.rms_norm.rms_norm import rms_norm
from strata.kernels.ops.rope import rope
from strata.kernels.ops.swiglu import swiglu

FAMILIES = {"llama": "Llama", "qwen3": "Qwen3", "mixtral": "Mixtral"}  # model_type, and the prefix of its classes
ATTENTION = "strata"


class UnknownModule(ValueError):
    """A part of the model that Strata's operations do not compute."""


def patch(model: Any) -> dict[str, int]:
    """Replaces norms, rotary embedding, feed-forward layers, attention and the loss of a Llama, Qwen3 or Mixtral for causal
    language modelling. Returns the number of replaced modules by operation."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in FAMILIES or type(model).__name__ != f"{FAMILIES[family]}ForCausalLM":
        known = ", ".join(f"{prefix}ForCausalLM" for prefix in FAMILIES.values())
        raise UnknownModule(f"patch knows {known}, got {type(model).__name__} of type '{family}'")
    changes = _changes(model, FAMILIES[family])
    _check_settings(model)
    _register_attention()
    changed: Counter[str] = Counter()
    for module, operation, attribute, function in changes:
        setattr(module, attribute, MethodType(function, module))
        changed[operation] += 1
    model.set_attn_implementation(ATTENTION)
    changed["rope"] = changed["flash_attention"]
    return dict(changed)


def _changes(model: Any, prefix: str) -> list[tuple[Any, str, str, Callable[..., Any]]]:
    """(module, operation, attribute, function) of every replacement."""
    modelling = import_module(f"transformers.models.{prefix.lower()}.modeling_{prefix.lower()}")
    replaced: dict[str, tuple[str, str, Callable[..., Any]]] = {
        "RMSNorm": ("rms_norm", "forward", _norm),
        "MLP": ("swiglu", "forward", _feed_forward),
        "Experts": ("swiglu", "_apply_gate", _gate),
        "Attention": ("flash_attention", "forward", _attention_layer),
        "ForCausalLM": ("linear_cross_entropy", "forward", _with_loss()),
    }
    classes = {getattr(modelling, prefix + name, None): change for name, change in replaced.items()}
    unchanged = ("RotaryEmbedding", "DecoderLayer", "Model", "SparseMoeBlock", "TopKRouter")
    passive = {getattr(modelling, prefix + name, None) for name in unchanged}
    passive |= {nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, type(_silu())}
    changes = []
    for name, module in model.named_modules():
        if type(module) not in {*classes, *passive}:
            raise UnknownModule(f"patch does not know '{name}', a {type(module).__module__}.{type(module).__name__}")
        if "forward" in vars(module):
            raise UnknownModule(f"'{name or type(module).__name__}' has a forward of its own: it was patched before")
        if type(module) in classes:
            changes.append((module, *classes[type(module)]))
    return changes


def _silu() -> nn.Module:
    from transformers.activations import ACT2FN

    return ACT2FN["silu"]  # type: ignore[no-any-return]


def _check_settings(model: Any) -> None:
    config = model.config
    if hasattr(model, "router_aux_loss_coef") and config._experts_implementation == "eager":
        raise UnknownModule("the experts run in a loop: load the model with experts_implementation='grouped_mm' or 'batched_mm'")
    if model.lm_head.bias is not None:
        raise UnknownModule("'lm_head' has a bias, Strata's loss has none")
    if model.loss_type not in (None, "ForCausalLM") or "_loss_function" in vars(model):
        raise UnknownModule("the model has a loss of its own")
    if config.attention_dropout:
        raise UnknownModule(f"attention has a dropout of {config.attention_dropout}, Strata's operation has none")


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    """transformers multiplies in the promoted dtype; Strata's result has the input's."""
    if self.weight.dtype != hidden_states.dtype:
        return type(self).forward(self, hidden_states)  # type: ignore[no-any-return]
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _feed_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def _gate(self: Any, gate_up: Tensor) -> Tensor:
    return swiglu(*gate_up.chunk(2, dim=-1))


def _attention_layer(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    from transformers import AttentionInterface

    q_bthe, k_btke, v_btke = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        q_bthe, k_btke = self.q_norm(q_bthe), self.k_norm(k_btke)
    cos, sin = (table[..., : self.head_dim // 2] for table in position_embeddings)
    if cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    q_bthe, k_btke = rope(q_bthe, k_btke, cos, sin)
    q, k, v = (x.transpose(1, 2) for x in (q_bthe, k_btke, v_btke))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    attention = AttentionInterface()[self.config._attn_implementation]
    out, weights = attention(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **options)
    return self.o_proj(out.flatten(2)), weights


def _register_attention() -> None:
    """Attention "strata": Strata's for causal attention without padding, torch's where there is a mask or a KV cache."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        known = q.dtype in DTYPES and q.shape[-1] <= MAX_HEAD_DIM
        if attention_mask is not None or q.shape[2] != k.shape[2] or not known or options.get("is_causal") is False:
            return sdpa_attention_forward(module, q, k, v, attention_mask, scaling=scaling, **options)  # type: ignore[no-any-return]
        return flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scaling), None

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _with_loss() -> Callable[..., Any]:
    """The model's forward with the loss of the hidden states. Without labels, and in evaluation, it is transformers' own."""
    from transformers.utils import can_return_tuple

    @can_return_tuple
    def forward(self: Any, input_ids: Tensor | None = None, labels: Tensor | None = None, **options: Any) -> Any:
        shifted = options.get("shift_labels")
        if not self.training or (labels is None and shifted is None) or options.get("logits_to_keep"):
            return type(self).forward(self, input_ids=input_ids, labels=labels, **options)
        count = options.pop("num_items_in_batch", None)
        ignored = options.pop("ignore_index", -100)
        options.pop("shift_labels", None)
        options.pop("logits_to_keep", None)
        if shifted is None:
            assert labels is not None
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        outputs = _backbone(self, input_ids, options)
        hidden = outputs.last_hidden_state
        loss = linear_cross_entropy(
            hidden.flatten(0, -2),
            self.lm_head.weight,
            shifted.flatten().to(hidden.device),
            ignore_index=ignored,
            reduction="mean" if count is None else "sum",
        )
        loss = loss if count is None else loss / count
        return _output(self, outputs, loss, options)

    return forward  # type: ignore[no-any-return]


def _backbone(self: Any, input_ids: Tensor | None, options: dict[str, Any]) -> Any:
    if hasattr(self, "router_aux_loss_coef") and options.get("output_router_logits") is None:
        options["output_router_logits"] = self.config.output_router_logits
    return self.model(input_ids=input_ids, **{key: value for key, value in options.items() if key != "return_dict"})


def _output(self: Any, outputs: Any, loss: Tensor, options: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

    common = {
        "past_key_values": outputs.past_key_values,
        "hidden_states": outputs.hidden_states,
        "attentions": outputs.attentions,
    }
    if not hasattr(self, "router_aux_loss_coef"):
        return CausalLMOutputWithPast(loss=loss, **common)
    balance = None
    if options.get("output_router_logits"):
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        balance = load_balancing_loss_func(
            outputs.router_logits, self.num_experts, self.num_experts_per_tok, options.get("attention_mask")
        )
        loss = loss + self.router_aux_loss_coef * balance
    return MoeCausalLMOutputWithPast(loss=loss, aux_loss=balance, router_logits=outputs.router_logits, **common)
