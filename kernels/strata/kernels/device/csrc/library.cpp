// Controls of the device for Python, as operators: strata_device is a library of torch, not a Python extension.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <chrono>
#include <thread>

#include "allocator.h"
#include "devices.h"
#include "fallback.h"
#include "generator.h"
#include "streams.h"

namespace strata {
namespace {

c10::DeviceIndex index_of(int64_t device) {
  auto index = static_cast<c10::DeviceIndex>(device);
  check_device(index);
  return index;
}

void set_capacity_of(int64_t device, int64_t bytes) {
  TORCH_CHECK(bytes >= 0, "a capacity is at least 0 bytes, got ", bytes);
  set_capacity(index_of(device), static_cast<size_t>(bytes));
}

// Eight numbers a block, in the order of BlockState.
std::vector<int64_t> snapshot_of(int64_t device) {
  std::vector<int64_t> numbers;
  for (const auto& block : snapshot(index_of(device))) {
    for (int64_t number :
         {block.segment, block.stream, block.offset, block.size, block.requested, int64_t(block.is_large),
          int64_t(block.is_allocated), int64_t(block.is_active)}) {
      numbers.push_back(number);
    }
  }
  return numbers;
}

c10::Dict<std::string, int64_t> fallbacks() {
  c10::Dict<std::string, int64_t> counts;
  for (const auto& [name, count] : fallback_counts()) {
    counts.insert(name, count);
  }
  return counts;
}

void seed(int64_t device, int64_t value) {
  auto generator = default_generator(index_of(device));
  std::lock_guard lock(generator.mutex());
  generator.set_current_seed(static_cast<uint64_t>(value));
}

int64_t initial_seed(int64_t device) { return static_cast<int64_t>(default_generator(index_of(device)).current_seed()); }

at::Tensor rng_state(int64_t device) {
  auto generator = default_generator(index_of(device));
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_rng_state(int64_t device, const at::Tensor& state) {
  auto generator = default_generator(index_of(device));
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// Keeps the current stream busy.
void sleep(int64_t device, double seconds) {
  enqueue(current_stream(index_of(device)), [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}

// Before the process ends: a task must not run while torch is taken down.
void drain() {
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    drain_device(index);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(strata_device, m) {
  m.def("device_count() -> int", [] { return int64_t(device_count()); });
  m.def("set_capacity(int device, int bytes) -> ()", set_capacity_of);
  m.def("snapshot(int device) -> int[]", snapshot_of);
  m.def("fallbacks() -> Dict(str, int)", fallbacks);
  m.def("clear_fallbacks() -> ()", clear_fallback_counts);
  m.def("seed(int device, int value) -> ()", seed);
  m.def("initial_seed(int device) -> int", initial_seed);
  m.def("rng_state(int device) -> Tensor", rng_state);
  m.def("set_rng_state(int device, Tensor state) -> ()", set_rng_state);
  m.def("sleep(int device, float seconds) -> ()", sleep);
  m.def("is_initialized() -> bool", [] { return is_initialized(); });
  m.def("in_bad_fork() -> bool", [] { return in_bad_fork(); });
  m.def("drain() -> ()", drain);
}

}  // namespace strata
