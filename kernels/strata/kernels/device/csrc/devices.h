// Devices of this process: how many, the current one of each thread, and the check that no fork has lost them.
#pragma once

#include <c10/core/Device.h>

namespace strata {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;

c10::DeviceIndex device_count() noexcept;
c10::DeviceIndex current_device() noexcept;
void set_device(c10::DeviceIndex index);

// Raises unless `index` is a device.
void check_device(c10::DeviceIndex index);

// From the first stream on, the process has threads, which a child made by fork does not inherit.
void mark_initialized();
bool is_initialized() noexcept;
bool in_bad_fork() noexcept;
void check_fork();

}  // namespace strata
