#!/usr/bin/env bash
# Reads the cache of a server on port 12345 into received.bin of the current folder (P21).
set -euo pipefail

usage() {
  cat <<TXT
usage: scripts/reader.sh SERVER [OPTION of rdma_kv_reader...]

Runs rdma_kv_reader -s SERVER -p 12345 -o received.bin; options given here come after these and prevail.
TXT
}

case ${1:-} in
  -h | --help) usage; exit 0 ;;
  '' | -*) usage >&2; exit 2 ;;
esac
server=$1
shift
exec "$(dirname "${BASH_SOURCE[0]}")/../rdma_kv_reader" -s "$server" -p 12345 -o received.bin "$@"
