// Tensors in device memory: allocation, storage sizes, and the view of the memory that kernels work on.
#pragma once

#include <ATen/core/Tensor.h>

namespace strata {

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype, c10::Device device);

// Changes a storage's size in stream order; its content stays as far as both sizes go.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

// The same memory as a host tensor that owns nothing, for a task: device memory is freed in stream order, so it outlives the task.
// A vendor's kernel takes the address instead.
at::Tensor host_alias(const at::Tensor& tensor);

}  // namespace strata
