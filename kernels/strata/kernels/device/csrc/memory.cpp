#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "allocator.h"
#include "devices.h"
#include "streams.h"

namespace strata {

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, allocator(), keys, dtype);
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "the storage is not resizable");
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr grown = allocator()->allocate(bytes);
  size_t common = std::min(bytes, storage.nbytes());
  if (common > 0) {
    auto copy = [to = grown.get(), from = storage.data(), common] { std::memcpy(to, from, common); };
    enqueue(current_stream(storage.device().index()), copy);
  }
  storage.set_data_ptr_noswap(std::move(grown));
  storage.set_nbytes(bytes);
}

at::Tensor host_alias(const at::Tensor& tensor) {
  auto options = c10::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

namespace {

c10::Device device_from(std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "device strata has strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "only host memory can be pinned");
  return device.has_value() && device->has_index() ? *device : c10::Device(kDevice, current_device());
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout, std::optional<c10::Device> device,
    std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device_from(layout, device, pin_memory));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_with_strides(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  return empty_strided(size, stride, c10::dtype_or_default(dtype), device_from(layout, device, pin_memory));
}

void grow_storage(const at::Tensor& tensor) {
  size_t bytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  if (tensor.numel() > 0 && bytes > tensor.storage().nbytes()) {
    resize_storage(*tensor.storage().unsafeGetStorageImpl(), bytes);
  }
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() != size) {
    impl->set_sizes_contiguous(size);
    grow_storage(tensor);
  }
  if (format.has_value()) {
    TORCH_CHECK(*format != c10::MemoryFormat::Preserve, "resize_ cannot preserve a memory format");
    impl->empty_tensor_restride(*format);
  }
  return tensor;
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(tensor, storage, offset, size, stride);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  grow_storage(tensor);
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  auto length = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_storage(tensor, std::move(storage), 0, {length}, {});
}

at::Tensor& set_to_nothing(at::Tensor& tensor) {
  return set_storage(tensor, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0, {0}, {});
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  synchronize(current_stream(tensor.device().index()));
  return host_alias(tensor).item();
}

bool equal(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.device() == b.device(), "Expected all tensors to be on the same device, but found ", a.device(), " and ", b.device());
  synchronize(current_stream(a.device().index()));
  return host_alias(a).equal(host_alias(b));
}

// Lets a parameter become one of the device in place when its module moves, so that tied weights stay tied.
bool has_compatible_shallow_copy_type(const at::Tensor& tensor, const at::Tensor& from) {
  return tensor.layout() == c10::kStrided && from.layout() == c10::kStrided;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { allocator()->recordStream(tensor.storage().data_ptr(), stream); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_with_strides);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_", set_to_nothing);
  m.impl("_local_scalar_dense", read_scalar);
  m.impl("equal", equal);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  // Views change only how a tensor looks at its storage: torch's own work for any device.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
}

}  // namespace strata
