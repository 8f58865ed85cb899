#!/usr/bin/env bash
# The tests of tests/rdma/: on this machine's RDMA device or, without one, all of them in one guest.
# RDMA_TESTS="transfer faults" chooses among the files, RDMA_KV_PROGRAMS is a folder with another build of
# the programs (tests/sanitizers.t, tests/valgrind.t). Those of hostile.bats are left to the former.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=../scripts/common.sh
source scripts/common.sh

# A reader of another handshake version, to be refused.
make -s BIN=build/tests CPPFLAGS=-DHANDSHAKE_VERSION=999 MARCH= build/tests/rdma_kv_reader
# A device without memory windows, for --isolate to refuse.
"${CXX:-g++}" -std=c++20 -Wall -Wextra -fPIC -shared -o build/tests/without_windows.so tests/rdma/without_windows.cpp

# Peers that do what they should not. HOSTILE_SEED=N draws their details anew.
make -s BIN=build/tests/hostile MARCH= build/tests/hostile/hostile_{reader,server}
echo "${HOSTILE_SEED:-1}" >build/tests/hostile/seed

# transfer_engine/: what engine.bats runs.
make -s -C transfer_engine -j"$(nproc)" MARCH= examples device-tests

read -ra files <<<"${RDMA_TESTS:-softroce transfer errors faults access limits engine}"
files=("${files[@]/%/.bats}")
files=("${files[@]/#/tests\/rdma\/}")
run=(env "RDMA_KV_PROGRAMS=${RDMA_KV_PROGRAMS:-}" bats --formatter tap --timing)
# Without a device the tests start with softroce.sh and go on with the device it makes.
has_rdma_device || run=(scripts/lab.sh --memory 5G --timeout 1800 -- "${run[@]}")
exec "${run[@]}" "${files[@]}"
