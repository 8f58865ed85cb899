#!/usr/bin/env bash
# Makes a test cache of random bytes (P3).
set -euo pipefail

usage() {
  cat <<TXT
usage: scripts/make_kv_cache.sh [SIZE [FILE]]

SIZE  bytes, or with K, M, G: powers of 1024 (default 1G)
FILE  default kv_cache.bin, in the current folder
TXT
}

main() {
  case ${1:-} in
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
  esac
  [[ $# -le 2 ]] || { usage >&2; exit 2; }
  local size=${1:-1G} file=${2:-kv_cache.bin}
  [[ $size =~ ^[1-9][0-9]*[KMG]?$ ]] ||
    { printf "make_kv_cache.sh: '%s' is not a size (bytes, or with K, M, G)\n" "$size" >&2; exit 2; }
  # Under another name until it is complete.
  part=$file.part
  trap 'rm -f "$part"' EXIT
  head -c "$size" /dev/urandom >"$part"
  mv "$part" "$file"
  printf '%s: %s bytes\n' "$file" "$(stat -c %s "$file")"
}

main "$@"
