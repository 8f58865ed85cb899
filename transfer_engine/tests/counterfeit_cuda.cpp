// counterfeit_cuda.cpp: libcuda.so.1 for cuda_test.cpp, without a GPU. It notes how it is called and holds the caller
// to what the manual says of contexts. That shows the calls and their arguments; what a GPU and its driver would do
// with them, it cannot show.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <string>
#include <vector>

namespace counterfeit
{

// What the test wants.
int devices = 2;
std::string failing;    // this function returns not_supported
int attribute = 1;      // of each device, whichever is asked for
uintptr_t memory = 0;   // of a GPU begins here
size_t memory_size = 0; // and is so long
int memory_type = 2, managed = 0, owner = 0;

// What it has seen.
std::vector<std::string> calls;
std::array<int, 2> retained;  // primary contexts
std::vector<void *> current;  // the stack of contexts; of one thread
std::vector<void *> pinned;   // memory of the host
std::vector<int> descriptors; // handed out

} // namespace counterfeit

using namespace counterfeit;
using std::to_string;

namespace
{

constexpr int invalid_value = 1, not_initialized = 3, invalid_device = 101, invalid_context = 201, not_supported = 801;
bool initialized = false;

int note(const std::string &name, const std::string &arguments)
{
    calls.push_back(name + "(" + arguments + ")");
    if (!initialized && name != "cuInit") return not_initialized;
    return name == failing ? not_supported : 0;
}

int note_with_context(const std::string &name, const std::string &arguments)
{
    const int result = note(name, arguments);
    return result == 0 && current.empty() ? invalid_context : result;
}

} // namespace

extern "C" {

int cuInit(unsigned flags)
{
    const int result = note("cuInit", to_string(flags));
    initialized = result == 0;
    return result;
}

int cuGetErrorString(int error, const char **text)
{
    switch (error) {
    case invalid_value: *text = "invalid argument"; break;
    case invalid_device: *text = "invalid device ordinal"; break;
    case invalid_context: *text = "invalid device context"; break;
    case not_supported: *text = "operation not supported"; break;
    default: return invalid_value;
    }
    return 0;
}

int cuDeviceGetCount(int *count)
{
    *count = devices;
    return note("cuDeviceGetCount", "");
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    const int result = note("cuDeviceGet", to_string(ordinal));
    return result == 0 && ordinal >= devices ? invalid_device : result;
}

int cuDeviceGetAttribute(int *value, int which, int device)
{
    *value = attribute;
    return note("cuDeviceGetAttribute", to_string(which) + ", " + to_string(device));
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    const int result = note("cuDevicePrimaryCtxRetain", to_string(device));
    if (result != 0) return result;
    *context = &retained.at(static_cast<size_t>(device));
    ++retained.at(static_cast<size_t>(device));
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    int &count = retained.at(static_cast<size_t>(device));
    const int result = note("cuDevicePrimaryCtxRelease", to_string(device));
    if (result != 0 || count == 0) return result != 0 ? result : invalid_context;
    // Its end is the end of what was allocated in it, and nobody may use it any more.
    if (--count == 0 && (!pinned.empty() || std::ranges::count(current, &count) > 0)) abort();
    return 0;
}

int cuCtxPushCurrent_v2(void *context)
{
    const int result = note("cuCtxPushCurrent", "");
    if (result != 0 || *static_cast<int *>(context) == 0) return result != 0 ? result : invalid_context;
    current.push_back(context);
    return 0;
}

int cuCtxPopCurrent_v2(void **context)
{
    const int result = note_with_context("cuCtxPopCurrent", "");
    if (result != 0) return result;
    *context = current.back();
    current.pop_back();
    return 0;
}

int cuPointerGetAttribute(void *value, int which, uintptr_t pointer)
{
    const int result = note_with_context("cuPointerGetAttribute", to_string(which));
    if (result != 0) return result;
    if (pointer - memory >= memory_size) return invalid_value;
    *static_cast<int *>(value) = which == 2 ? memory_type : which == 8 ? managed : owner;
    return which == 2 || which == 8 || which == 9 ? 0 : invalid_value;
}

int cuMemGetHandleForAddressRange(void *handle, uintptr_t start, size_t size, int type, unsigned long long flags)
{
    const int result =
        note_with_context("cuMemGetHandleForAddressRange", to_string(start - memory) + ", " + to_string(size) + ", " +
                                                               to_string(type) + ", " + to_string(flags));
    if (result != 0) return result;
    descriptors.push_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
    *static_cast<int *>(handle) = descriptors.back();
    return 0;
}

int cuMemHostAlloc(void **start, size_t size, unsigned flags)
{
    const int result = note_with_context("cuMemHostAlloc", to_string(size) + ", " + to_string(flags));
    if (result != 0) return result;
    constexpr size_t page = 4096;
    pinned.push_back(aligned_alloc(page, (size + page - 1) / page * page));
    std::fill_n(static_cast<char *>(pinned.back()), size, 'x');
    *start = pinned.back();
    return 0;
}

int cuMemFreeHost(void *start)
{
    const int result = note_with_context("cuMemFreeHost", "");
    if (result != 0) return result;
    if (std::erase(pinned, start) == 0) return invalid_value;
    free(start);
    return 0;
}

} // extern "C"
