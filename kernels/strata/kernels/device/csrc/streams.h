// Streams and events. A stream is a queue of tasks and one thread that runs them in order, asynchronously to the caller.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <functional>
#include <memory>

namespace strata {

using Task = std::function<void()>;

// One recording of an event. An event that is recorded again gets a new one, so that earlier waits stay on the earlier.
class Recording {
 public:
  void complete();
  bool is_complete() const;
  void wait() const;
  std::chrono::steady_clock::time_point time() const;

 private:
  struct State;
  std::shared_ptr<State> state_ = make_state();
  static std::shared_ptr<State> make_state();
};

c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);  // of the calling thread
c10::Stream new_stream(c10::DeviceIndex device);

// Tasks must not own device memory, Python objects or a lock of the allocator: streams are waited for under both.
void enqueue(const c10::Stream& stream, Task task);

// The first error of a task is raised by the next synchronization of its stream or device, as on a GPU.
void synchronize(const c10::Stream& stream);
void synchronize_device(c10::DeviceIndex device);
bool is_idle(const c10::Stream& stream);

// Waits for all streams of a device, and leaves errors for the next synchronization.
void drain_device(c10::DeviceIndex device) noexcept;

Recording record(const c10::Stream& stream);
void wait_for(const c10::Stream& stream, const Recording& recording);

}  // namespace strata
