#include "allocator.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <tuple>

#include "devices.h"
#include "streams.h"

// Sizes and order of decisions are those of torch's CUDA allocator, so that statistics can be read in the same way.
namespace strata {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kMiB = 1048576;
constexpr size_t kSmallestBlock = 512;       // sizes are rounded to multiples of it
constexpr size_t kLargestSmall = kMiB;       // up to here, requests come from the small pool
constexpr size_t kSmallSegment = 2 * kMiB;   // small requests share segments of this size
constexpr size_t kLargeSegment = 20 * kMiB;  // large requests below kOwnSegment share these
constexpr size_t kOwnSegment = 10 * kMiB;    // from here on, a request gets its own segment
constexpr size_t kSegmentRounding = 2 * kMiB;
constexpr size_t kDefaultCapacity = 4096 * kMiB;

// Where a vendor's memory calls go. A fake device has host memory.
void* device_malloc(size_t bytes) { return std::aligned_alloc(kSmallestBlock, bytes); }
void device_free(void* address) { std::free(address); }

struct Segment {
  int64_t number;
  char* address;
  size_t size;
};

struct Block {
  Segment* segment;
  c10::StreamId stream;
  bool is_large;
  size_t offset;
  size_t size;
  c10::DeviceIndex device;
  size_t requested = 0;
  bool is_allocated = false;
  Block* before = nullptr;  // neighbours in the segment
  Block* after = nullptr;
  std::set<c10::StreamId> used_by;     // streams other than its own
  std::deque<Recording> pending_uses;  // after a free, until which the block stays active

  bool is_split() const { return before || after; }
};

// Best fit, then the oldest segment: addresses do not decide, so equal requests lead to equal statistics.
struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tuple(a->stream, a->size, a->segment->number, a->offset) <
        std::tuple(b->stream, b->size, b->segment->number, b->offset);
  }
};

std::string in_mib(size_t bytes) {
  std::ostringstream text;
  text.precision(2);
  text << std::fixed << double(bytes) / kMiB << " MiB";
  return text.str();
}

class Heap {
 public:
  explicit Heap(c10::DeviceIndex device) : device_(device) {}

  Block* allocate(size_t requested, c10::StreamId stream) {
    std::lock_guard lock(mutex_);
    release_completed_uses();
    size_t size = (requested + kSmallestBlock - 1) / kSmallestBlock * kSmallestBlock;
    bool is_large = size > kLargestSmall;
    Block* block = take_free(size, stream, is_large);
    if (!block) {
      block = make_segment(size, stream, is_large);
    }
    if (!block) {
      ++stats_.num_alloc_retries;
      release_cached();
      block = make_segment(size, stream, is_large);
    }
    if (!block) {
      ++stats_.num_ooms;
      raise_out_of_memory(requested, size);
    }
    split(block, size);
    block->is_allocated = true;
    block->requested = requested;
    increase(stats_.allocation, is_large, 1);
    increase(stats_.allocated_bytes, is_large, block->size);
    increase(stats_.active, is_large, 1);
    increase(stats_.active_bytes, is_large, block->size);
    increase(stats_.requested_bytes, is_large, requested);
    return block;
  }

  void free(Block* block) {
    std::lock_guard lock(mutex_);
    block->is_allocated = false;
    decrease(stats_.allocation, block->is_large, 1);
    decrease(stats_.allocated_bytes, block->is_large, block->size);
    if (block->used_by.empty()) {
      release(block);
      return;
    }
    for (auto id : block->used_by) {
      block->pending_uses.push_back(record(c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device_), id)));
    }
    block->used_by.clear();
    in_use_.push_back(block);
  }

  void record_use(Block* block, c10::StreamId stream) {
    std::lock_guard lock(mutex_);
    if (stream != block->stream) {
      block->used_by.insert(stream);
    }
  }

  void empty_cache() {
    std::lock_guard lock(mutex_);
    release_cached();
  }

  DeviceStats stats() {
    std::lock_guard lock(mutex_);
    return stats_;
  }

  void reset_peaks() {
    std::lock_guard lock(mutex_);
    for (auto* array : arrays()) {
      for (auto& stat : *array) {
        stat.reset_peak();
      }
    }
  }

  void reset_accumulated() {
    std::lock_guard lock(mutex_);
    for (auto* array : arrays()) {
      for (auto& stat : *array) {
        stat.reset_accumulated();
      }
    }
    stats_.num_alloc_retries = stats_.num_ooms = stats_.num_sync_all_streams = 0;
    stats_.num_device_alloc = stats_.num_device_free = 0;
  }

  void set_capacity(size_t bytes) {
    std::lock_guard lock(mutex_);
    capacity_ = bytes;
  }

  std::pair<size_t, size_t> free_and_capacity() {
    std::lock_guard lock(mutex_);
    return {free_bytes(), capacity_};
  }

  bool contains(const void* address) {
    std::lock_guard lock(mutex_);
    auto* byte = static_cast<const char*>(address);
    for (auto& [number, first] : segments_) {
      if (byte >= first->segment->address && byte < first->segment->address + first->segment->size) {
        return true;
      }
    }
    return false;
  }

  std::vector<BlockState> snapshot() {
    std::lock_guard lock(mutex_);
    std::vector<BlockState> states;
    for (auto& [number, first] : segments_) {
      for (Block* block = first; block; block = block->after) {
        bool is_active = block->is_allocated || !block->pending_uses.empty();
        states.push_back(
            {number, block->stream, int64_t(block->offset), int64_t(block->size), int64_t(block->requested), block->is_large,
             block->is_allocated, is_active});
      }
    }
    return states;
  }

 private:
  using Pool = std::set<Block*, BySize>;

  Pool& pool(bool is_large) { return is_large ? large_ : small_; }

  Block* take_free(size_t size, c10::StreamId stream, bool is_large) {
    Segment first{-1, nullptr, 0};
    Block key{&first, stream, is_large, 0, size, device_};
    auto& free = pool(is_large);
    auto found = free.lower_bound(&key);
    if (found == free.end() || (*found)->stream != stream) {
      return nullptr;
    }
    Block* block = *found;
    free.erase(found);
    if (block->is_split()) {
      decrease(stats_.inactive_split, is_large, 1);
      decrease(stats_.inactive_split_bytes, is_large, block->size);
    }
    return block;
  }

  Block* make_segment(size_t size, c10::StreamId stream, bool is_large) {
    size_t bytes = !is_large    ? kSmallSegment
        : size < kOwnSegment ? kLargeSegment
                             : (size + kSegmentRounding - 1) / kSegmentRounding * kSegmentRounding;
    if (bytes < size || bytes > free_bytes()) {
      return nullptr;
    }
    auto* address = static_cast<char*>(device_malloc(bytes));
    if (!address) {
      return nullptr;
    }
    auto* segment = new Segment{next_segment_++, address, bytes};
    auto* block = new Block{segment, stream, is_large, 0, bytes, device_};
    segments_[segment->number] = block;
    ++stats_.num_device_alloc;
    increase(stats_.segment, is_large, 1);
    increase(stats_.reserved_bytes, is_large, bytes);
    return block;
  }

  // Cuts what is beyond `size` off a block that is in no pool, if it is enough to be worth it.
  void split(Block* block, size_t size) {
    size_t rest = block->size - size;
    if (block->is_large ? rest <= kLargestSmall : rest < kSmallestBlock) {
      return;
    }
    auto* tail = new Block{block->segment, block->stream, block->is_large, block->offset + size, rest, device_};
    tail->before = block;
    tail->after = block->after;
    if (tail->after) {
      tail->after->before = tail;
    }
    block->after = tail;
    block->size = size;
    add_free(tail);
  }

  void add_free(Block* block) {
    pool(block->is_large).insert(block);
    if (block->is_split()) {
      increase(stats_.inactive_split, block->is_large, 1);
      increase(stats_.inactive_split_bytes, block->is_large, block->size);
    }
  }

  // Makes a block available that nothing uses, in one with its free neighbours.
  void release(Block* block) {
    decrease(stats_.active, block->is_large, 1);
    decrease(stats_.active_bytes, block->is_large, block->size);
    decrease(stats_.requested_bytes, block->is_large, block->requested);
    block->requested = 0;
    if (Block* before = block->before; before && is_free(before)) {
      remove_free(before);
      join(before, block);
      block = before;
    }
    if (Block* after = block->after; after && is_free(after)) {
      remove_free(after);
      join(block, after);
    }
    add_free(block);
  }

  static bool is_free(const Block* block) { return !block->is_allocated && block->pending_uses.empty(); }

  void remove_free(Block* block) {
    pool(block->is_large).erase(block);
    decrease(stats_.inactive_split, block->is_large, 1);
    decrease(stats_.inactive_split_bytes, block->is_large, block->size);
  }

  static void join(Block* first, Block* second) {
    first->size += second->size;
    first->after = second->after;
    if (first->after) {
      first->after->before = first;
    }
    delete second;
  }

  void release_completed_uses() {
    for (auto at = in_use_.begin(); at != in_use_.end();) {
      auto& uses = (*at)->pending_uses;
      while (!uses.empty() && uses.front().is_complete()) {
        uses.pop_front();
      }
      if (uses.empty()) {
        release(*at);
        at = in_use_.erase(at);
      } else {
        ++at;
      }
    }
  }

  // Returns whole free segments to the device. Tasks that use them may still be queued: they run first.
  void release_cached() {
    ++stats_.num_sync_all_streams;
    drain_device(device_);
    release_completed_uses();
    for (bool is_large : {false, true}) {
      auto& free = pool(is_large);
      for (auto at = free.begin(); at != free.end();) {
        Block* block = *at;
        if (block->is_split()) {
          ++at;
          continue;
        }
        at = free.erase(at);
        ++stats_.num_device_free;
        decrease(stats_.segment, is_large, 1);
        decrease(stats_.reserved_bytes, is_large, block->size);
        segments_.erase(block->segment->number);
        device_free(block->segment->address);
        delete block->segment;
        delete block;
      }
    }
  }

  [[noreturn]] void raise_out_of_memory(size_t requested, size_t size) {
    size_t allocated = stats_.allocated_bytes[0].current, reserved = stats_.reserved_bytes[0].current;
    size_t in_use = stats_.active_bytes[0].current - allocated;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "strata:", int(device_), " is out of memory. Tried to allocate ", in_mib(size), " (", requested,
        " bytes requested). Of a capacity of ", in_mib(capacity_), ", ", in_mib(reserved), " are held by the allocator: ",
        in_mib(allocated), " in tensors, ", in_mib(in_use), " freed but in use by a stream, ",
        in_mib(reserved - allocated - in_use), " cached in split segments. ", in_mib(free_bytes()), " are free.");
  }

  size_t free_bytes() const {
    size_t reserved = stats_.reserved_bytes[0].current;
    return capacity_ > reserved ? capacity_ - reserved : 0;
  }

  static void increase(StatArray& array, bool is_large, size_t amount) {
    array[0].increase(amount);
    array[is_large ? 2 : 1].increase(amount);
  }

  static void decrease(StatArray& array, bool is_large, size_t amount) {
    array[0].decrease(amount);
    array[is_large ? 2 : 1].decrease(amount);
  }

  std::array<StatArray*, 9> arrays() {
    return {
        &stats_.allocation,     &stats_.segment,      &stats_.active,
        &stats_.inactive_split, &stats_.allocated_bytes, &stats_.reserved_bytes,
        &stats_.active_bytes,   &stats_.inactive_split_bytes, &stats_.requested_bytes};
  }

  static size_t capacity_by_environment() {
    const char* text = std::getenv("STRATA_DEVICE_MEMORY");
    return text ? std::strtoull(text, nullptr, 10) : kDefaultCapacity;
  }

  const c10::DeviceIndex device_;
  std::mutex mutex_;
  size_t capacity_ = capacity_by_environment();
  DeviceStats stats_;
  Pool small_, large_;
  std::vector<Block*> in_use_;          // freed, but used by other streams
  std::map<int64_t, Block*> segments_;  // number to first block
  int64_t next_segment_ = 0;
};

Heap& heap(c10::DeviceIndex device) {
  static auto* heaps = [] {
    auto* made = new std::vector<std::unique_ptr<Heap>>;
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      made->push_back(std::make_unique<Heap>(index));
    }
    return made;
  }();
  check_device(device);
  return *(*heaps)[device];
}

void free_block(void* context) {
  // The lock may have been held at the fork; the child's copy of the memory goes when the child ends.
  if (!in_bad_fork()) {
    auto* block = static_cast<Block*>(context);
    heap(block->device).free(block);
  }
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DeviceIndex index = current_device();
    c10::Device device(kDevice, index);
    check_fork();
    if (bytes == 0) {
      return {nullptr, device};
    }
    Block* block = heap(index).allocate(bytes, current_stream(index).id());
    return {block->segment->address + block->offset, block, &free_block, device};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    auto stream = current_stream(current_device());
    enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    check_fork();
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      heap(index).empty_cache();
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_deleter() == &free_block) {  // not memory of somebody else's, nor none
      auto* block = static_cast<Block*>(pointer.get_context());
      TORCH_CHECK(
          stream.device() == pointer.device(), "memory of ", pointer.device(), " cannot be recorded on a stream of ", stream.device());
      heap(block->device).record_use(block, stream.id());
    }
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override { return heap(device).stats(); }
  void resetAccumulatedStats(c10::DeviceIndex device) override { heap(device).reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex device) override { heap(device).reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return heap(device).free_and_capacity(); }
};

}  // namespace

c10::DeviceAllocator* allocator() {
  static auto* one = new Allocator;
  return one;
}

namespace {
const bool is_allocator_registered = (c10::SetAllocator(kDevice, allocator()), true);
}

void set_capacity(c10::DeviceIndex device, size_t bytes) { heap(device).set_capacity(bytes); }

c10::DeviceIndex device_of_address(const void* address) {
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    if (heap(index).contains(address)) {
      return index;
    }
  }
  return -1;
}

std::vector<BlockState> snapshot(c10::DeviceIndex device) { return heap(device).snapshot(); }

}  // namespace strata
