#include "cuda.hpp"

#include <bit>
#include <dlfcn.h>
#include <new>
#include <unistd.h>
#include <utility>

namespace transfer_engine
{

using std::to_string;

// cuda.h; the manual's "Data types used by CUDA driver".
constexpr int unified_addressing = 41, dma_buf_supported = 124;    // CUdevice_attribute
constexpr int memory_type = 2, is_managed = 8, device_ordinal = 9; // CUpointer_attribute
constexpr int memory_of_device = 2;                                // CUmemorytype: CU_MEMORYTYPE_DEVICE
constexpr unsigned portable = 1, device_map = 2;                   // CU_MEMHOSTALLOC_
constexpr int dma_buf_fd = 1;                                      // CUmemRangeHandleType

// With the names that the library has: cuda.h makes the second version of a function the one that is meant.
CudaDriver::CudaDriver(const char *library)
{
    const std::string none = "no CUDA driver: ";
    loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (loaded == nullptr) {
        state = {.code = Code::unsupported, .message = none + dlerror()};
        return;
    }
    if (!find(&init, "cuInit") || !find(&error_string, "cuGetErrorString") ||
        !find(&count_devices, "cuDeviceGetCount") || !find(&get_device, "cuDeviceGet") ||
        !find(&get_attribute, "cuDeviceGetAttribute") || !find(&retain_context, "cuDevicePrimaryCtxRetain") ||
        !find(&release_context, "cuDevicePrimaryCtxRelease_v2") || !find(&push_context, "cuCtxPushCurrent_v2") ||
        !find(&pop_context, "cuCtxPopCurrent_v2") || !find(&ask_pointer, "cuPointerGetAttribute") ||
        !find(&allocate_host, "cuMemHostAlloc") || !find(&free_host, "cuMemFreeHost")) {
        state = {.code = Code::unsupported, .message = none + dlerror()};
        return;
    }
    find(&export_range, "cuMemGetHandleForAddressRange"); // since 11.7
    int gpus = 0;
    if (const int result = init(0); result != 0)
        state = failed(Code::unsupported, none + "cuInit()", result);
    else if (const int counted = count_devices(&gpus); counted != 0)
        state = failed(Code::unsupported, none + "cuDeviceGetCount()", counted);
    else if (gpus == 0)
        state = {.code = Code::unsupported, .message = "cuDeviceGetCount(): no GPU"};
}

const CudaDriver &CudaDriver::of_this_process()
{
    static const CudaDriver &driver = *new CudaDriver("libcuda.so.1"); // for good: words may live as long
    return driver;
}

template <typename Function> bool CudaDriver::find(Function **function, const char *name)
{
    *function = reinterpret_cast<Function *>(dlsym(loaded, name));
    return *function != nullptr;
}

Status CudaDriver::failed(Code code, const std::string &call, int result) const
{
    const char *reason = nullptr;
    const bool known = error_string(result, &reason) == 0 && reason != nullptr;
    return {.code = code, .message = call + ": " + (known ? reason : "error " + to_string(result))};
}

// Does something with the primary context of a GPU, which is made current for it.
template <typename Action> Status CudaDriver::with_context(int device, Action action) const
{
    if (!state.ok()) return state;
    const std::string number = to_string(device);
    int handle = 0;
    void *context = nullptr;
    if (const int result = get_device(&handle, device); result != 0)
        return failed(Code::invalid, "cuDeviceGet(" + number + ")", result);
    if (const int result = retain_context(&context, handle); result != 0)
        return failed(Code::failed, "cuDevicePrimaryCtxRetain(" + number + ")", result);
    Status status;
    if (const int result = push_context(context); result != 0) {
        status = failed(Code::failed, "cuCtxPushCurrent(" + number + ")", result);
    } else {
        status = action(handle);
        pop_context(&context);
    }
    release_context(handle);
    return status;
}

Status CudaDriver::check_memory(int device, const void *start) const
{
    return with_context(device, [&](int) -> Status {
        int type = 0, managed = 0, owner = host;
        for (const auto &[attribute, value] :
             {std::pair(memory_type, &type), std::pair(is_managed, &managed), std::pair(device_ordinal, &owner)})
            if (const int result = ask_pointer(value, attribute, std::bit_cast<uintptr_t>(start)); result != 0)
                return failed(Code::invalid, "cuPointerGetAttribute(" + to_string(attribute) + ")", result);
        if (type == memory_of_device && managed == 0 && owner == device) return {};
        const std::string what = type != memory_of_device ? "of the host"
                                 : managed != 0           ? "managed, which moves"
                                                          : "of GPU " + to_string(owner);
        return {.code = Code::invalid,
                .message = "cuPointerGetAttribute(): the memory is " + what + ", not of GPU " + to_string(device)};
    });
}

Status CudaDriver::export_dmabuf(int device, const void *start, uint64_t length, int *descriptor,
                                 uint64_t *offset) const
{
    return with_context(device, [&](int handle) -> Status {
        int supported = 0;
        if (const int result = get_attribute(&supported, dma_buf_supported, handle); result != 0)
            return failed(Code::failed, "cuDeviceGetAttribute(DMA_BUF_SUPPORTED)", result);
        if (supported == 0 || export_range == nullptr)
            return {.code = Code::unsupported,
                    .message = "cuDeviceGetAttribute(DMA_BUF_SUPPORTED): GPU " + to_string(device) + " has no dmabuf"};
        // Whole pages of the host are exported, whatever else is on them; who registers them cuts them to the range.
        const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        const auto address = std::bit_cast<uintptr_t>(start);
        const uintptr_t first = address / page * page, end = (address + length + page - 1) / page * page;
        if (const int result = export_range(descriptor, first, end - first, dma_buf_fd, 0); result != 0)
            return failed(Code::failed, "cuMemGetHandleForAddressRange(" + to_string(end - first) + " bytes)", result);
        *offset = address - first;
        return {};
    });
}

std::shared_ptr<std::atomic<uint64_t>> CudaDriver::make_word(int device) const
{
    using Word = std::atomic<uint64_t>;
    constexpr size_t cache_line = 64;
    std::shared_ptr<Word> word;
    with_context(device, [&](int handle) -> Status {
        // With unified addressing, memory of cuMemHostAlloc has the same address here and on all GPUs.
        int unified = 0;
        if (get_attribute(&unified, unified_addressing, handle) != 0 || unified == 0) return {};
        void *memory = nullptr, *kept = nullptr;
        if (retain_context(&kept, handle) != 0) return {}; // once more: with its context, the memory would go
        if (allocate_host(&memory, cache_line, portable | device_map) != 0) {
            release_context(handle);
            return {};
        }
        word = std::shared_ptr<Word>(new (memory) Word(0), [this, device](Word *old) {
            with_context(device, [&](int its_handle) -> Status {
                free_host(old);
                release_context(its_handle);
                return {};
            });
        });
        return {};
    });
    return word;
}

} // namespace transfer_engine
