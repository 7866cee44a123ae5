#include "pinned.h"

#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "devices.h"

namespace strata {
namespace {

using Owner = std::shared_ptr<void>;

struct Memory {
  size_t size;
  std::weak_ptr<void> owner;
};

struct Registry {
  std::mutex mutex;
  std::map<const char*, Memory> by_address;
};

Registry& registry() {
  static auto* one = new Registry;
  return *one;
}

void forget_and_free(void* address) {
  {
    std::lock_guard lock(registry().mutex);
    registry().by_address.erase(static_cast<const char*>(address));
  }
  std::free(address);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::kCPU)};
    }
    void* address = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(address, "pinned memory of ", bytes, " bytes could not be allocated");
    auto* owner = new Owner(address, &forget_and_free);
    {
      std::lock_guard lock(registry().mutex);
      registry().by_address[static_cast<const char*>(address)] = {bytes, *owner};
    }
    return {address, owner, [](void* context) { delete static_cast<Owner*>(context); }, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  // Copies hold the owner until they have run, so that nothing is left to record; nothing is cached either.
  bool record_event(void* address, void*, c10::Stream) override { return pinned_owner(address) != nullptr; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* one = new PinnedAllocator;
  return one;
}

Owner pinned_owner(const void* address) {
  std::lock_guard lock(registry().mutex);
  auto* byte = static_cast<const char*>(address);
  auto& all = registry().by_address;
  auto after = all.upper_bound(byte);
  if (after == all.begin()) {
    return nullptr;
  }
  auto& [first, memory] = *std::prev(after);
  return byte < first + memory.size ? memory.owner.lock() : nullptr;
}

namespace {
const bool is_pinned_allocator_registered = (at::setHostAllocator(kDevice, static_cast<at::HostAllocator*>(pinned_allocator())), true);
}

}  // namespace strata
