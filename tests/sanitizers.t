#!/usr/bin/env bash
# Tests of tests/rdma/ on programs with AddressSanitizer, which finds leaks as well, and
# UndefinedBehaviorSanitizer: every way through the programs, errors, faults, limits, hostile peers; RDMA_TESTS
# chooses others.
# tests/rdma/helpers.bash sets their options and looks for their reports.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export RDMA_KV_PROGRAMS=$PWD/build/tests/sanitizers
make -s "BIN=$RDMA_KV_PROGRAMS" MARCH= CPPFLAGS=-D_GLIBCXX_ASSERTIONS \
  CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
RDMA_TESTS=${RDMA_TESTS:-visits errors faults access limits hostile} exec tests/rdma.t
