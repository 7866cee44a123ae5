// Device guard: the current device, streams and events, as torch's own code asks for them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "devices.h"
#include "streams.h"

namespace strata {
namespace {

// An event that was never recorded is null, and complete.
Recording* recording_of(void* event) { return static_cast<Recording*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }

  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kDevice, current_device()); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kDevice, "expected a strata device, got ", device);
    set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) {
      set_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override { return current_stream(indexed(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(indexed(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(indexed(device)); }
  // Priorities have no meaning here: the threads of all streams are equal.
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(indexed(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    auto recording = strata::record(stream);
    if (*event) {
      *recording_of(*event) = recording;
    } else {
      *event = new Recording(recording);
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) {
      wait_for(stream, *recording_of(event));
    }
  }
  bool queryEvent(void* event) const override { return !event || recording_of(event)->is_complete(); }
  void synchronizeEvent(void* event) const override {
    if (event) {
      recording_of(event)->wait();
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete recording_of(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first && second && queryEvent(first) && queryEvent(second), "both events must be recorded and complete");
    std::chrono::duration<double, std::milli> elapsed = recording_of(second)->time() - recording_of(first)->time();
    return elapsed.count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator()->recordStream(pointer, stream);
  }

 private:
  static c10::DeviceIndex indexed(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace strata
