#!/usr/bin/env bats
# transfer_engine/ as its users get it: the library installed, the document's program, the example on libfabric.
bats_require_minimum_version 1.5.0

setup_file() {
  project=$(cd "$BATS_TEST_DIRNAME/.." && pwd)
  export project
  make -s -C "$project/transfer_engine" -j"$(nproc)" all examples
}

@test "the document's program is examples/minimal.cpp, and does what it says" {
  diff <(sed -n '/^<!-- minimal.cpp -->/,/^<!-- end/p' "$project/docs/TRANSFER_ENGINE.md" | sed '1,2d' | head -n -2) \
    "$project/transfer_engine/examples/minimal.cpp"
  run timeout 60 "$project/build/engine/examples/minimal"
  [[ $status -eq 0 && $output == "ok, and the last byte is 'x'" ]] || { echo "$output"; return 1; }
}

@test "make install: a program is built with pkg-config, against either library" {
  local prefix=$BATS_TEST_TMPDIR/prefix
  make -s -C "$project/transfer_engine" install PREFIX="$prefix"
  export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
  cd "$BATS_TEST_TMPDIR"
  local -a flags libraries
  read -ra flags < <(pkg-config --cflags --libs transfer_engine)
  read -ra libraries < <(pkg-config --libs libibverbs libfabric hwloc)
  g++ -std=c++20 "$project/transfer_engine/examples/minimal.cpp" -o with_shared "${flags[@]}"
  g++ -std=c++20 "$project/transfer_engine/examples/minimal.cpp" -I"$prefix/include" -o with_static \
    "$prefix/lib/libtransfer_engine.a" "${libraries[@]}"
  LD_LIBRARY_PATH=$prefix/lib timeout 60 ./with_shared
  timeout 60 ./with_static
}

# prefill_decode NIC... : a prompt of 512 tokens of Llama-3.1-8B, every page compared.
prefill_decode() {
  local nic
  local -a nics=()
  for nic in "$@"; do nics+=(--nic "$nic"); done
  run timeout 100 "$project/build/engine/examples/prefill_decode" "${nics[@]}" --json "$BATS_TEST_TMPDIR/figures"
  [[ $status -eq 0 && $output == *"2048 pages of 32768 bytes"*"every one compared, twice: right"* ]] || { echo "$output"; return 1; }
  jq -e ".nics == $# and .bytes == 67108864 and .exposed_s > 0 and .whole_s > 0" "$BATS_TEST_TMPDIR/figures"
}

@test "prefill_decode over tcp, one adapter" { prefill_decode 'ofi:tcp;ofi_rxm'; }
@test "prefill_decode over tcp, two adapters" { prefill_decode 'ofi:tcp;ofi_rxm' 'ofi:tcp;ofi_rxm'; }
@test "prefill_decode over shm, one adapter" { prefill_decode ofi:shm; }
@test "prefill_decode over shm, two adapters" { prefill_decode ofi:shm ofi:shm; }

# start_decode OPTION... : by itself; its output is in $log.
start_decode() {
  log=$BATS_TEST_TMPDIR/decode.log
  timeout 60 "$project/build/engine/examples/prefill_decode" --decode localhost:27182 "$@" >"$log" 2>&1 3>&- &
  decode=$!
  for _ in {1..100}; do
    ! grep -q "^waiting for prefill on localhost:27182" "$log" || return 0
    sleep 0.1
  done
  cat "$log"
  return 1
}

@test "prefill_decode, each process started by itself" {
  start_decode --tokens 16
  run -0 timeout 60 "$project/build/engine/examples/prefill_decode" --prefill localhost:27182 --tokens 16
  wait "$decode"
  [[ $output$(<"$log") == *"twice: right"*"twice: right"* ]] || { echo "$output"; cat "$log"; return 1; }
}

@test "prefill_decode, each process started by itself: both have to have the same cache" {
  local program=$project/build/engine/examples/prefill_decode
  start_decode --tokens 16
  run -1 timeout 60 "$program" --prefill localhost:27182 --tokens 32
  [[ $output == *"the other process has another --model or other --tokens"* ]] || { echo "$output"; return 1; }
  local ended=0
  wait "$decode" || ended=$?
  [[ $ended -eq 1 ]]
  grep "the other process has another --model or other --tokens" "$log"
  run -1 timeout 10 "$program" --prefill localhost:27182
  [[ $output == *"--prefill localhost:27182: Connection refused"*"hint: decode is started first"* ]] || { echo "$output"; return 1; }
}

@test "te_bench compares the engine with a bare loop" {
  local bench=$project/build/engine/bench/te_bench
  run timeout 100 "$bench" --quick --pairs 1 --nic ofi:shm --csv "$BATS_TEST_TMPDIR/figures"
  [[ $status -eq 0 && $output == *"writes of 16 KiB at depth 16 "*"read of 10000 pages of 4 KiB "*"barrier to 2 peers "* ]] || { echo "$output"; return 1; }
  # figure, unit, contestant, pair, value, ...: every value is one
  awk -F, 'NR > 1 && $5 + 0 <= 0 { exit 1 } END { if (NR < 40) exit 1 }' "$BATS_TEST_TMPDIR/figures" || { cat "$BATS_TEST_TMPDIR/figures"; return 1; }
  run -0 timeout 20 "$bench" --pairs 1 --nic ofi:shm --only barrier
  [[ $output == *"barrier to 2 peers"* && $output != *"writes of"* ]] || { echo "$output"; return 1; }
  run -1 timeout 20 "$bench" --only nosuch
  [[ $output == *"--only nosuch: no figure has that in its name"* ]] || { echo "$output"; return 1; }
  run timeout 10 "$bench" --pairs 0
  [[ $status -eq 1 && $output == *"--pairs 0: not a number from 1 to 1000"* ]] || { echo "$output"; return 1; }
  run timeout 20 "$bench" --nic ofi:nosuch
  [[ $status -eq 1 && $output == *nosuch* ]] || { echo "$output"; return 1; }
}

@test "wrong arguments are told" {
  local program=$project/build/engine/examples/prefill_decode
  run timeout 10 "$program" --nic ofi
  [[ $status -ne 0 && $output == *"adapter 'ofi': not verbs:DEVICE, ofi:PROVIDER or ofi:PROVIDER,DOMAIN"* ]] || { echo "$output"; return 1; }
  run timeout 10 "$program" --nic ofi:nosuch
  [[ $status -ne 0 && $output == *nosuch* ]] || { echo "$output"; return 1; }
  run timeout 10 "$program" --nic verbs:nosuch0
  [[ $status -ne 0 && $output == *nosuch0* ]] || { echo "$output"; return 1; }
  run timeout 10 "$program" --tokens x
  [[ $status -ne 0 && $output == *"--tokens x: not a number"* ]] || { echo "$output"; return 1; }
}
