#!/usr/bin/env bash
# Load (P23): requests one after the other, then readers at the same time; the latency of each, and no
# failure tolerated.
set -euo pipefail

here=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
project=$(dirname "$here")
# shellcheck source=common.sh
source "$here/common.sh"

server="" port=12345 requests=100 readers=8 size=1M out=""

usage() {
  cat <<TXT
usage: scripts/load.sh [options]

  -s, --server HOST   a server that runs already (default: one on this machine's RDMA device, started here)
  -p, --port PORT     its port (default $port)
      --requests N    READs one after the other in one connection, then as many connections (default $requests)
      --readers N     readers at the same time, each with as many READs (default $readers)
      --size N        bytes of each READ (default $size)
      --out FOLDER    where the CSV files go (default build/load)
  -h, --help          this text

Files: requests.csv (index, start_ns, latency_ns, bytes), connections.csv (index, connect_ns, latency_ns),
readers.csv (reader, index, start_ns, latency_ns, bytes). A table of their statistics goes to stdout.
On a machine without RDMA: scripts/lab.sh -- bash -c 'scripts/softroce.sh up && scripts/load.sh'
TXT
}

die() { printf 'load.sh: %s\n' "$*" >&2; exit 1; }

read_cache() { "$project/rdma_kv_reader" -s "$server" -p "$port" --size "$size" --no-verify "$@"; }

one_connection() {
  read_cache -n "$requests" --csv "$out/requests.csv" >"$work/log" 2>&1 || die "the sequential READs failed: $(<"$work/log")"
}

many_connections() {
  local index
  echo "index,connect_ns,latency_ns" >"$out/connections.csv"
  for ((index = 0; index < requests; index++)); do
    read_cache --json "$work/run.json" >"$work/log" 2>&1 || die "connection $index failed: $(<"$work/log")"
    jq -r --arg index "$index" '[$index, (.connect_s * 1e9 | round), .median_ns] | join(",")' "$work/run.json" >>"$out/connections.csv"
  done
}

many_readers() {
  local reader
  local -a pids=()
  for ((reader = 0; reader < readers; reader++)); do
    read_cache -n "$requests" --csv "$work/$reader.csv" >"$work/$reader.log" 2>&1 &
    pids+=($!)
  done
  echo "reader,index,start_ns,latency_ns,bytes" >"$out/readers.csv"
  for ((reader = 0; reader < readers; reader++)); do
    wait "${pids[reader]}" || die "reader $reader failed: $(<"$work/$reader.log")"
    tail -n +2 "$work/$reader.csv" | sed "s/^/$reader,/" >>"$out/readers.csv"
  done
}

# row LABEL FILE COLUMN
row() {
  tail -n +2 "$2" | cut -d, -f"$3" | sort -n | sed 's/^/x /' | awk -f "$here/bench/statistics.awk" |
    awk -F, -v label="$1" '{ printf "%-34s %8d %12.1f %12.1f %12.1f %12.1f %12.1f\n", label, $2, $3/1e3, $4/1e3, $5/1e3, $6/1e3, $7/1e3 }'
}

main() {
  while [[ $# -gt 0 ]]; do
    case $1 in
      -s | --server) server=${2:-} ;;
      -p | --port) port=${2:-} ;;
      --requests) requests=${2:-} ;;
      --readers) readers=${2:-} ;;
      --size) size=${2:-} ;;
      --out) out=${2:-} ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; exit 2 ;;
    esac
    shift 2 || { usage >&2; exit 2; }
  done
  [[ $requests =~ ^[1-9][0-9]*$ && $readers =~ ^[1-9][0-9]*$ ]] || { usage >&2; exit 2; }
  out=${out:-$project/build/load}
  work=$(mktemp -d) server_pid=""
  trap 'stop_kv_server; rm -rf "$work"' EXIT
  mkdir -p "$out"
  if [[ -z $server ]]; then
    start_kv_server "$work/server.log" --size "$size" -p "$port"
    server=localhost
  fi
  one_connection
  many_connections
  many_readers
  printf '%-34s %8s %12s %12s %12s %12s %12s\n' "READs of $size, microseconds" "#samples" min mean median p99 max
  row "one connection" "$out/requests.csv" 3
  row "a connection each: READ" "$out/connections.csv" 3
  row "a connection each: connecting" "$out/connections.csv" 2
  row "$readers readers at once" "$out/readers.csv" 4
}

main "$@"
