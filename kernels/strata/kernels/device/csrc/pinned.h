// Pinned host memory, from which copies to the device may run after the call has returned.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>

namespace strata {

c10::Allocator* pinned_allocator();

// Owner of the pinned memory around an address, null if the address is not pinned. Holding it delays the free.
std::shared_ptr<void> pinned_owner(const void* address);

}  // namespace strata
