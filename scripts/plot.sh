#!/usr/bin/env bash
# Draws what scripts/bench.sh and scripts/load.sh have measured, as PNG and SVG.
set -euo pipefail

here=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
rate=400

usage() {
  cat <<TXT
usage: scripts/plot.sh [--rate GBITS] RESULTS [OUTPUT]

RESULTS   a folder of scripts/bench.sh: latency over size, median with bars to p99, beside ib_read_bw
          and what a link of GBITS Gb/s takes at least (default $rate); where it has a requests.csv of
          scripts/load.sh, also the latency of each request
OUTPUT    where latency.png, latency.svg, requests.png, requests.svg go (default RESULTS)
TXT
}

# What the title says of the machine: emulated figures are called so in the picture itself.
origin() { awk '/^emulated: the/ { printf "EMULATED: %s; ", substr($0, 11) } /^device: / { printf "%s", $0 }' "$1/environment.txt"; }

draw() {
  local terminal=$1 file=$2 results=$3 what=$4
  gnuplot -e "results='$results'; rate=$rate; origin='$(origin "$results")'" \
    -e "set terminal $terminal; set output '$file'" "$here/bench/$what.gnuplot"
}

main() {
  while [[ ${1:-} == -* ]]; do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --rate)
        rate=${2:-}
        [[ $rate =~ ^[1-9][0-9]*$ ]] || { usage >&2; exit 2; }
        shift 2
        ;;
      *) usage >&2; exit 2 ;;
    esac
  done
  [[ $# -ge 1 && $# -le 2 ]] || { usage >&2; exit 2; }
  local results=$1 output=${2:-$1} what
  [[ -s $results/summary.csv ]] || { printf 'plot.sh: %s: no summary.csv of scripts/bench.sh\n' "$results" >&2; exit 1; }
  "$here/install_deps.sh" bench
  mkdir -p "$output"
  for what in latency requests; do
    [[ $what == latency || -s $results/requests.csv ]] || continue
    draw "pngcairo size 1100,750 font 'sans,12'" "$output/$what.png" "$results" "$what"
    draw "svg size 1100,750 font 'sans,12' background 'white'" "$output/$what.svg" "$results" "$what"
    printf '%s\n' "$output/$what.png" "$output/$what.svg"
  done
}

main "$@"
