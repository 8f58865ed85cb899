#!/usr/bin/env bash
# Serves kv_cache.bin of the current folder on port 12345 (P21).
set -euo pipefail

usage() {
  cat <<TXT
usage: scripts/server.sh [OPTION of rdma_kv_server...]

Runs rdma_kv_server -p 12345 -f kv_cache.bin; options given here come after these and prevail.
scripts/make_kv_cache.sh makes a kv_cache.bin.
TXT
}

case ${1:-} in
  -h | --help) usage; exit 0 ;;
esac
program=$(dirname "${BASH_SOURCE[0]}")/../rdma_kv_server
[[ -x $program ]] || { printf 'server.sh: rdma_kv_server is not built: run make\n' >&2; exit 1; }
exec "$program" -p 12345 -f kv_cache.bin "$@"
