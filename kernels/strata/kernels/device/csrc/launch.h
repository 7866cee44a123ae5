// Runs an operator on the device: shapes from its meta kernel, outputs from the allocator, the kernel on the current stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

namespace strata {

// Boxed kernel for any operator with a CPU kernel whose output shapes do not depend on values.
void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The overload that writes into given tensors, for an operator that returns new ones.
std::optional<c10::OperatorHandle> out_overload(const c10::OperatorHandle& op);

}  // namespace strata
