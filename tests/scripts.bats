#!/usr/bin/env bats
# The scripts, as far as they need neither RDMA nor a guest.
bats_require_minimum_version 1.5.0

setup() {
  cd "$BATS_TEST_DIRNAME/.." || return
  scripts=$PWD/scripts
}

@test "every script has -h, on stdout, and refuses what it does not know" {
  local script
  for script in scripts/*.sh scripts/lab/node; do
    [[ $script != scripts/common.sh ]] || continue # not to be run
    run -0 --separate-stderr "$script" -h
    [[ $output == "usage: ${script#scripts/lab/}"* && -z $stderr ]] || { echo "$script: $output"; return 1; }
    run -2 --separate-stderr "$script" --no-such-option </dev/null
    [[ -z $output ]] || { echo "$script: $output"; return 1; }
  done
}

@test "make_kv_cache.sh: any size, another file, nothing half-made" {
  cd "$BATS_TEST_TMPDIR"
  "$scripts/make_kv_cache.sh" 4097
  [[ $(stat -c %s kv_cache.bin) -eq 4097 ]]
  "$scripts/make_kv_cache.sh" 2M other.bin
  [[ $(stat -c %s other.bin) -eq 2097152 ]]
  run -2 "$scripts/make_kv_cache.sh" ten
  [[ $output == *"'ten' is not a size"* ]]
  run ! "$scripts/make_kv_cache.sh" 1K no/such/folder.bin
  [[ $(ls) == $'kv_cache.bin\nother.bin' ]]
}

@test "install_deps.sh: nothing to do here; an unknown set is refused" {
  run -0 scripts/install_deps.sh build run test bench engine
  [[ -z $output ]]
  run -2 scripts/install_deps.sh no-such-set
  [[ $output == *"unknown set 'no-such-set'"* ]]
}

@test "server.sh and reader.sh run the specification's commands" {
  cd "$BATS_TEST_TMPDIR"
  run -2 "$scripts/reader.sh"
  [[ $output == "usage: scripts/reader.sh SERVER"* ]]
  # A last option that ends the program after all were parsed: a bad one of ours behind theirs.
  run -2 "$scripts/server.sh" positional
  [[ $output == *"unexpected argument 'positional'"* ]]
  run -2 "$scripts/reader.sh" node-a positional
  [[ $output == *"unexpected argument 'positional'"* ]]
}
