#include "streams.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <array>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "devices.h"

namespace strata {
namespace {

constexpr size_t kMostStreams = 32;  // of a device; further ones share, as torch's CUDA streams do
constexpr size_t kMostTasks = 1024;  // in a queue, before the caller waits

// For debugging, as CUDA_LAUNCH_BLOCKING: an error then surfaces in the call that caused it.
bool is_blocking() {
  static const bool blocking = [] {
    const char* text = std::getenv("STRATA_LAUNCH_BLOCKING");
    return text && text[0] == '1';
  }();
  return blocking;
}

class Queue {
 public:
  explicit Queue(c10::Stream stream) : stream_(stream) {}

  void add(Task task) {
    std::unique_lock lock(mutex_);
    if (!started_) {
      std::thread([this] { run(); }).detach();
      started_ = true;
    }
    changed_.wait(lock, [&] { return tasks_.size() < kMostTasks; });
    tasks_.push_back(std::move(task));
    ++added_;
    changed_.notify_all();
  }

  // Waits for the tasks added before the call, not for those that other threads add meanwhile.
  void drain() noexcept {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, until = added_] { return done_ >= until; });
  }

  void raise_error() {
    std::exception_ptr error;
    {
      std::lock_guard lock(mutex_);
      std::swap(error, error_);
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return done_ == added_;
  }

 private:
  [[noreturn]] void run() {
    c10::setThreadName("strata_stream");
    // Kernels work on plain host tensors: autograd was above the device's dispatch key.
    at::AutoDispatchBelowADInplaceOrView guard;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      std::exception_ptr error = run(task);
      task = nullptr;  // what the task holds is released before waiters continue
      lock.lock();
      if (error && !error_) {
        error_ = error;
      }
      ++done_;
      changed_.notify_all();
    }
  }

  std::exception_ptr run(const Task& task) const {
    try {
      task();
      return nullptr;
    } catch (c10::Error& error) {
      error.add_context(c10::str(
          "The operation ran on stream ", stream_.id(), " of ", stream_.device(), ", after the call that started it had returned. ",
          "Set STRATA_LAUNCH_BLOCKING=1 to raise errors in that call."));
      return std::current_exception();
    } catch (...) {
      return std::current_exception();
    }
  }

  const c10::Stream stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool started_ = false;
  uint64_t added_ = 0;
  uint64_t done_ = 0;
  std::exception_ptr error_;
};

// Streams live until the process ends: a Stream is a number that anyone may hold.
struct Streams {
  std::mutex mutex;
  std::array<std::vector<Queue*>, 16> of_device;
  std::array<size_t, 16> requested{};
};

Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
}

std::vector<Queue*> queues_of(c10::DeviceIndex device) {
  std::lock_guard lock(streams().mutex);
  return streams().of_device[device];
}

Queue& queue_of(const c10::Stream& stream) {
  check_device(stream.device_index());
  check_fork();
  mark_initialized();
  std::lock_guard lock(streams().mutex);
  auto& queues = streams().of_device[stream.device_index()];
  if (queues.empty()) {
    queues.push_back(new Queue(make_stream(stream.device_index(), 0)));
  }
  TORCH_CHECK(stream.id() >= 0 && static_cast<size_t>(stream.id()) < queues.size(), stream.device(), " has no stream ", stream.id());
  return *queues[stream.id()];
}

thread_local std::array<c10::StreamId, 16> current_ids{};

}  // namespace

struct Recording::State {
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  bool complete = false;
  std::chrono::steady_clock::time_point time;
};

std::shared_ptr<Recording::State> Recording::make_state() { return std::make_shared<State>(); }

void Recording::complete() {
  std::lock_guard lock(state_->mutex);
  state_->complete = true;
  state_->time = std::chrono::steady_clock::now();
  state_->changed.notify_all();
}

bool Recording::is_complete() const {
  std::lock_guard lock(state_->mutex);
  return state_->complete;
}

void Recording::wait() const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->complete; });
}

std::chrono::steady_clock::time_point Recording::time() const {
  std::lock_guard lock(state_->mutex);
  return state_->time;
}

c10::Stream default_stream(c10::DeviceIndex device) {
  check_device(device);
  return make_stream(device, 0);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  check_device(device);
  return make_stream(device, current_ids[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  current_ids[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  queue_of(default_stream(device));  // exists before any other
  std::lock_guard lock(streams().mutex);
  auto& queues = streams().of_device[device];
  size_t id = 1 + streams().requested[device]++ % (kMostStreams - 1);
  if (id == queues.size()) {
    queues.push_back(new Queue(make_stream(device, static_cast<c10::StreamId>(id))));
  }
  return make_stream(device, static_cast<c10::StreamId>(id));
}

void enqueue(const c10::Stream& stream, Task task) {
  queue_of(stream).add(std::move(task));
  if (is_blocking()) {
    synchronize(stream);
  }
}

void synchronize(const c10::Stream& stream) {
  auto& queue = queue_of(stream);
  queue.drain();
  queue.raise_error();
}

void drain_device(c10::DeviceIndex device) noexcept {
  if (in_bad_fork()) {
    return;
  }
  for (auto* queue : queues_of(device)) {
    queue->drain();
  }
}

void synchronize_device(c10::DeviceIndex device) {
  check_device(device);
  check_fork();
  drain_device(device);
  for (auto* queue : queues_of(device)) {
    queue->raise_error();
  }
}

bool is_idle(const c10::Stream& stream) { return queue_of(stream).is_idle(); }

Recording record(const c10::Stream& stream) {
  Recording recording;
  enqueue(stream, [recording]() mutable { recording.complete(); });
  return recording;
}

void wait_for(const c10::Stream& stream, const Recording& recording) {
  if (!recording.is_complete()) {
    enqueue(stream, [recording] { recording.wait(); });
  }
}

}  // namespace strata
