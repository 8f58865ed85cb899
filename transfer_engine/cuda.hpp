// cuda.hpp: what the engine wants of a CUDA driver: memory of a GPU as a dmabuf, for an adapter to register (T3), and
// words that a GPU reaches, to be watched (T8). The driver is looked for when the program runs; nothing of CUDA is
// needed to build this.
#pragma once

#include "transfer_engine.hpp"

namespace transfer_engine
{

// Any thread. A thread has the CUDA context that it had before, after each call.
class CudaDriver
{
public:
    // Never unloaded: it has threads of its own.
    explicit CudaDriver(const char *library);
    static const CudaDriver &of_this_process(); // libcuda.so.1

    // Unsupported, and why, where there is no driver that works, or no GPU.
    const Status &status() const { return state; }

    // Invalid where `start` is not memory that stays on this GPU: of the host, of another one, or managed.
    Status check_memory(int device, const void *start) const;
    // The pages that hold a range of such memory, as a dmabuf: its descriptor, for the caller to close, and at which
    // byte of it the range begins.
    Status export_dmabuf(int device, const void *start, uint64_t length, int *descriptor, uint64_t *offset) const;
    // A word, 0, in a cache line of its own, in memory of the host that every GPU reaches at the address that it has
    // here. Until it is gone, the primary context of `device` stays, which pins it. Null when that fails.
    std::shared_ptr<std::atomic<uint64_t>> make_word(int device) const;

private:
    template <typename Action> Status with_context(int device, Action action) const;
    template <typename Function> bool find(Function **function, const char *name);
    Status failed(Code code, const std::string &call, int result) const;

    Status state;
    void *loaded = nullptr;

    // In the manual ("CUDA Driver API"), by its sections. A CUresult is 0 or says what is wrong; a CUdevice is an int,
    // a CUcontext a pointer, a CUdeviceptr an integer of a pointer's size.
    // Initialization, Error Handling
    int (*init)(unsigned flags) = nullptr;
    int (*error_string)(int result, const char **text) = nullptr;
    // Device Management
    int (*count_devices)(int *count) = nullptr;
    int (*get_device)(int *handle, int number) = nullptr;
    int (*get_attribute)(int *value, int attribute, int handle) = nullptr;
    // Primary Context Management, Context Management
    int (*retain_context)(void **context, int handle) = nullptr;
    int (*release_context)(int handle) = nullptr;
    int (*push_context)(void *context) = nullptr;
    int (*pop_context)(void **context) = nullptr;
    // Unified Addressing, Memory Management
    int (*ask_pointer)(void *value, int attribute, uintptr_t pointer) = nullptr;
    int (*allocate_host)(void **memory, size_t bytes, unsigned flags) = nullptr;
    int (*free_host)(void *memory) = nullptr;
    int (*export_range)(void *handle, uintptr_t start, size_t bytes, int type, unsigned long long flags) = nullptr;
};

} // namespace transfer_engine
