#!/usr/bin/env bash
# Every test: builds, then runs them under prove; those that need RDMA run in the lab, in one guest,
# on a machine that has no RDMA device.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(dirname "$here")

usage() {
  cat <<TXT
usage: scripts/test.sh [TEST...]

TEST: files of tests/ (default: all), for example tests/command_line.bats or tests/rdma.t.
The tests that need RDMA are those of tests/rdma/; tests/rdma.t runs them all, and
RDMA_TESTS='transfer faults' chooses among them.
TXT
}

main() {
  case ${1:-} in
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
  esac
  "$here/install_deps.sh" build run test
  cd "$project"
  # For the guest's processor, which has less than this machine's under emulation.
  local arch=-march=native
  if ! grep -qs ACTIVE /sys/class/infiniband/*/ports/*/state; then
    "$here/lab.sh" --prepare
    arch=-march=x86-64-v2
  fi
  make -s ARCH="$arch"
  local -a tests=("$@")
  [[ ${#tests[@]} -gt 0 ]] || tests=(tests/*.t tests/*.bats)
  prove --timer --comments "${tests[@]}"
}

main "$@"
