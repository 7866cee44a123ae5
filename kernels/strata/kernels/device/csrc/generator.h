// Random number generator of a device. The host draws one number a kernel, which seeds the kernel's own generator: results follow
// from the order of calls, however streams interleave.
#pragma once

#include <ATen/core/Generator.h>

namespace strata {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator make_generator(c10::DeviceIndex device);

// Host generator for one kernel: seeded by the next number of `generator`, or of the default generator of `device`.
at::Generator kernel_generator(const std::optional<at::Generator>& generator, c10::DeviceIndex device);

}  // namespace strata
