#include "topology.hpp"

#include <hwloc.h>
#include <hwloc/glibc-sched.h>
#include <memory>

namespace transfer_engine
{

struct Release {
    void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
    void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Topology = std::unique_ptr<hwloc_topology, Release>;
using Bitmap = std::unique_ptr<hwloc_bitmap_s, Release>;

std::optional<cpu_set_t> cores_near(const std::string &pci_address)
{
    hwloc_topology_t machine = nullptr;
    if (pci_address.empty() || hwloc_topology_init(&machine) != 0) return {};
    const Topology owner(machine);
    hwloc_topology_set_type_filter(machine, HWLOC_OBJ_PCI_DEVICE, HWLOC_TYPE_FILTER_KEEP_ALL); // none, as a rule
    hwloc_topology_set_flags(machine, HWLOC_TOPOLOGY_FLAG_DONT_CHANGE_BINDING); // as it might, to look at each core
    if (hwloc_topology_load(machine) != 0) return {};
    hwloc_obj *const device = hwloc_get_pcidev_by_busidstring(machine, pci_address.c_str());
    if (device == nullptr) return {};

    const Bitmap near(hwloc_bitmap_alloc()), allowed(hwloc_bitmap_alloc());
    if (near == nullptr || allowed == nullptr) return {};
    hwloc_cpuset_from_nodeset(machine, near.get(), hwloc_get_non_io_ancestor_obj(machine, device)->nodeset);
    if (hwloc_get_cpubind(machine, allowed.get(), HWLOC_CPUBIND_THREAD) != 0) return {};
    if (hwloc_bitmap_isincluded(allowed.get(), near.get())) return {};
    hwloc_bitmap_and(near.get(), near.get(), allowed.get());
    if (hwloc_bitmap_iszero(near.get())) return {};
    cpu_set_t cores;
    hwloc_cpuset_to_glibc_sched_affinity(machine, near.get(), &cores, sizeof cores);
    return cores;
}

} // namespace transfer_engine
