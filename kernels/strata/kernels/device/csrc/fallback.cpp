#include "fallback.h"

#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <mutex>

namespace strata {
namespace {

std::mutex counts_mutex;
std::map<std::string, int64_t> counts_by_operator;

}  // namespace

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  {
    std::lock_guard lock(counts_mutex);
    ++counts_by_operator[c10::toString(op.operator_name())];
  }
  // A view of a copy would not be a view: an operator that returns one must have its own kernel.
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

std::map<std::string, int64_t> fallback_counts() {
  std::lock_guard lock(counts_mutex);
  return counts_by_operator;
}

void clear_fallback_counts() {
  std::lock_guard lock(counts_mutex);
  counts_by_operator.clear();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

}  // namespace strata
