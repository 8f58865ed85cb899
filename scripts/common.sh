# shellcheck shell=bash
# Sourced by the other scripts and by the tests.

# An RDMA device that is in use and within this process's reach.
has_rdma_device() {
  grep -qs ACTIVE /sys/class/infiniband/*/ports/*/state &&
    [[ -w /dev/infiniband/rdma_cm && -n $(compgen -G '/dev/infiniband/uverbs*') ]]
}
