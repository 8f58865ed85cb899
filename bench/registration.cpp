// registration: what it costs to bring memory and to register it, by kind of page.
//
// Prints CSV: pages, touched, bytes, allocate_s (mmap, and touching where that is done), register_s
// (ibv_reg_mr), deregister_s; --repeat rows of each. "small" is 4 KiB pages, "transparent" is
// MADV_HUGEPAGE, "huge" is MAP_HUGETLB and wants reserved pages (/proc/sys/vm/nr_hugepages); where
// there are none its rows are left out, which is said.
#include "../common.hpp"

#include <getopt.h>

struct kind {
    const char *name;
    int mmap_flags, advice;
    bool touched;
};

static bool measure(ibv_pd *pd, const kind &pages, uint64_t bytes)
{
    const uint64_t start = now_ns();
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | pages.mmap_flags, -1, 0);
    if (memory == MAP_FAILED && pages.mmap_flags != 0) {
        remark(text("%s pages: none reserved for %zu bytes, left out", pages.name, bytes));
        return true;
    }
    if (memory == MAP_FAILED) return failed(text("mmap(%zu bytes)", bytes), errno);
    if (pages.advice != 0) madvise(memory, bytes, pages.advice);
    if (pages.touched) touch_pages(static_cast<uint8_t *>(memory), bytes);
    const double allocate_s = seconds_since(start);

    const uint64_t register_start = now_ns();
    ibv_mr *mr = ibv_reg_mr(pd, memory, bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    const double register_s = seconds_since(register_start);
    const int error = errno;
    const uint64_t deregister_start = now_ns();
    if (mr != nullptr) ibv_dereg_mr(mr);
    const double deregister_s = seconds_since(deregister_start);
    munmap(memory, bytes);
    if (mr == nullptr) return failed(text("ibv_reg_mr(%zu bytes)", bytes), error, memlock_hint(error, bytes));
    printf("%s,%s,%zu,%.9f,%.9f,%.9f\n", pages.name, pages.touched ? "yes" : "no", bytes, allocate_s, register_s,
           deregister_s);
    return true;
}

int main(int argc, char **argv)
{
    uint64_t bytes = uint64_t{1} << 30, repeat = 3;
    static const option long_options[] = {{"size", required_argument, nullptr, 's'},
                                          {"repeat", required_argument, nullptr, 'n'},
                                          {"help", no_argument, nullptr, 'h'},
                                          {nullptr, 0, nullptr, 0}};
    for (int letter; (letter = getopt_long(argc, argv, "s:n:h", long_options, nullptr)) != -1;) {
        switch (letter) {
        case 's': size_option("--size", optarg, 1, &bytes); break;
        case 'n': number_option("--repeat", optarg, 1, 1000, &repeat); break;
        case 'h': printf("usage: registration [--size BYTES] [--repeat N]\n"); return exit_success;
        default: return exit_usage;
        }
    }
    ibv_device **devices = ibv_get_device_list(nullptr);
    if (devices == nullptr || devices[0] == nullptr) return no_rdma_device() ? exit_success : exit_failure;
    ibv_context *context = ibv_open_device(devices[0]);
    ibv_pd *pd = context != nullptr ? ibv_alloc_pd(context) : nullptr;
    bool ok = pd != nullptr || failed("ibv_open_device(), ibv_alloc_pd()", errno);

    static const kind kinds[] = {{"small", 0, MADV_NOHUGEPAGE, false},     {"small", 0, MADV_NOHUGEPAGE, true},
                                 {"transparent", 0, MADV_HUGEPAGE, false}, {"transparent", 0, MADV_HUGEPAGE, true},
                                 {"huge", MAP_HUGETLB, 0, false},          {"huge", MAP_HUGETLB, 0, true}};
    printf("pages,touched,bytes,allocate_s,register_s,deregister_s\n");
    for (uint64_t i = 0; ok && i < repeat; ++i)
        for (const kind &pages : kinds)
            ok = ok && measure(pd, pages, bytes);

    if (pd != nullptr) ibv_dealloc_pd(pd);
    if (context != nullptr) ibv_close_device(context);
    ibv_free_device_list(devices);
    return ok ? exit_success : exit_failure;
}
