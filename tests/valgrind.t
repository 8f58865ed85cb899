#!/usr/bin/env bash
# tests/rdma/visits.bats, which takes every way through the programs that a start can pay for, under valgrind
# memcheck: it takes ten seconds to start a program in an emulated guest, and all of tests/rdma/ would
# take hours. It finds what sanitizers do not: bytes never written that reach a decision or the kernel, and
# memory not freed that something still points to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

compiled=$PWD/build/tests/memcheck
# Not optimized: a compiler that keeps a variable in a register may make up the bytes that were never written.
make -s "BIN=$compiled" MARCH= CXXFLAGS="-O0 -g"

# Programs of the same names that run these under valgrind. RDMA_KV_REPORTS: tests/rdma/helpers.bash.
export RDMA_KV_PROGRAMS=$PWD/build/tests/valgrind
mkdir -p "$RDMA_KV_PROGRAMS"
for program in rdma_kv_server rdma_kv_reader; do
  cat >"$RDMA_KV_PROGRAMS/$program" <<TXT
#!/bin/sh
exec valgrind --quiet --error-exitcode=99 --num-callers=30 --leak-check=full --show-leak-kinds=all --errors-for-leak-kinds=all \\
  --suppressions='$PWD/tests/valgrind.supp' --log-file="\$RDMA_KV_REPORTS/valgrind.%p" '$compiled/$program' "\$@"
TXT
  chmod +x "$RDMA_KV_PROGRAMS/$program"
done
RDMA_TESTS=visits exec tests/rdma.t
