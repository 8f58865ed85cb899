#!/usr/bin/env bash
# libFuzzer on what parses the bytes of a peer, as TAP. HOSTILE_SEED=N takes other turns; FUZZ_RUNS=N more.
# shellcheck disable=SC2317 # functions that tap calls
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly program=build/tests/handshake_fuzzer log=build/tests/handshake_fuzzer.log corpus=build/tests/fuzz_corpus
runs=${FUZZ_RUNS:-500000}

# tap NUMBER NAME COMMAND... : what the command wrote is in the log, shown when it fails.
failed=0
tap() {
  local number=$1 name=$2
  shift 2
  if "$@" >"$log" 2>&1; then
    echo "ok $number - $name"
  else
    failed=1
    tail -n 100 "$log" | sed 's/^/# /'
    echo "not ok $number - $name"
  fi
}

build() {
  clang++ -std=c++20 -Wall -Wextra -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    tests/fuzz/handshake_fuzzer.cpp -o "$program" -libverbs -lrdmacm -lcrypto -lpthread
}

# One of each message to start from: a magic, version 1 and zeros. What is found on the way stays in memory.
fuzz() {
  local magic
  mkdir -p "$corpus"
  for magic in KVHL KVOF KVRF KVCL; do
    { printf '%s\0\0\0\1' "$magic"; head -c 128 /dev/zero; } >"$corpus/$magic"
  done
  "$program" -seed="${HOSTILE_SEED:-1}" -runs="$runs" -max_len=256 -timeout=10 -artifact_prefix=build/tests/ "$corpus"
}

# Each of the four was taken often, too: refusing everything would not do.
all_were_decoded() {
  awk '/^decoded / { for (i = 2; i <= NF; i++) if ($i >= 100) often++ } { print } END { exit often != 4 }' "$log.fuzz"
}

mkdir -p build/tests
rm -rf "$corpus"
echo 1..3
tap 1 "the fuzzer builds" build
tap 2 "$runs runs over the handshake find nothing" fuzz
cp "$log" "$log.fuzz"
tap 3 "each message was decoded a hundred times or more" all_were_decoded
exit "$failed"
