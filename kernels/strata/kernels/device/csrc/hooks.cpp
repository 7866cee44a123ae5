// Hooks through which torch reaches what only the device knows: its generators, pinned memory and storages.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "allocator.h"
#include "devices.h"
#include "generator.h"
#include "memory.h"
#include "pinned.h"

namespace strata {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized(); }
  void init() const override { check_fork(); }

  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return make_generator(device); }

  bool isPinnedPtr(const void* address) const override { return pinned_owner(address) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* address) const override {
    auto index = device_of_address(address);
    TORCH_CHECK(index >= 0, "the address is not memory of a strata device");
    return at::Device(kDevice, index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool are_hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace
}  // namespace strata
