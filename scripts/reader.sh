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
program=$(dirname "${BASH_SOURCE[0]}")/../rdma_kv_reader
[[ -x $program ]] || { printf 'reader.sh: rdma_kv_reader is not built: run make\n' >&2; exit 1; }
exec "$program" -s "$server" -p 12345 -o received.bin "$@"
