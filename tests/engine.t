#!/usr/bin/env bash
# The tests of transfer_engine/ that need no RDMA device, as TAP: with AddressSanitizer and UndefinedBehaviorSanitizer,
# those with threads with ThreadSanitizer as well; then libFuzzer. tests/rdma/engine.bats has the others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=build/tests/engine.log
mkdir -p build/tests
make -s -C transfer_engine -j"$(nproc)" checks
mapfile -t programs < <(make -s -C transfer_engine list-checks)
failed=0
for program in "${programs[@]}"; do
  status=0
  # shellcheck disable=SC2086 # with its arguments
  (cd build/tests && exec $program) 2>&1 || status=$?
  [[ $program != *_fuzzer* || $status -ne 0 ]] || echo "[       OK ] ${program%% *}"
  echo "exit $status"
  [[ $status -eq 0 ]] || failed=1
done >"$log"
awk -f tests/tap_of_gtest.awk "$log"
exit "$failed"
