#include "launch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>

#include <functional>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "devices.h"
#include "fallback.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace strata {
namespace {

using Values = std::vector<c10::IValue>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

// An argument or result with each of its tensors changed; absent ones stay absent.
c10::IValue with_tensors(const c10::IValue& value, const Change& change) {
  auto changed = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) {
    return changed(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(changed(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::optional(changed(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  with_tensors(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

// The one device of all arguments. Host tensors of one value may be among them, as on a GPU.
std::optional<c10::Device> device_of(const Values& arguments) {
  std::optional<c10::Device> found;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.device().type() == kDevice && !found.has_value()) {
        found = tensor.device();
      }
    });
  }
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      TORCH_CHECK(
          !found.has_value() || tensor.device() == *found || (tensor.is_cpu() && tensor.dim() == 0),
          "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ", tensor.device(), "!");
    });
  }
  return found;
}

// A tensor without memory. Host numbers stay themselves, as with tensors on a device.
at::Tensor meta_twin(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    return tensor;
  }
  at::Tensor twin = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  twin._set_conj(tensor.is_conj());
  twin._set_neg(tensor.is_neg());
  return twin;
}

// What the task sees: device memory as it will be when its turn comes, and host numbers as they are now.
at::Tensor for_task(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    return host_alias(tensor);
  }
  at::Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {  // a Python number, which does not widen dtypes as a tensor does
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool has_new_results(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (!is_written(result)) {
      return true;
    }
  }
  return false;
}

bool is_generator(const c10::Argument& argument) { return argument.name() == "generator"; }

// Results and written arguments as the meta kernel leaves them. It also raises what is wrong about shapes and dtypes, in the call.
std::pair<Values, Values> infer(const c10::OperatorHandle& op, const Values& arguments) {
  Values twins;
  for (size_t index = 0; index < arguments.size(); ++index) {
    bool drop = is_generator(op.schema().arguments()[index]);
    twins.push_back(drop ? c10::IValue() : with_tensors(arguments[index], meta_twin));
  }
  torch::jit::Stack stack(twins.begin(), twins.end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  return {Values(stack.begin(), stack.end()), twins};
}

// `out=` tensors of another size are resized, with torch's warning unless they were empty.
void resize_written(const c10::FunctionSchema& schema, const Values& arguments, const Values& twins) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (!is_written(schema.arguments()[index]) || !arguments[index].isTensor() || !arguments[index].toTensor().defined()) {
      continue;
    }
    const at::Tensor &tensor = arguments[index].toTensor(), &twin = twins[index].toTensor();
    if (at::native::resize_output(tensor, twin.sizes()) && twin.is_non_overlapping_and_dense()) {
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides());
    }
  }
}

// The argument that a result of an in-place or out= operator is.
c10::IValue written_argument(const c10::FunctionSchema& schema, const c10::Argument& result, const Values& arguments) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    const auto* alias = schema.arguments()[index].alias_info();
    if (alias && *alias == *result.alias_info()) {
      return arguments[index];
    }
  }
  TORCH_CHECK(false, schema, " returns an argument that it does not have");
}

void copy_into(const c10::IValue& to, const c10::IValue& from) {
  std::vector<at::Tensor> targets, sources;
  for_each_tensor(to, [&](const at::Tensor& tensor) { targets.push_back(tensor); });
  for_each_tensor(from, [&](const at::Tensor& tensor) { sources.push_back(tensor); });
  TORCH_CHECK(targets.size() == sources.size(), "a kernel returned ", sources.size(), " tensors, its shapes are of ", targets.size());
  for (size_t index = 0; index < targets.size(); ++index) {
    targets[index].copy_(sources[index]);
  }
}

bool takes_same_arguments(const c10::FunctionSchema& with_out, const c10::FunctionSchema& schema) {
  size_t count = schema.arguments().size();
  if (with_out.arguments().size() != count + schema.returns().size()) {
    return false;
  }
  for (size_t index = 0; index < count; ++index) {
    const auto &a = with_out.arguments()[index], &b = schema.arguments()[index];
    if (a.name() != b.name() || *a.type() != *b.type() || is_written(a)) {
      return false;
    }
  }
  for (size_t index = count; index < with_out.arguments().size(); ++index) {
    const auto& argument = with_out.arguments()[index];
    if (!is_written(argument) || *argument.type() != *schema.returns()[index - count].type()) {
      return false;
    }
  }
  return true;
}

// Gradients that nobody asked for are not defined, and no out= overload leaves them out.
bool all_defined(const Values& results) {
  bool defined = true;
  for (const auto& result : results) {
    defined &= !result.isNone() && (!result.isTensor() || result.toTensor().defined());
  }
  return defined;
}

// Without an out= overload, the kernel's results are copied into the device's.
Task task_for(const c10::OperatorHandle& op, Values arguments, Values results) {
  constexpr c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  if (auto writing = results.empty() || !all_defined(results) ? std::nullopt : out_overload(op)) {
    arguments.insert(arguments.end(), results.begin(), results.end());
    return [op = *writing, arguments] {
      torch::jit::Stack stack(arguments.begin(), arguments.end());
      op.redispatchBoxed(cpu, &stack);
    };
  }
  return [op, arguments, results] {
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    op.redispatchBoxed(cpu, &stack);
    for (size_t index = 0; index < results.size(); ++index) {
      copy_into(results[index], stack[index]);
    }
  };
}

}  // namespace

std::optional<c10::OperatorHandle> out_overload(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, std::optional<c10::OperatorHandle>>;
  std::lock_guard lock(mutex);
  auto found = known->find(op.operator_name());
  if (found != known->end()) {
    return found->second;
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  std::optional<c10::OperatorHandle> match;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name == op.operator_name().name && !match.has_value()) {
      auto candidate = dispatcher.findSchema(name);
      if (candidate.has_value() && takes_same_arguments(candidate->schema(), op.schema())) {
        match = candidate;
      }
    }
  }
  return (*known)[op.operator_name()] = match;
}

void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto last = torch::jit::last(*stack, schema.arguments().size());
  Values arguments(last.begin(), last.end());
  auto device = device_of(arguments);
  if (!device.has_value()) {  // empty lists
    fall_back(op, stack);
    return;
  }
  c10::DeviceGuard guard(*device);
  auto stream = current_stream(device->index());

  bool makes_results = has_new_results(schema);
  Values inferred, twins;
  if (makes_results || op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    std::tie(inferred, twins) = infer(op, arguments);
    resize_written(schema, arguments, twins);
  }

  auto allocate = [&](const at::Tensor& twin) { return empty_strided(twin.sizes(), twin.strides(), twin.scalar_type(), *device); };
  Values results, made;
  for (size_t index = 0; index < schema.returns().size(); ++index) {
    if (is_written(schema.returns()[index])) {
      results.push_back(written_argument(schema, schema.returns()[index], arguments));
    } else {
      results.push_back(with_tensors(inferred[index], allocate));
      made.push_back(with_tensors(results.back(), host_alias));
    }
  }

  Values inputs;
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (is_generator(schema.arguments()[index])) {
      inputs.emplace_back(kernel_generator(arguments[index].toOptional<at::Generator>(), device->index()));
    } else {
      inputs.push_back(with_tensors(arguments[index], for_task));
    }
  }
  enqueue(stream, task_for(op, std::move(inputs), std::move(made)));
  torch::jit::drop(*stack, arguments.size());
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace strata
