// Operations of the device "sim" (see simulated_device.py). Its tensors lie in the memory of the CPU, which computes them.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

namespace
{

constexpr c10::DeviceType SIM = c10::DeviceType::PrivateUse1;

std::atomic<long> n_to_host{0}, n_to_device{0}, n_items{0}, n_operations{0};
// Whether the CPU is computing an operation of the device, which moves tensors in ways that a real device does not
thread_local bool inside = false;

at::Device sim()
{
    return at::Device(SIM, 0);
}

bool is_sim(const at::Tensor &tensor)
{
    return tensor.device().type() == SIM;
}

struct Allocator final : public at::Allocator {
    at::DataPtr allocate(size_t size) override
    {
        void *memory = size ? std::malloc(size) : nullptr;
        return {memory, memory, &std::free, sim()};
    }
    at::DeleterFnPtr raw_deleter() const override
    {
        return &std::free;
    }
    void copy_data(void *target, const void *source, std::size_t size) const override
    {
        default_copy_data(target, source, size);
    }
};
Allocator allocator;
REGISTER_ALLOCATOR(SIM, &allocator);

// There is one device with one stream, on which everything has happened by the time a call returns.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<SIM> {
    c10::Stream stream() const
    {
        return c10::Stream(c10::Stream::DEFAULT, sim());
    }
    c10::Stream getStream(c10::Device) const noexcept override
    {
        return stream();
    }
    c10::Stream getDefaultStream(c10::Device) const override
    {
        return stream();
    }
    c10::Stream getNewStream(c10::Device, int) const override
    {
        return stream();
    }
    c10::Stream exchangeStream(c10::Stream other) const noexcept override
    {
        return other;
    }
    c10::Device getDevice() const override
    {
        return sim();
    }
    c10::Device exchangeDevice(c10::Device) const override
    {
        return sim();
    }
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return 1;
    }
    void record(void **event, const c10::Stream &, const c10::DeviceIndex, const c10::EventFlag) const override
    {
        *event = reinterpret_cast<void *>(1);
    }
    void block(void *, const c10::Stream &) const override
    {
    }
    bool queryEvent(void *) const override
    {
        return true;
    }
    void destroyEvent(void *, const c10::DeviceIndex) const noexcept override
    {
    }
    bool queryStream(const c10::Stream &) const override
    {
        return true;
    }
    void synchronizeStream(const c10::Stream &) const override
    {
    }
    void synchronizeEvent(void *) const override
    {
    }
    void synchronizeDevice(const c10::DeviceIndex) const override
    {
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A tensor of the CPU over the same memory
at::Tensor on_cpu(const at::Tensor &tensor)
{
    if (!is_sim(tensor))
        return tensor;
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format)
{
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>)
{
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &allocator,
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor &source, const at::Tensor &target, bool)
{
    if (!inside && !is_sim(source))
        n_to_device++;
    if (!inside && !is_sim(target))
        n_to_host++;
    on_cpu(target).copy_(on_cpu(source));
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor &source, const at::Tensor &target)
{
    target.resize_(source.sizes());
    return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor &tensor)
{
    n_items++;
    return on_cpu(tensor).item();
}

// Views

at::Tensor as_strided(const at::Tensor &tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset)
{
    auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
    return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}

at::Tensor view(const at::Tensor &tensor, c10::SymIntArrayRef sizes)
{
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshape_alias(const at::Tensor &tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides)
{
    return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

// Storage

const at::Tensor &resize(const at::Tensor &tensor, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>)
{
    auto new_sizes = C10_AS_INTARRAYREF_SLOW(sizes);
    size_t needed = c10::multiply_integers(new_sizes) * tensor.itemsize();
    auto &storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (storage.nbytes() < needed) {
        auto memory = allocator.allocate(needed);
        if (storage.nbytes())
            std::memcpy(memory.get(), storage.data(), storage.nbytes());
        storage.set_data_ptr_noswap(std::move(memory));
        storage.set_nbytes(needed);
    }
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(new_sizes);
    return tensor;
}

at::Tensor &set_storage(at::Tensor &tensor, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides)
{
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return tensor;
}

at::Tensor &set_tensor(at::Tensor &tensor, const at::Tensor &source)
{
    return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// As on CUDA, parameters that are moved to the device remain the same objects, which an optimiser may hold.
bool can_replace_data(const at::Tensor &, const at::Tensor &source)
{
    return source.layout() == at::kStrided;
}

// As on CUDA, indices and scalars may be on the CPU.
bool accepts_host_tensors(const std::string &name)
{
    return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 || name == "aten::_unsafe_index";
}

void refuse_host_tensor(const at::Tensor &tensor, const std::string &name)
{
    TORCH_CHECK(!tensor.defined() || is_sim(tensor) || tensor.dim() == 0,
                "Expected all tensors to be on the same device, but found at least two devices, ", sim(), " and ",
                tensor.device(), "! (in ", name, ")");
}

void refuse_host_tensors(const c10::OperatorHandle &operation, const torch::jit::Stack &stack)
{
    const std::string name = operation.schema().name();
    if (accepts_host_tensors(name))
        return;
    for (const auto &argument : torch::jit::last(stack, operation.schema().arguments().size())) {
        if (argument.isTensor())
            refuse_host_tensor(argument.toTensor(), name);
        else if (argument.isTensorList())
            for (const auto &tensor : argument.toTensorVector())
                refuse_host_tensor(tensor, name);
    }
}

struct Inside {
    bool before = inside;
    Inside()
    {
        inside = true;
    }
    ~Inside()
    {
        inside = before;
    }
};

void compute_on_cpu(const c10::OperatorHandle &operation, torch::jit::Stack *stack)
{
    n_operations++;
    refuse_host_tensors(operation, *stack);
    Inside scope;
    at::native::cpu_fallback(operation, stack, true, c10::DispatchKey::CPU);
}

// Convolutions have no fallback.

at::Tensor on_device(const at::Tensor &tensor)
{
    Inside scope;
    return tensor.defined() ? tensor.to(sim()) : tensor;
}

at::Tensor convolution(const at::Tensor &input, const at::Tensor &weight, const std::optional<at::Tensor> &bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups)
{
    n_operations++;
    refuse_host_tensor(input, "aten::convolution");
    refuse_host_tensor(weight, "aten::convolution");
    auto own = bias && bias->defined() ? std::optional<at::Tensor>(on_cpu(*bias)) : std::nullopt;
    return on_device(
        at::convolution(on_cpu(input), on_cpu(weight), own, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor &gradient, const at::Tensor &input,
                                                                    const at::Tensor &weight, at::IntArrayRef stride,
                                                                    at::IntArrayRef padding, at::IntArrayRef dilation,
                                                                    bool transposed, at::IntArrayRef output_padding,
                                                                    int64_t groups, std::array<bool, 3> mask)
{
    n_operations++;
    const std::array<int64_t, 1> bias_sizes{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
    auto [of_input, of_weight, of_bias] =
        at::convolution_backward(on_cpu(gradient), on_cpu(input), on_cpu(weight), at::IntArrayRef(bias_sizes), stride, padding,
                                 dilation, transposed, output_padding, groups, mask);
    return {on_device(of_input), on_device(of_weight), on_device(of_bias)};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("as_strided", as_strided);
    m.impl("view", view);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("_has_compatible_shallow_copy_type", can_replace_data);
    m.impl("convolution_overrideable", convolution);
    m.impl("convolution_backward_overrideable", convolution_backward);
    m.impl("resize_", resize);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Tensor", set_tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m)
{
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

extern "C" void sim_counts(long *counts)
{
    counts[0] = n_to_host;
    counts[1] = n_to_device;
    counts[2] = n_items;
    counts[3] = n_operations;
}
