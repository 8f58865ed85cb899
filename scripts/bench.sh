#!/usr/bin/env bash
# Measures rdma_kv_reader beside perftest, in turns, and everything that a transfer costs besides.
set -euo pipefail

here=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
project=$(dirname "$here")
# shellcheck source=common.sh
source "$here/common.sh"

sizes="1M 10M 100M 1G" pairs=9 rounds=5 out=""

usage() {
  cat <<TXT
usage: scripts/bench.sh [options]

Server and reader on the RDMA device of this machine or, without one, over SoftRoCE in the lab; between
their runs ib_read_bw and ib_read_lat, with the same device, MTU and bytes. Results go to
results/DATE-DEVICE/ as CSV and JSON, and a table to stdout. scripts/plot.sh draws them.

      --sizes "N..."   bytes to read, with K, M, G: powers of 1024 (default "$sizes")
      --pairs N        runs of the reader, and of perftest, for each size (default $pairs)
      --rounds N       how often all else is measured (default $rounds)
      --quick          3 sizes, the largest 100M, 3 pairs, and all else once
      --out FOLDER     where the results go
      --lab            in the lab, whatever this machine has
  -h, --help           this text

A run of the reader is 10 iterations for sizes up to 10M, else one; there are two runs in each pair.
TXT
}

step() { printf '\n== %s\n' "$*" >&2; }

bytes_of() { numfmt --from=iec "$1"; }

# What the figures depend on.
describe_environment() {
  local device=/sys/class/infiniband/$1
  echo "date: $(date -u +%Y-%m-%dT%H:%MZ)"
  echo "commit: $(git -C "$project" rev-parse --short HEAD 2>/dev/null || echo unknown)"
  echo "kernel: $(uname -srm)"
  echo "processor: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) in use"
  case ${LAB_ACCELERATOR:-} in
    tcg) echo "emulated: the lab, QEMU TCG" ;;
    kvm) echo "emulated: no, but in a virtual machine" ;;
    *) echo "emulated: no" ;;
  esac
  echo "device: $1 $(if [[ -e $device/parent ]]; then echo '(software)'; else cat "$device/board_id" 2>/dev/null; fi)"
  echo "firmware: $(cat "$device/fw_ver" 2>/dev/null)"
  echo "rate: $(cat "$device/ports/1/rate" 2>/dev/null)"
  echo "active MTU: $(ibv_devinfo -d "$1" | awk '/active_mtu/ { print $2; exit }')"
  echo "NUMA node of the device: $(cat "$device/device/numa_node" 2>/dev/null || echo none)"
  echo "transparent huge pages: $(cat /sys/kernel/mm/transparent_hugepage/enabled)"
  echo "perftest: $(dpkg-query -W -f '${Version}' perftest 2>/dev/null)"
}

# The median of a column of numbers, by nearest rank.
median() { sort -g | awk '{ value[NR] = $1 } END { print value[int((NR + 1) / 2)] }'; }

# read_cache OPTION... : one run of the reader; its figures are in $run (JSON), its rows in $rows (CSV).
read_cache() {
  "$project/rdma_kv_reader" -s "$address" --json "$run" --csv "$rows" "$@" >"$work/reader.log" 2>&1 ||
    { cat "$work/reader.log" >&2; return 1; }
}

# perftest PROGRAM OPTION... : server and client of it; the client's output. It fails now and then while it
# connects: tried again, which is said.
perftest() {
  local attempt
  for attempt in 1 2 3; do
    if perftest_once "$@" >"$work/perftest.out"; then
      cat "$work/perftest.out"
      return 0
    fi
    printf 'bench.sh: %s failed, attempt %s of 3\n' "$1" "$attempt" >&2
  done
  return 1
}

perftest_once() {
  local program=$1 status=0 peer
  shift
  "$program" -d "$device" -R "$@" >"$work/perftest.server" 2>&1 &
  peer=$!
  for ((i = 0; i < 100; i++)); do
    ! rdma resource show cm_id | grep "state LISTEN" | grep -q " pid $peer " || break
    sleep 0.1
  done
  timeout 300 "$program" -d "$device" -R "$@" "$address" 2>"$work/perftest.client" || status=$?
  if [[ $status -ne 0 ]]; then
    kill "$peer" 2>/dev/null || true
    printf 'bench.sh: %s %s: exit status %s\n' "$program" "$*" "$status" >&2
    cat "$work/perftest.client" "$work/perftest.server" >&2
  fi
  wait "$peer" || true
  return "$status"
}

# Out of ib_read_bw's output: its average in bytes per second. It prints MiB/s, older versions under the
# head "MB/sec".
bandwidth_of() { awk -v message="$1" '$1 == message { printf "%.0f\n", $4 * 1048576 }'; }

# Out of ib_read_lat's output: t_typical, its median, in ns.
latency_of() { awk -v message="$1" '$1 == message { printf "%.0f\n", $5 * 1000 }'; }

# Bandwidth: at each size reader and ib_read_bw in turns.
measure_size() {
  local bytes=$1 iterations=1 pair message count ours theirs
  ((bytes > 10485760)) || iterations=10
  for ((pair = 1; pair <= pairs; pair++)); do
    for message in 1048576 8388608; do
      read_cache --no-verify --size "$bytes" -n "$iterations"
      tail -n +2 "$rows" | awk -F, -v OFS=, -v bytes="$bytes" -v run="$pair.$message" '{ print bytes, run, $1, $2, $3 }' >>"$out/samples.csv"
      # As many bytes as that run had; perftest wants 5 iterations at least.
      count=$((bytes * iterations / message))
      ((count >= 5)) || count=5
      ours=$(jq '.gigabytes_per_second * 1e9 | round' "$run")
      theirs=$(perftest ib_read_bw -s "$message" -n "$count" | bandwidth_of "$message")
      echo "$bytes,$pair,$message,$ours,$theirs" >>"$out/pairs.csv"
    done
    printf '.' >&2
  done
}

# Latency of one small READ at a time: 4 KiB, depth 1, 1000 of them in a run.
measure_latency() {
  local pair
  for ((pair = 1; pair <= pairs; pair++)); do
    read_cache --no-verify --size 4096 -c 0 --outstanding 1 -n 1000
    echo "$pair,$(jq .median_ns "$run"),$(perftest ib_read_lat -s 4096 -n 1000 | latency_of 4096)" >>"$out/latency.csv"
    printf '.' >&2
  done
}

# seconds COMMAND... : how long it takes; its output goes to a log.
seconds() {
  local start=$EPOCHREALTIME
  "$@" >"$work/seconds.log" 2>&1 || { cat "$work/seconds.log" >&2; return 1; }
  awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.6f\n", b - a }'
}

tcp_copy() { ncat --recv-only "$address" 18600 >"$work/tcp.bin" && cmp "$work/cache.bin" "$work/tcp.bin"; }
tcp_server() { ncat -l "$address" 18600 --send-only <"$work/cache.bin"; }
rdma_copy() { rcopy "$work/cache.bin" "$address:$work/rcopy.bin"; }

# From the start of the process to the verified file on tmpfs, beside what one would use instead.
measure_end_to_end() {
  local round peer
  head -c 256M /dev/urandom >"$work/cache.bin"
  start_kv_server "$work/end_to_end.log" -f "$work/cache.bin" -p 12346
  for ((round = 1; round <= rounds; round++)); do
    echo "rdma_kv_reader,$round,$(seconds read_cache -p 12346 -o "$work/received.bin"),$(jq -r '[.connect_s, .allocate_s, .register_s, .median_ns / 1e9, .hash_s, .write_s] | join(",")' "$run")"
    rcopy >/dev/null 2>&1 &
    peer=$!
    sleep 1
    echo "rcopy,$round,$(seconds rdma_copy),,,,,,"
    kill "$peer" 2>/dev/null || true
    wait "$peer" 2>/dev/null || true
    tcp_server &
    sleep 1
    echo "tcp,$round,$(seconds tcp_copy),,,,,,"
    wait $!
  done >>"$out/end_to_end.csv"
  stop_kv_server
}

peak_kib() { awk '/^VmHWM/ { print $2 }' "/proc/$1/status"; }

# Peak resident memory: of a reader, of the server alone, and of the server with 8 readers.
measure_memory() {
  local pid alone eight i
  start_kv_server "$work/memory.log" --size 256M -p 12347
  alone=$(peak_kib "$server_pid")
  read_cache -p 12347
  local -a readers=()
  for i in {1..8}; do
    "$project/rdma_kv_reader" -s "$address" -p 12347 --size 1M -n 200 --no-verify >/dev/null 2>&1 &
    readers+=($!)
  done
  for pid in "${readers[@]}"; do wait "$pid"; done
  eight=$(peak_kib "$server_pid")
  stop_kv_server
  {
    echo "what,bytes,peak_bytes"
    echo "reader,268435456,$(jq .peak_bytes "$run")"
    echo "server,268435456,$((alone * 1024))"
    echo "server with 8 readers,268435456,$((eight * 1024))"
  } >"$out/memory.csv"
}

# From the rows to a line for each size. The reader is compared with the better of perftest's two
# message sizes: the one with the higher median.
summarise() {
  local bytes message best ratio theirs ours
  tail -n +2 "$out/samples.csv" | awk -F, '{ print $1, $5 }' | sort -k1,1n -k2,2n | awk -f "$here/bench/statistics.awk" >"$work/statistics.csv"
  echo "bytes,samples,min_ns,mean_ns,median_ns,p99_ns,max_ns,stdev_ns,gb_per_s,perftest_message,perftest_gb_per_s,ratio,pairs" >"$out/summary.csv"
  while IFS=, read -r bytes rest; do
    best=$(for message in 1048576 8388608; do
      echo "$(awk -F, -v b="$bytes" -v m="$message" '$1 == b && $3 == m { print $5 }' "$out/pairs.csv" | median) $message"
    done | sort -g | tail -n 1)
    theirs=${best% *} message=${best#* }
    ratio=$(awk -F, -v b="$bytes" -v m="$message" '$1 == b && $3 == m { print $4 / $5 }' "$out/pairs.csv" | median)
    ours=$(awk -v b="$bytes" -v median="$(cut -d, -f4 <<<"$rest")" 'BEGIN { printf "%.6f", b / median }')
    echo "$bytes,$rest,$ours,$message,$(awk -v x="$theirs" 'BEGIN { printf "%.6f", x / 1e9 }'),$ratio,$pairs"
  done <"$work/statistics.csv" >>"$out/summary.csv"
  jq -R -s --rawfile environment "$out/environment.txt" '
    def table: split("\n") | map(select(. != "") | split(",")) | .[0] as $head | .[1:] | map([$head, .] | transpose | map({(.[0]): (.[1] | tonumber)}) | add);
    {environment: ($environment | split("\n") | map(select(. != ""))), sizes: table}' <"$out/summary.csv" >"$out/summary.json"
}

report() {
  cat "$out/environment.txt"
  printf '\nThe reader, in microseconds, and beside it ib_read_bw with its better message size; ratio: median of %s pairs\n' "$pairs"
  awk -F, 'BEGIN { printf "%12s %8s %12s %12s %12s %12s %12s %12s %8s %10s %8s %7s\n", "#bytes", "#samples", "min", "mean", "median", "p99", "max", "stdev", "GB/s", "perftest", "GB/s", "ratio" }
    NR > 1 { printf "%12s %8s %12.1f %12.1f %12.1f %12.1f %12.1f %12.1f %8.3f %9dM %8.3f %7.3f\n", $1, $2, $3/1e3, $4/1e3, $5/1e3, $6/1e3, $7/1e3, $8/1e3, $9, $10/1048576, $11, $12 }' "$out/summary.csv"
  awk -F, 'NR > 1 { print $2 / $3 }' "$out/latency.csv" | median | sed 's/^/\n4 KiB, one at a time: median of reader \/ t_typical of ib_read_lat = /'
  printf '\nend to end, 256 MiB, seconds (median of %s)\n' "$rounds"
  for what in rdma_kv_reader rcopy tcp; do
    printf '%-16s %s\n' "$what" "$(awk -F, -v w="$what" '$1 == w { print $3 }' "$out/end_to_end.csv" | median)"
  done
  printf '\nregistration, seconds (median)\n'
  awk -F, 'NR > 1 { print $1 "/touched:" $2, $5 }' "$out/registration.csv" | sort -k1,1 -k2,2g | awk -f "$here/bench/statistics.awk" |
    awk -F, '{ printf "%-26s %s\n", $1, $5 }'
  printf '\npeak memory beyond the cache, MiB\n'
  awk -F, 'NR > 1 { printf "%-26s %.1f\n", $1, ($3 - $2) / 1048576 }' "$out/memory.csv"
  echo
  cat "$out/load.txt"
  printf '\nresults: %s\n' "${out#"$project"/}"
}

measure() {
  device=$(basename "$(dirname "$(dirname "$(dirname "$(grep -ls ACTIVE /sys/class/infiniband/*/ports/*/state | head -n 1)")")")")
  netdev=$(<"/sys/class/infiniband/$device/ports/1/gid_attrs/ndevs/0")
  address=$(ip -4 -o address show dev "$netdev" | awk '{ sub("/.*", "", $4); print $4; exit }')
  out=${out:-$project/results/$(date -u +%Y%m%d-%H%M)-$device}
  work=$(mktemp -d) run=$work/run.json rows=$work/rows.csv server_pid=""
  trap 'stop_kv_server; rm -rf "$work"' EXIT
  mkdir -p "$out"
  rm -f "$out"/*.csv
  describe_environment "$device" >"$out/environment.txt"
  echo "bytes,run,index,start_ns,latency_ns" >"$out/samples.csv"
  echo "bytes,pair,message,reader_bytes_per_s,perftest_bytes_per_s" >"$out/pairs.csv"
  echo "pair,reader_median_ns,ib_read_lat_typical_ns" >"$out/latency.csv"
  echo "what,round,seconds,connect_s,allocate_s,register_s,read_s,hash_s,write_s" >"$out/end_to_end.csv"

  local size largest=0
  for size in $sizes; do
    ((largest >= $(bytes_of "$size"))) || largest=$(bytes_of "$size")
  done
  step "registration: 4 KiB, transparent and reserved huge pages"
  reserve_huge_pages "$largest"
  "$project/build/bench/registration" --size "$largest" >"$out/registration.csv"
  release_huge_pages
  start_kv_server "$work/server.log" --size "$largest"
  for size in $sizes; do
    step "bandwidth: $size"
    measure_size "$(bytes_of "$size")"
  done
  step "latency: 4 KiB"
  measure_latency
  stop_kv_server
  step "end to end"
  measure_end_to_end
  step "memory"
  measure_memory
  step "load: requests one after the other, 8 readers at once"
  "$here/load.sh" --requests $((rounds * 20)) --out "$out" >"$out/load.txt"
  summarise
  report | tee "$out/report.txt"
}

# Where this user may, and not for longer than the measurement.
reserve_huge_pages() {
  huge_pages_before=$(</proc/sys/vm/nr_hugepages)
  echo $((huge_pages_before + $1 / 2097152)) 2>/dev/null >/proc/sys/vm/nr_hugepages || true
}
release_huge_pages() { echo "$huge_pages_before" 2>/dev/null >/proc/sys/vm/nr_hugepages || true; }

main() {
  local lab=false in_lab=false size
  while [[ $# -gt 0 ]]; do
    case $1 in
      --sizes) sizes=${2:-}; shift 2 || { usage >&2; exit 2; } ;;
      --pairs) pairs=${2:-}; shift 2 || { usage >&2; exit 2; } ;;
      --rounds) rounds=${2:-}; shift 2 || { usage >&2; exit 2; } ;;
      --out) out=${2:-}; shift 2 || { usage >&2; exit 2; } ;;
      --quick) sizes="1M 10M 100M" pairs=3 rounds=1; shift ;;
      --lab) lab=true; shift ;;
      --in-lab) in_lab=true; shift ;; # how this script goes on in the guest
      -h | --help) usage; exit 0 ;;
      *) usage >&2; exit 2 ;;
    esac
  done
  for size in $sizes; do
    [[ $size =~ ^[1-9][0-9]*[KMG]?$ ]] || { usage >&2; exit 2; }
  done
  [[ $pairs =~ ^[1-9][0-9]*$ && $rounds =~ ^[1-9][0-9]*$ ]] || { usage >&2; exit 2; }

  if $in_lab; then
    "$here/softroce.sh" up >&2
    measure
    exit
  fi
  "$here/install_deps.sh" build run bench
  if $lab || ! has_rdma_device; then
    "$here/lab.sh" --prepare
    make -s -C "$project" MARCH= all build/bench/registration
    "$here/lab.sh" --memory 6G -- "$here/bench.sh" --in-lab --sizes "$sizes" --pairs "$pairs" --rounds "$rounds" ${out:+--out "$(realpath -m "$out")"}
  else
    make -s -C "$project" all build/bench/registration
    measure
  fi
}

# The tests read this file for its arithmetic.
[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"
