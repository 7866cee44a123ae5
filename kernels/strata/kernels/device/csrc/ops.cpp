// Operators of torch that the device has. A vendor replaces `launch` by kernels, one operator at a time; the rest falls back.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include "devices.h"
#include "fallback.h"
#include "launch.h"

namespace strata {
namespace {

// Each with its in-place and out= overloads. Composite operators, such as matmul, linear and cross_entropy, arrive as these.
constexpr const char* kOperators[] = {
    // elementwise, two tensors
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "div.Tensor_mode", "pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar",
    "remainder.Tensor", "fmod.Tensor", "maximum", "minimum", "atan2", "eq.Tensor", "eq.Scalar", "ne.Tensor", "ne.Scalar", "lt.Tensor",
    "lt.Scalar", "le.Tensor", "le.Scalar", "gt.Tensor", "gt.Scalar", "ge.Tensor", "ge.Scalar", "bitwise_and.Tensor",
    "bitwise_or.Tensor", "bitwise_xor.Tensor", "logical_and", "logical_or", "logical_xor", "lerp.Scalar", "lerp.Tensor", "addcmul",
    "addcdiv", "where.self", "clamp", "clamp.Tensor", "clamp_min", "clamp_max", "masked_fill.Scalar", "masked_fill.Tensor",
    // elementwise, one tensor
    "abs", "neg", "sign", "exp", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid",
    "erf", "silu", "gelu", "relu", "leaky_relu", "floor", "ceil", "round", "trunc", "bitwise_not", "logical_not", "isnan", "isneginf",
    "isposinf", "tril", "triu", "fill_.Scalar", "fill_.Tensor", "zero_",
    // their gradients
    "silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "threshold_backward", "native_dropout_backward",
    // reductions and normalization
    "sum.dim_IntList", "mean.dim", "prod.dim_int", "amax", "amin", "argmax", "argmin", "max", "min", "max.dim", "min.dim", "any",
    "any.dim", "all", "all.dim", "var.correction", "std.correction", "cumsum", "linalg_vector_norm", "_softmax",
    "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward",
    "nll_loss_forward", "nll_loss_backward", "topk", "sort.stable",
    // matrix products
    "mm", "addmm", "bmm", "baddbmm", "dot", "mv", "addmv",
    // indexing and shapes
    "cat", "index_select", "gather", "scatter.src", "scatter.value", "scatter_add", "index_add", "embedding_dense_backward", "flip",
    "arange.start_out", "linspace.out", "eye.m_out", "range.out", "constant_pad_nd",
    // random numbers
    "normal_", "uniform_", "random_", "random_.from", "random_.to", "bernoulli_.float", "bernoulli_.Tensor", "bernoulli",
    "exponential_", "multinomial", "randperm.generator_out",
    // optimizers
    "_foreach_add.List", "_foreach_add.Scalar", "_foreach_add.ScalarList", "_foreach_sub.List", "_foreach_mul.List",
    "_foreach_mul.Scalar", "_foreach_mul.ScalarList", "_foreach_mul.Tensor", "_foreach_div.List", "_foreach_div.Scalar",
    "_foreach_div.ScalarList", "_foreach_addcmul.Scalar", "_foreach_addcdiv.Scalar", "_foreach_addcdiv.ScalarList", "_foreach_lerp.Scalar",
    "_foreach_sqrt", "_foreach_neg", "_foreach_maximum.List", "_foreach_norm.Scalar", "_foreach_copy_", "_foreach_zero_",
    "_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_adam_", "_fused_adam_.tensor_lr"};

constexpr auto kIndexOperators = {"index.Tensor", "_unsafe_index.Tensor", "_index_put_impl_"};

// Indices may be on the host; those that are masks decide the shape by their values.
void launch_index(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t first = stack->size() - op.schema().arguments().size();
  auto device = (*stack)[first].toTensor().device();
  c10::List<std::optional<at::Tensor>> indices;
  bool has_mask = false;
  for (const auto& index : (*stack)[first + 1].toOptionalTensorVector()) {
    bool given = index.has_value() && index->defined();
    has_mask |= given && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
    indices.push_back(given ? std::optional(index->to(device)) : index);
  }
  (*stack)[first + 1] = indices;
  (has_mask ? fall_back : launch)(op, stack);
}

// Without a generator among its arguments, this one is made of an operator that has it.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto options = input.options().dtype(at::kBool);
  if (!train.value_or(true) || p == 0) {
    return {input.clone(), at::ones_like(input, options)};
  }
  at::Tensor mask = at::empty_like(input, options).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

std::optional<c10::OperatorHandle> in_place_overload(const c10::OperatorHandle& op) {
  return c10::Dispatcher::singleton().findSchema({op.operator_name().name + "_", op.operator_name().overload_name});
}

std::string without_namespace(const c10::OperatorHandle& op) {
  return c10::toString(op.operator_name()).substr(std::string("aten::").size());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : kOperators) {
    std::string text = name;
    auto dot = text.find('.');
    auto overload = dot == std::string::npos ? "" : text.substr(dot + 1);
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + text.substr(0, dot)).c_str(), overload.c_str());
    for (const auto& variant : {std::optional(op), in_place_overload(op), out_overload(op)}) {
      if (variant.has_value()) {
        m.impl(without_namespace(*variant).c_str(), torch::CppFunction::makeFromBoxedFunction<&launch>());
      }
    }
  }
  for (const char* name : kIndexOperators) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&launch_index>());
  }
  m.impl("native_dropout", native_dropout);
}

}  // namespace strata
