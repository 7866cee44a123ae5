// Caching allocator of device memory: requests are cut from segments, and freed blocks are reused in stream order.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <vector>

namespace strata {

c10::DeviceAllocator* allocator();

// Bytes that the segments of a device may have together.
void set_capacity(c10::DeviceIndex device, size_t bytes);

// The device to whose segments an address belongs, or -1.
c10::DeviceIndex device_of_address(const void* address);

// A block of a segment, for a look at the allocator's state.
struct BlockState {
  int64_t segment;  // number of the segment, in the order of their allocation
  int64_t stream;
  int64_t offset;  // in the segment
  int64_t size;
  int64_t requested;
  bool is_large;
  bool is_allocated;
  bool is_active;  // allocated, or freed but still in use by a recorded stream
};
std::vector<BlockState> snapshot(c10::DeviceIndex device);

}  // namespace strata
