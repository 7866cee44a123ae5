// Operators that the device does not have run on the CPU, on copies; each call is counted.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <map>
#include <string>

namespace strata {

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack);

std::map<std::string, int64_t> fallback_counts();
void clear_fallback_counts();

}  // namespace strata
