// Copies between host and device, within a device, and between devices.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "devices.h"
#include "memory.h"
#include "pinned.h"
#include "streams.h"

namespace strata {
namespace {

bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kDevice; }

// Between devices, the source's stream copies: after what the destination's stream has queued, and before what follows there.
void between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto source = current_stream(from.device().index()), destination = current_stream(to.device().index());
  wait_for(source, record(destination));
  enqueue(source, [from = host_alias(from), to = host_alias(to)] { to.copy_(from); });
  wait_for(destination, record(source));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  TORCH_CHECK(from.defined() && to.defined(), "copy_ needs two tensors");
  if (to.numel() == 0) {
    return to;
  }
  if (on_device(from) && on_device(to)) {
    if (from.device() == to.device()) {
      enqueue(current_stream(to.device().index()), [from = host_alias(from), to = host_alias(to)] { to.copy_(from); });
    } else {
      between_devices(from, to);
    }
    return to;
  }
  const at::Tensor& host = on_device(from) ? to : from;
  TORCH_CHECK(host.is_cpu(), "strata copies from and to the CPU, not ", host.device());
  auto stream = current_stream((on_device(from) ? from : to).device().index());
  // An alias of the host's memory, too: the last owner of a tensor may be a Python object, which a stream must not release.
  auto owner = pinned_owner(host.data_ptr());
  enqueue(stream, [owner, from = host_alias(from), to = host_alias(to)] { to.copy_(from); });
  if (!non_blocking || !owner) {
    synchronize(stream);  // the caller may change or free memory that is not pinned
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

// A copy resolves lazy conjugates and negatives itself. torch's way to resolve them is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace strata
