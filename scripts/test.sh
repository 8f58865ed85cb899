#!/usr/bin/env bash
# Every test: builds, then runs them under prove; those that need RDMA run in the lab, in one guest,
# on a machine that has no RDMA device.
set -euo pipefail

here=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
project=$(dirname "$here")
# shellcheck source=common.sh
source "$here/common.sh"

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
  local -a tests=()
  local test
  for test in "$@"; do
    tests+=("$(realpath "$test")")
  done
  "$here/install_deps.sh" build run test bench engine
  # The tests see the build and its messages as they are by default.
  unset CDPATH MAKEFLAGS MFLAGS MAKELEVEL CXX CXXFLAGS CPPFLAGS LDFLAGS MARCH BIN
  export LC_ALL=C.UTF-8
  cd "$project"
  # The guest's processor has less than this machine's: for it, what every x86-64 has.
  local march=-march=native
  if ! has_rdma_device; then
    "$here/lab.sh" --prepare
    march=
  fi
  make -s MARCH="$march"
  [[ ${#tests[@]} -gt 0 ]] || tests=(tests/*.t tests/*.bats)
  # What only computes takes what the others leave of the processors; those are one after the other.
  prove --timer --comments --jobs 2 --rules 'par=tests/static.bats' --rules 'seq=**' "${tests[@]}"
}

main "$@"
