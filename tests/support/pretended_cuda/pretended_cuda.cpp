// A CUDA device in the memory of the CPU, for a build of PyTorch without CUDA (see device.py). Whatever would let the host wait
// for a GPU is told to Python, and so is page-locked memory that the host writes into before it was copied.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace
{

constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;
constexpr int MOST_DEVICES = 2;

int n_devices = 1;
thread_local int current = 0;
// Whether the CPU is computing an operation of the device, which moves tensors in ways that a real device does not
thread_local bool inside = false;

void (*listener)(const char *) = nullptr;

void tell(const std::string &event)
{
    if (listener)
        listener(event.c_str());
}

bool is_cuda(const at::Tensor &tensor)
{
    return tensor.device().type() == CUDA;
}

int index_of(std::optional<at::Device> device)
{
    return device && device->has_index() ? device->index() : current;
}

// Page-locked memory, and the copies from and to it for which the host has not waited yet

std::recursive_mutex mutex;
std::map<char *, size_t> page_locked; // size by beginning

bool is_page_locked(const void *memory)
{
    std::lock_guard<std::recursive_mutex> guard(mutex);
    char *address = (char *)memory;
    auto after = page_locked.upper_bound(address);
    if (after == page_locked.begin())
        return false;
    const auto &[begin, size] = *std::prev(after);
    return address < begin + size;
}

struct Copy {
    char *host;
    std::string bytes; // what has to be there at the end
    bool is_to_host;
};
std::vector<Copy> unfinished;

void finish_copies()
{
    std::lock_guard<std::recursive_mutex> guard(mutex);
    for (const Copy &copy : unfinished) {
        if (copy.is_to_host)
            std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
        else if (std::memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) != 0)
            tell("HAZARD page-locked memory was written before it was copied to the device");
    }
    unfinished.clear();
}

void wait(const std::string &what)
{
    tell("WAIT " + what);
    finish_copies();
}

void free_page_locked(void *memory)
{
    std::lock_guard<std::recursive_mutex> guard(mutex);
    char *begin = (char *)memory, *end = begin + page_locked[begin];
    // PyTorch keeps such memory until the copies have ended, whose result nobody can see.
    auto is_within = [&](const Copy &copy) { return copy.host >= begin && copy.host < end; };
    unfinished.erase(std::remove_if(unfinished.begin(), unfinished.end(), is_within), unfinished.end());
    page_locked.erase(begin);
    std::free(memory);
}

struct PageLockedAllocator final : at::Allocator {
    at::DataPtr allocate(size_t size) override
    {
        size = std::max<size_t>(size, 64);
        void *memory = std::malloc(size);
        std::lock_guard<std::recursive_mutex> guard(mutex);
        page_locked[(char *)memory] = size;
        return {memory, memory, &free_page_locked, at::Device(at::kCPU)};
    }
    at::DeleterFnPtr raw_deleter() const override
    {
        return &free_page_locked;
    }
    void copy_data(void *target, const void *source, size_t size) const override
    {
        default_copy_data(target, source, size);
    }
};
PageLockedAllocator page_locked_allocator;

struct DeviceAllocator final : at::Allocator {
    int device;
    explicit DeviceAllocator(int device) : device(device)
    {
    }
    at::DataPtr allocate(size_t size) override
    {
        void *memory = size ? std::malloc(size) : nullptr;
        if (memory)
            std::memset(memory, 0xA5, size); // Never zeros by chance
        return {memory, memory, &std::free, at::Device(CUDA, device)};
    }
    at::DeleterFnPtr raw_deleter() const override
    {
        return &std::free;
    }
    void copy_data(void *target, const void *source, size_t size) const override
    {
        default_copy_data(target, source, size);
    }
};
DeviceAllocator allocators[MOST_DEVICES] = {DeviceAllocator(0), DeviceAllocator(1)};
REGISTER_ALLOCATOR(CUDA, &allocators[0]);

std::vector<at::Generator> &generators()
{
    static std::vector<at::Generator> each{at::detail::createCPUGenerator(11), at::detail::createCPUGenerator(12)};
    return each;
}

// What PyTorch asks of a device

int exchange(int device)
{
    int before = current;
    if (device >= 0)
        current = device;
    return before;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override
    {
        return CUDA;
    }
    c10::Device exchangeDevice(c10::Device device) const override
    {
        return c10::Device(CUDA, exchange(device.index()));
    }
    c10::Device getDevice() const override
    {
        return c10::Device(CUDA, current);
    }
    void setDevice(c10::Device device) const override
    {
        exchange(device.index());
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override
    {
        exchange(device.index());
    }
    // There is one stream for each device, on which everything has happened by the time a call returns.
    c10::Stream getStream(c10::Device device) const override
    {
        return c10::Stream(c10::Stream::DEFAULT, c10::Device(CUDA, index_of(device)));
    }
    c10::Stream getDefaultStream(c10::Device device) const override
    {
        return getStream(device);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override
    {
        return getStream(device);
    }
    c10::Stream getNewStream(c10::Device device, int) const override
    {
        return getStream(device);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        return stream;
    }
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return n_devices;
    }
    void record(void **event, const c10::Stream &, const c10::DeviceIndex, const c10::EventFlag) const override
    {
        *event = (void *)1;
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
        wait("stream");
    }
    void synchronizeEvent(void *) const override
    {
        wait("event");
    }
    void synchronizeDevice(const c10::DeviceIndex) const override
    {
        wait("device");
    }
    void recordDataPtrOnStream(const c10::DataPtr &, const c10::Stream &) const override
    {
    }
    double elapsedTime(void *, void *, const c10::DeviceIndex) const override
    {
        return 0.0;
    }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

} // namespace

// The macro below wants this name, in the global namespace.
struct CUDAHooks : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs)
    {
    }
    void init() const override
    {
    }
    bool hasCUDA() const override
    {
        return true;
    }
    bool hasCUDART() const override
    {
        return true;
    }
    bool isBuilt() const override
    {
        return true;
    }
    bool isAvailable() const override
    {
        return true;
    }
    bool hasPrimaryContext(at::DeviceIndex) const override
    {
        return true;
    }
    at::DeviceIndex current_device() const override
    {
        return current;
    }
    at::DeviceIndex getCurrentDevice() const override
    {
        return current;
    }
    void setCurrentDevice(at::DeviceIndex device) const override
    {
        exchange(device);
    }
    at::DeviceIndex exchangeDevice(at::DeviceIndex device) const override
    {
        return exchange(device);
    }
    at::DeviceIndex maybeExchangeDevice(at::DeviceIndex device) const override
    {
        return exchange(device);
    }
    at::DeviceIndex deviceCount() const override
    {
        return n_devices;
    }
    int getNumGPUs() const override
    {
        return n_devices;
    }
    bool isPinnedPtr(const void *memory) const override
    {
        return is_page_locked(memory);
    }
    at::Allocator *getPinnedMemoryAllocator() const override
    {
        return &page_locked_allocator;
    }
    at::Allocator *getCUDADeviceAllocator() const override
    {
        return &allocators[0];
    }
    const at::Generator &getDefaultGenerator(at::DeviceIndex device) const override
    {
        return generators()[device < 0 ? current : device];
    }
    at::Generator getNewGenerator(at::DeviceIndex) const override
    {
        return at::detail::createCPUGenerator();
    }
    at::Device getDeviceFromPtr(void *) const override
    {
        return at::Device(CUDA, current);
    }
    void deviceSynchronize(at::DeviceIndex) const override
    {
        wait("device");
    }
    std::string showConfig() const override
    {
        return "pretended";
    }
};
namespace at
{
REGISTER_CUDA_HOOKS(CUDAHooks)
}

namespace
{

// Operations of the device itself; the CPU computes all others

at::Tensor on_cpu(const at::Tensor &tensor)
{
    if (!is_cuda(tensor))
        return tensor;
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    at::Tensor same = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
    if (tensor.is_conj())
        same = same.conj();
    return tensor.is_neg() ? same._neg_view() : same;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format)
{
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocators[index_of(device)],
                                     c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>)
{
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides),
                                             &allocators[index_of(device)], c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                             c10::dtype_or_default(type));
}

// A copy that goes on while the host does: its page-locked memory keeps its old content, or rubbish, until the host waits.
void copy_later(const at::Tensor &source, const at::Tensor &target, bool is_to_host)
{
    const at::Tensor &host = is_to_host ? target : source;
    char *memory = (char *)host.data_ptr();
    std::lock_guard<std::recursive_mutex> guard(mutex);
    on_cpu(target).copy_(on_cpu(source));
    unfinished.push_back({memory, std::string(memory, host.nbytes()), is_to_host});
    if (is_to_host)
        std::memset(memory, 0xC3, host.nbytes());
}

at::Tensor copied(const at::Tensor &source, const at::Tensor &target, bool non_blocking)
{
    if (source.numel() == 0)
        return target;
    if (!inside && is_cuda(source) != is_cuda(target)) {
        bool is_to_host = is_cuda(source);
        const at::Tensor &host = is_to_host ? target : source;
        if (non_blocking && is_page_locked(host.data_ptr()) && host.is_non_overlapping_and_dense()) {
            copy_later(source, target, is_to_host);
            return target;
        }
        if (is_to_host || !non_blocking) // What is pageable was copied elsewhere by the time the call returns.
            wait(is_to_host ? "copy to the host" : "copy to the device");
    }
    on_cpu(target).copy_(on_cpu(source));
    return target;
}

at::Tensor &copy_(at::Tensor &target, const at::Tensor &source, bool non_blocking)
{
    if (!target.is_same(source))
        copied(source.sizes() == target.sizes() ? source : source.expand(target.sizes()), target, non_blocking);
    return target;
}

at::Tensor copy_from(const at::Tensor &source, const at::Tensor &target, bool non_blocking)
{
    return copied(source, target, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor &source, const at::Tensor &target)
{
    target.resize_(source.sizes());
    return copied(source, target, false);
}

at::Scalar item(const at::Tensor &tensor)
{
    wait("item");
    return on_cpu(tensor).item();
}

at::Tensor as_strided(const at::Tensor &tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset)
{
    auto number = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
    return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides), number);
}

at::Tensor view(const at::Tensor &tensor, c10::SymIntArrayRef size)
{
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor &tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef strides)
{
    return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides));
}

const at::Tensor &resize_(const at::Tensor &tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>)
{
    auto numbers = C10_AS_INTARRAYREF_SLOW(size);
    auto *implementation = tensor.unsafeGetTensorImpl();
    auto &storage = implementation->unsafe_storage();
    size_t needed = (c10::multiply_integers(numbers) + tensor.storage_offset()) * tensor.itemsize();
    if (storage.nbytes() < needed) {
        at::DataPtr larger = allocators[tensor.device().index()].allocate(needed);
        std::memcpy(larger.get(), storage.data(), storage.nbytes());
        storage.set_data_ptr_noswap(std::move(larger));
        storage.set_nbytes(needed);
    }
    implementation->set_sizes_contiguous(numbers);
    return tensor;
}

at::Tensor &set_to_part(at::Tensor &tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef strides)
{
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
    return tensor;
}

at::Tensor &set_to_tensor(at::Tensor &tensor, const at::Tensor &source)
{
    return set_to_part(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor &set_to_storage(at::Tensor &tensor, at::Storage storage)
{
    int64_t n = storage.nbytes() / tensor.itemsize();
    return set_to_part(tensor, storage, 0, {n}, {1});
}

int64_t attention_without_kernels(const at::Tensor &, const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &,
                                  double, bool, std::optional<double>, bool)
{
    return 0;
}

// Operations of CUDA whose result has a shape that depends on what is on the device, or that check it
const std::set<std::string> WAITING = {
    "aten::nonzero",           "aten::masked_select", "aten::_unique",
    "aten::_unique2",          "aten::unique_dim",    "aten::unique_consecutive",
    "aten::equal",             "aten::multinomial",   "aten::repeat_interleave.Tensor",
    "aten::bincount",          "aten::histc",         "aten::is_set_to",
    "aten::linalg_eigh",       "aten::linalg_svd",    "aten::_linalg_check_errors",
    "aten::normal.Tensor_Tensor", "aten::normal.float_Tensor",
};

// The arguments of an operation: tensors on one device, besides numbers and indices on the host
class Arguments
{
  public:
    bool has_mask = false;
    int device = -1; // of the tensors, -1 if none of them is on one

    Arguments(const std::string &name) : name(name)
    {
        is_indexing = name.find("index") != std::string::npos;
        may_differ = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 ||
                     name == "aten::_unsafe_index" || name.rfind("aten::_foreach", 0) == 0;
    }

    void add(const c10::IValue &value)
    {
        if (value.isTensor())
            add(value.toTensor());
        else if (value.isTensorList())
            for (const at::Tensor &tensor : value.toTensorVector())
                add(tensor);
        else if (value.isList())
            for (const c10::IValue &each : value.toList().vec())
                if (each.isTensor() && each.toTensor().defined()) {
                    add(each.toTensor());
                    auto type = each.toTensor().scalar_type();
                    has_mask |= is_indexing && (type == at::kBool || type == at::kByte);
                }
    }

  private:
    std::string name;
    bool is_indexing, may_differ;

    void add(const at::Tensor &tensor)
    {
        if (!tensor.defined())
            return;
        if (is_cuda(tensor)) {
            int other = tensor.device().index();
            TORCH_CHECK(device < 0 || device == other, refusal(device, tensor.device()));
            device = other;
        } else if (tensor.dim() > 0) {
            TORCH_CHECK(may_differ, refusal(0, tensor.device()));
            if (is_indexing && !inside)
                wait("index on the host in " + name);
        }
    }

    std::string refusal(int one, const at::Device &other) const
    {
        return "Expected all tensors to be on the same device, but found at least two devices, cuda:" + std::to_string(one) +
               " and " + other.str() + "! (in " + name + ")";
    }
};

// While the CPU computes an operation of a device
class Computing
{
    bool was_inside = inside;
    int before = current;

  public:
    explicit Computing(int device)
    {
        inside = true;
        exchange(device);
    }
    ~Computing()
    {
        inside = was_inside;
        current = before;
    }
};

void compute(const c10::OperatorHandle &operation, torch::jit::Stack *stack)
{
    const auto &schema = operation.schema();
    const std::string name = schema.name();
    const std::string overload = schema.overload_name().empty() ? name : name + "." + schema.overload_name();
    size_t n = schema.arguments().size(), first = stack->size() - n;
    Arguments arguments(name);
    for (size_t i = 0; i < n; i++)
        arguments.add((*stack)[first + i]);
    for (size_t i = 0; i < n; i++) {
        c10::IValue &argument = (*stack)[first + i];
        if (argument.isNone() && schema.arguments()[i].type()->str() == "Generator?")
            argument = c10::IValue(generators()[arguments.device < 0 ? current : arguments.device]);
    }
    if (!inside && arguments.has_mask)
        wait("index of bools in " + overload);
    if (!inside && (WAITING.count(name) || WAITING.count(overload)))
        wait(overload);
    Computing computing(arguments.device);
    at::native::cpu_fallback(operation, stack, false, c10::DispatchKey::CPU);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library)
{
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("copy_", copy_);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", item);
    library.impl("as_strided", as_strided);
    library.impl("view", view);
    library.impl("_reshape_alias", reshape_alias);
    library.impl("resize_", resize_);
    library.impl("unfold", at::native::unfold);
    library.impl("set_.source_Storage_storage_offset", set_to_part);
    library.impl("set_.source_Tensor", set_to_tensor);
    library.impl("set_.source_Storage", set_to_storage);
    library.impl("_fused_sdp_choice", attention_without_kernels);
}

TORCH_LIBRARY_IMPL(_, CUDA, library)
{
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY(pretended_cuda, library)
{
    library.def("get_state(int device) -> Tensor", [](int64_t device) { return generators()[device].get_state(); });
    library.def("set_state(int device, Tensor state) -> ()",
                [](int64_t device, at::Tensor state) { generators()[device].set_state(state); });
    library.def("seed(int device, int seed) -> ()",
                [](int64_t device, int64_t seed) { generators()[device].set_current_seed(seed); });
}

extern "C" void pretended_listen(void (*function)(const char *))
{
    listener = function;
}

extern "C" void pretended_wait(const char *what)
{
    wait(what);
}

extern "C" void pretended_set_count(int n)
{
    n_devices = std::min(n, MOST_DEVICES);
}

extern "C" int pretended_current()
{
    return current;
}

extern "C" int pretended_exchange(int device)
{
    return exchange(device);
}
