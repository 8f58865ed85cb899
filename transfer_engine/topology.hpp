// topology.hpp: which cores are near an adapter, by hwloc (T9).
#pragma once

#include <optional>
#include <sched.h>
#include <string>

namespace transfer_engine
{

// Where a thread that drives this PCI device, "0000:3b:00.0", is to run: on the cores of the device's NUMA node, on
// all of them that it may run on now. None when it can run nowhere else, as on a machine of one node; when it may run
// on none of them; and when hwloc does not find the device.
std::optional<cpu_set_t> cores_near(const std::string &pci_address);

} // namespace transfer_engine
