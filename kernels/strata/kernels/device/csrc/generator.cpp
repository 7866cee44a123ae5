#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <vector>

#include "devices.h"

namespace strata {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        engine_(c10::make_intrusive<at::CPUGeneratorImpl>()) {}

  void set_current_seed(uint64_t seed) override { engine_->set_current_seed(seed); }
  uint64_t current_seed() const override { return engine_->current_seed(); }
  uint64_t seed() override { return engine_->seed(); }
  void set_offset(uint64_t offset) override { engine_->set_offset(offset); }
  uint64_t get_offset() const override { return engine_->get_offset(); }
  void set_state(const c10::TensorImpl& state) override { engine_->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return engine_->get_state(); }

  uint64_t next() { return engine_->random64(); }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->engine_->set_state(*engine_->get_state());
    return copy;
  }

  c10::intrusive_ptr<at::CPUGeneratorImpl> engine_;
};

}  // namespace

at::Generator make_generator(c10::DeviceIndex device) {
  auto index = device < 0 ? current_device() : device;
  check_device(index);
  return at::make_generator<DeviceGenerator>(index);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      made->push_back(make_generator(index));
    }
    return made;
  }();
  auto index = device < 0 ? current_device() : device;
  check_device(index);
  return (*all)[index];
}

at::Generator kernel_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  at::Generator chosen = generator.has_value() && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(chosen.device().type() == kDevice, "expected a generator of device strata, got one of ", chosen.device());
  std::lock_guard lock(chosen.mutex());
  return at::detail::createCPUGenerator(chosen.get<DeviceGenerator>()->next());
}

}  // namespace strata
