#!/usr/bin/env bash
# The tests of transfer_engine/ that need no RDMA device, as TAP: with AddressSanitizer and UndefinedBehaviorSanitizer,
# those with threads with ThreadSanitizer as well; then libFuzzer. tests/rdma/engine.bats and tests/nodes/engine.bats
# have the others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset MAKEFLAGS MFLAGS MAKELEVEL # 'make engine-test' runs this
export TSAN_OPTIONS=suppressions=$PWD/tests/tsan.supp

logs=build/tests/engine
rm -rf "$logs"
mkdir -p "$logs"
make -s -C transfer_engine -j"$(nproc)" checks
mapfile -t programs < <(make -s -C transfer_engine list-checks)

# run_program NUMBER : its output, then its exit status, to a log.
run_program() {
  local program=${programs[$1]} status=0
  {
    # shellcheck disable=SC2086 # with its arguments
    (cd "$logs" && exec $program) 2>&1 || status=$?
    [[ $program != *_fuzzer* || $status -ne 0 ]] || echo "[       OK ] ${program%% *}"
    echo "exit $status"
  } >"$logs/$1.log"
}

# Two at a time: some mostly wait.
for ((i = 0; i < ${#programs[@]}; ++i)); do
  ((i < 2)) || wait -n
  run_program "$i" &
done
wait
for ((i = 0; i < ${#programs[@]}; ++i)); do cat "$logs/$i.log"; done | awk -f tests/tap_of_gtest.awk
! grep -Lx 'exit 0' "$logs"/*.log | grep .
