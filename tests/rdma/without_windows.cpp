// Put before libibverbs by LD_PRELOAD, it takes type 2 memory windows out of what a device says of itself:
// every device of the lab has them.
#include <dlfcn.h>
#include <infiniband/verbs.h>

extern "C" int ibv_query_device(ibv_context *context, ibv_device_attr *device_attr)
{
    using function = int (*)(ibv_context *, ibv_device_attr *);
    const auto original = reinterpret_cast<function>(dlsym(RTLD_NEXT, "ibv_query_device"));
    const int error = original(context, device_attr);
    device_attr->device_cap_flags &=
        ~static_cast<unsigned>(IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B);
    return error;
}
