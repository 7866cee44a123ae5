// An operator of the device's own, with a kernel for each key that the dispatcher passes through: Autograd, Meta and PrivateUse1.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "devices.h"
#include "streams.h"

namespace strata {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

void check_rms_norm(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(
      x.dim() > 0 && weight.dim() == 1 && weight.sym_size(0) == x.sym_size(-1), "rms_norm of ", x.sym_sizes(),
      " expects a weight as wide as its rows, got ", weight.sym_sizes());
  TORCH_CHECK(
      x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "rms_norm of strata_device expects float32, got ",
      x.scalar_type(), " and ", weight.scalar_type());
  TORCH_CHECK(x.device() == weight.device(), "rms_norm expects tensors of one device, got ", x.device(), " and ", weight.device());
}

// Meta: shapes and dtypes alone, for torch.compile and for meta tensors.
Pair rms_norm_meta(const at::Tensor& x, const at::Tensor& weight, double) {
  check_rms_norm(x, weight);
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), x.options())};
}

Pair rms_norm_backward_meta(const at::Tensor&, const at::Tensor& x, const at::Tensor& weight, const at::Tensor&) {
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(weight.sym_sizes(), weight.options())};
}

// PrivateUse1: allocates, and starts the kernel on the current stream. Returns x / rms(x) * weight, and 1 / rms(x) of each row.
Pair rms_norm(const at::Tensor& given_x, const at::Tensor& given_weight, double eps) {
  check_rms_norm(given_x, given_weight);
  c10::DeviceGuard guard(given_x.device());
  at::Tensor x = given_x.contiguous(), weight = given_weight.contiguous();
  at::Tensor y = at::empty_like(x), rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options());
  int64_t width = x.size(-1), rows = rstd.numel();
  auto row_kernel = [=, x = x.const_data_ptr<float>(), weight = weight.const_data_ptr<float>(), y = y.mutable_data_ptr<float>(),
                     rstd = rstd.mutable_data_ptr<float>()](int64_t row) {
    const float* in = x + row * width;
    double squares = 0;
    for (int64_t column = 0; column < width; ++column) {
      squares += double(in[column]) * in[column];
    }
    rstd[row] = float(1 / std::sqrt(squares / double(width) + eps));
    for (int64_t column = 0; column < width; ++column) {
      y[row * width + column] = in[column] * rstd[row] * weight[column];
    }
  };
  enqueue(current_stream(x.device().index()), [rows, row_kernel] {
    at::parallel_for(0, rows, 16, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        row_kernel(row);
      }
    });
  });
  return {y, rstd};
}

// Gradients of x and weight. With n = x / rms(x): dx = (dy * weight - n * mean(dy * weight * n)) / rms(x), dweight = sum of dy * n.
Pair rms_norm_backward(const at::Tensor& given_dy, const at::Tensor& given_x, const at::Tensor& given_weight, const at::Tensor& given_rstd) {
  c10::DeviceGuard guard(given_x.device());
  at::Tensor dy = given_dy.contiguous(), x = given_x.contiguous(), weight = given_weight.contiguous(), rstd = given_rstd.contiguous();
  at::Tensor dx = at::empty_like(x), dweight = at::empty_like(weight);
  int64_t width = x.size(-1), rows = rstd.numel();
  auto kernel = [=, dy = dy.const_data_ptr<float>(), x = x.const_data_ptr<float>(), weight = weight.const_data_ptr<float>(),
                 rstd = rstd.const_data_ptr<float>(), dx = dx.mutable_data_ptr<float>(), dweight = dweight.mutable_data_ptr<float>()] {
    std::vector<double> sums(width, 0.0);
    for (int64_t row = 0; row < rows; ++row) {
      const float *in = x + row * width, *gradient = dy + row * width;
      double mean = 0;
      for (int64_t column = 0; column < width; ++column) {
        double normal = double(in[column]) * rstd[row];
        mean += gradient[column] * weight[column] * normal / double(width);
        sums[column] += gradient[column] * normal;
      }
      for (int64_t column = 0; column < width; ++column) {
        double normal = double(in[column]) * rstd[row];
        dx[row * width + column] = float((gradient[column] * weight[column] - normal * mean) * rstd[row]);
      }
    }
    std::copy(sums.begin(), sums.end(), dweight);
  };
  enqueue(current_stream(x.device().index()), kernel);
  return {dx, dweight};
}

// Autograd: saves what the backward pass needs and calls the operator again, below autograd, where one of the kernels above runs.
struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("strata_device::rms_norm", "")
                         .typed<Pair(const at::Tensor&, const at::Tensor&, double)>();
    auto [y, rstd] = op.call(x, weight, eps);
    context->save_for_backward({x, weight, rstd});
    context->mark_non_differentiable({rstd});
    return {y, rstd};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("strata_device::rms_norm_backward", "")
                         .typed<Pair(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
    auto saved = context->get_saved_variables();
    auto [dx, dweight] = op.call(gradients[0], saved[0], saved[1], saved[2]);
    return {dx, dweight, at::Tensor()};
  }
};

Pair rms_norm_autograd(const at::Tensor& x, const at::Tensor& weight, double eps) {
  auto results = RmsNorm::apply(x, weight, eps);
  return {results[0], results[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(strata_device, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(strata_device, Meta, m) {
  m.impl("rms_norm", rms_norm_meta);
  m.impl("rms_norm_backward", rms_norm_backward_meta);
}

TORCH_LIBRARY_IMPL(strata_device, PrivateUse1, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_backward", rms_norm_backward);
}

TORCH_LIBRARY_IMPL(strata_device, Autograd, m) { m.impl("rms_norm", rms_norm_autograd); }

}  // namespace strata
