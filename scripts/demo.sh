#!/usr/bin/env bash
# One command from a bare machine to a KV cache that has crossed by RDMA READ.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(dirname "$here")
folder=$project/build/demo
size=1G

usage() {
  cat <<TXT
usage: scripts/demo.sh [--size N]

Installs what is missing, builds, makes a cache of random bytes, and moves it from rdma_kv_server to
rdma_kv_reader: over the RDMA device of this machine; without one, over SoftRoCE, if this kernel has
it and you may use it; else in the lab, a guest with a kernel that has it.

      --size N   bytes of the cache, or with K, M, G: powers of 1024 (default 1G)
      --lab      in the lab, whatever this machine has
  -h, --help     this text
TXT
}

step() { printf '\n== %s\n' "$*"; }

has_rdma_device() { grep -qs ACTIVE /sys/class/infiniband/*/ports/*/state; }

can_use_softroce() {
  [[ -d /sys/module/rdma_rxe ]] || modinfo rdma_rxe >/dev/null 2>&1 || return 1
  [[ $(id -u) -eq 0 ]] || sudo -v
}

softroce() {
  if [[ $(id -u) -eq 0 ]]; then "$here/softroce.sh" "$@"; else sudo "$here/softroce.sh" "$@"; fi
}

# Server and reader, on the RDMA device that is there.
run_pair() {
  local log=$folder/server.log server
  rm -f "$folder/received.bin"
  step "rdma_kv_server -f kv_cache.bin"
  "$project/rdma_kv_server" -f "$folder/kv_cache.bin" --readers 1 >"$log" 2>&1 &
  server=$!
  # shellcheck disable=SC2064 # this server's id
  trap "kill $server 2>/dev/null || true" EXIT
  until grep -q '^listening' "$log"; do
    kill -0 "$server" 2>/dev/null || { cat "$log" >&2; return 1; }
    sleep 0.2
  done
  cat "$log"
  step "rdma_kv_reader -s localhost -o received.bin"
  "$project/rdma_kv_reader" -s localhost -o "$folder/received.bin" || { cat "$log" >&2; return 1; }
  wait "$server"
  trap - EXIT
}

# The same with a device made for it, where there is none yet; in the lab this is all that runs.
run_pair_on_softroce() {
  has_rdma_device || { softroce up; trap 'softroce down' EXIT; }
  (run_pair)
}

# The guest needs room for the cache twice: the server's and the reader's.
lab_memory() { echo "$((2 * $(stat -c %s "$folder/kv_cache.bin") / 1048576 + 1536))M"; }

main() {
  local lab=false used
  while [[ $# -gt 0 ]]; do
    case $1 in
      --size) size=${2:-}; shift 2 || { usage >&2; exit 2; } ;;
      --lab) lab=true; shift ;;
      --in-lab) run_pair_on_softroce; exit ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; exit 2 ;;
    esac
  done

  step "what is needed"
  "$here/install_deps.sh" build run
  if $lab || { ! has_rdma_device && ! can_use_softroce; }; then
    used=lab
    "$here/lab.sh" --prepare
    # The guest's processor has less than this machine's under emulation.
    make -s -C "$project" ARCH=-march=x86-64-v2
  else
    used=machine
    make -s -C "$project"
  fi

  step "the cache"
  mkdir -p "$folder"
  "$here/make_kv_cache.sh" "$size" "$folder/kv_cache.bin"

  if [[ $used == lab ]]; then
    "$here/lab.sh" --memory "$(lab_memory)" -- "$here/demo.sh" --in-lab
    used="SoftRoCE in the lab: the kernel's RDMA stack in software, in a QEMU guest; the times are not those of hardware"
  elif has_rdma_device; then
    (run_pair)
    used="the RDMA device of this machine, server and reader both on it"
  else
    run_pair_on_softroce
    used="SoftRoCE on this kernel: RDMA in software; the times are not those of hardware"
  fi

  step "md5sum kv_cache.bin received.bin"
  (cd "$folder" && md5sum kv_cache.bin received.bin)
  cmp "$folder/kv_cache.bin" "$folder/received.bin"
  cat <<TXT

The files are equal, and lie in build/demo. Used: $used.
Next: scripts/test.sh runs every test. Between two machines with RDMA:
  scripts/make_kv_cache.sh && scripts/server.sh      on the one
  scripts/reader.sh ADDRESS_OF_THE_FIRST             on the other
TXT
}

main "$@"
