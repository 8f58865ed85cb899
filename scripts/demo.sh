#!/usr/bin/env bash
# One command from a bare machine to a KV cache that has crossed by RDMA READ.
set -euo pipefail

here=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
project=$(dirname "$here")
# shellcheck source=common.sh
source "$here/common.sh"
folder=$project/build/demo
size=1G
nodes=1
# Where the reader runs (here when empty, as on_server of common.sh), and the server's address for it.
on_reader=()
server_address=localhost

usage() {
  cat <<TXT
usage: scripts/demo.sh [--size N] [--lab | --nodes 2]

Installs what is missing, builds, makes a cache of random bytes, and moves it from rdma_kv_server to
rdma_kv_reader: over the RDMA device of this machine; without one, over SoftRoCE, if this kernel has
it and you may use it; else in the lab, a guest with a kernel that has it. Files are in build/demo.

      --size N   bytes of the cache, or with K, M, G: powers of 1024 (default 1G)
      --lab      in the lab, whatever this machine has
      --nodes N  with N=2: in the lab, between two guests; server on node-a, reader on node-b
  -h, --help     this text
TXT
}

step() { printf '\n== %s\n' "$*"; }

as_root() { if [[ $(id -u) -eq 0 ]]; then "$@"; else sudo "$@"; fi; }

# A SoftRoCE device on this kernel, if it has the module and this user may. It goes with this script.
make_softroce() {
  [[ -d /sys/module/rdma_rxe ]] || modinfo rdma_rxe >/dev/null 2>&1 || return 1
  [[ $(id -u) -eq 0 ]] || { command -v sudo >/dev/null && sudo -v; } || return 1
  as_root "$here/softroce.sh" up || return 1
  trap 'as_root "$here/softroce.sh" down' EXIT
}

# The cache is locked in memory, which an ordinary user may do with 8 MiB only.
raise_memlock() {
  [[ $(id -u) -eq 0 || $(ulimit -l) == unlimited ]] || as_root prlimit --pid $$ --memlock=unlimited:unlimited ||
    printf 'demo.sh: the memlock limit stays at %s KiB\n' "$(ulimit -l)" >&2
}

# Server and reader, on the RDMA devices that are there. In a subshell, as it has a trap of its own.
run_pair() (
  log=$folder/server.log
  rm -f "$folder/received.bin"
  trap stop_kv_server EXIT
  step "${on_server[*]:+${on_server[*]} }rdma_kv_server -f kv_cache.bin"
  start_kv_server "$log" -f "$folder/kv_cache.bin" || return
  cat "$log"
  step "${on_reader[*]:+${on_reader[*]} }rdma_kv_reader -s $server_address -o received.bin"
  "${on_reader[@]}" "$project/rdma_kv_reader" -s "$server_address" -o "$folder/received.bin" || { cat "$log" >&2; return 1; }
)

# One guest needs room for the cache twice, the server's and the reader's; each of two for one of them.
lab_memory() { echo "$(((3 - nodes) * $(stat -c %s "$folder/kv_cache.bin") / 1048576 + 1536))M"; }

main() {
  local lab=false used device
  while [[ $# -gt 0 ]]; do
    case $1 in
      --size) size=${2:-}; shift 2 || { usage >&2; exit 2; } ;;
      --lab) lab=true; shift ;;
      --nodes) nodes=${2:-}; shift 2 || { usage >&2; exit 2; } ;;
      --in-lab) make_softroce && run_pair; exit ;; # how this script goes on in the guest
      --beside-nodes) # and here, once two guests are up
        on_server=(node run node-a) on_reader=(node run node-b) server_address=node-a
        run_pair
        exit
        ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; exit 2 ;;
    esac
  done

  [[ $nodes == [12] ]] || { usage >&2; exit 2; }
  [[ $size =~ ^[1-9][0-9]*[KMG]?$ ]] || { usage >&2; exit 2; }

  step "what is needed"
  "$here/install_deps.sh" build run
  if [[ $nodes -eq 2 ]]; then
    device=nodes
  elif $lab; then
    device=lab
  elif has_rdma_device; then
    device=here
  elif make_softroce; then
    device=softroce
  else
    device=lab
  fi
  # The guest's processor has less than this machine's: for it, what every x86-64 has.
  if [[ $device == lab || $device == nodes ]]; then
    "$here/lab.sh" --prepare
    make -s -C "$project" MARCH=
  else
    make -s -C "$project"
    raise_memlock
  fi

  step "the cache"
  mkdir -p "$folder"
  "$here/make_kv_cache.sh" "$size" "$folder/kv_cache.bin"

  case $device in
    here)
      used="the RDMA device of this machine, server and reader both on it"
      run_pair || { printf 'demo.sh: scripts/demo.sh --lab does it without this device\n' >&2; exit 1; }
      ;;
    softroce)
      used="SoftRoCE on this kernel: RDMA in software; the times are not those of hardware"
      run_pair
      ;;
    lab)
      used="SoftRoCE in the lab: the kernel's RDMA stack in software, in a QEMU guest; the times are not those of hardware"
      "$here/lab.sh" --memory "$(lab_memory)" -- "$here/demo.sh" --in-lab
      ;;
    nodes)
      used="SoftRoCE in the lab: two QEMU guests, a kernel each, the RDMA stack in software; the times are not those of hardware"
      "$here/lab.sh" --nodes 2 --memory "$(lab_memory)" -- "$here/demo.sh" --beside-nodes
      ;;
  esac

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
