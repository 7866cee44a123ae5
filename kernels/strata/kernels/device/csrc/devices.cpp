#include "devices.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>

namespace strata {
namespace {

constexpr int kMostDevices = 16;
thread_local c10::DeviceIndex current = 0;
std::atomic<bool> initialized{false};
std::atomic<bool> bad_fork{false};

}  // namespace

c10::DeviceIndex device_count() noexcept {
  static const c10::DeviceIndex count = [] {
    const char* text = std::getenv("STRATA_DEVICE_COUNT");
    return static_cast<c10::DeviceIndex>(text ? std::clamp(std::atoi(text), 0, kMostDevices) : 1);
  }();
  return count;
}

c10::DeviceIndex current_device() noexcept { return current; }

void check_device(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count(), "strata:", int(index), " does not exist: there are ", int(device_count()),
      " devices. STRATA_DEVICE_COUNT sets their number before the device is loaded.");
}

void set_device(c10::DeviceIndex index) {
  check_device(index);
  current = index;
}

void mark_initialized() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
    initialized = true;
  });
}

bool is_initialized() noexcept { return initialized; }

bool in_bad_fork() noexcept { return bad_fork; }

void check_fork() {
  TORCH_CHECK(
      !in_bad_fork(), "Device strata cannot be used in a forked process: the threads of its streams stayed in the parent. ",
      "Start processes with the 'spawn' method (torch.multiprocessing.set_start_method('spawn')), or fork before the first use.");
}

}  // namespace strata
