#!/usr/bin/env bats
# The arithmetic of scripts/bench.sh: units, percentiles, ratios. Not how fast anything is.
bats_require_minimum_version 1.5.0

setup() {
  cd "$BATS_TEST_DIRNAME/.." || return
  # shellcheck source=../scripts/bench.sh
  source scripts/bench.sh
  out=$BATS_TEST_TMPDIR work=$BATS_TEST_TMPDIR pairs=3
}

# The same statistics by jq, from the unsorted values.
by_jq() {
  jq -s -r 'sort as $v | length as $n | (add / $n) as $mean
    | [$n, $v[0], $mean, $v[(($n * 50 + 99) / 100 | floor) - 1], $v[(($n * 99 + 99) / 100 | floor) - 1], $v[-1],
       (if $n > 1 then (map((. - $mean) * (. - $mean)) | add / ($n - 1) | sqrt) else 0 end)] | map(tostring) | join(",")'
}

@test "statistics.awk agrees with another computation, for any number of samples" {
  local count
  for count in 1 2 3 9 10 99 100 101 200 1000; do
    awk -v n="$count" 'BEGIN { srand(n); for (i = 0; i < n; i++) printf "%d\n", rand() * 1e6 }' >"$work/values"
    sed 's/^/g /' "$work/values" | sort -k1,1 -k2,2n | awk -f scripts/bench/statistics.awk | cut -d, -f2- >"$work/ours"
    by_jq <"$work/values" >"$work/theirs"
    # Equal to nine digits, which is what is printed.
    paste -d, "$work/ours" "$work/theirs" | awk -F, '
      { for (i = 1; i <= 7; i++) { d = $i - $(i + 7); if (d < 0) d = -d; if (d > 1e-8 * ($i + 1)) { print; exit 1 } } }' ||
      { echo "$count samples"; return 1; }
  done
}

@test "statistics.awk keeps groups apart" {
  run -0 awk -f scripts/bench/statistics.awk <<<$'1024 5\n1024 7\n4096 100'
  [[ $output == $'1024,2,5,6,5,7,7,1.41421356\n4096,1,100,100,100,100,100,0' ]] || { echo "$output"; return 1; }
}

@test "the median is the nearest rank, also of numbers with exponents" {
  [[ $(printf '%s\n' 3 1 2 | median) == 2 && $(printf '%s\n' 4 1 3 2 | median) == 2 && $(printf '%s\n' 1.5e9 2e8 3e9 | median) == 1.5e9 ]]
}

@test "perftest's units: MiB/s under the head MB/sec, microseconds" {
  # As version 4.5 prints them.
  [[ $(bandwidth_of 1048576 <<'TXT'
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    100              135.35             100.50             0.000108
TXT
  ) == 105381888 ]]
  [[ $(latency_of 4096 <<'TXT'
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 4096    1000          49.10          320.00       61.25              66.00          10.00           99.00                  300.00
TXT
  ) == 61250 ]]
}

@test "summary: the better of perftest's sizes, and the median of that size's pairs" {
  {
    echo bytes,run,index,start_ns,latency_ns
    printf '1000,%s\n' 1.1,0,0,10 1.8,0,0,30 2.1,0,0,20
    printf '500000000,%s\n' 1.1,0,0,1000000000 1.8,0,0,3000000000 2.1,0,0,2000000000
  } >"$out/samples.csv"
  {
    echo bytes,pair,message,reader_bytes_per_s,perftest_bytes_per_s
    # 1 MiB: perftest's median 100; ratios .5 1 2. 8 MiB: median 200, better; ratios 1.1 .9 1.2.
    printf '1000,%s\n' 1,1048576,50,100 2,1048576,100,100 3,1048576,200,100 1,8388608,220,200 2,8388608,180,200 3,8388608,240,200
    printf '500000000,%s\n' 1,1048576,3e8,3e8 2,1048576,2e8,1e9 3,1048576,4e8,1e9 1,8388608,1,2 2,8388608,1,2 3,8388608,1,2
  } >"$out/pairs.csv"
  echo "emulated: yes" >"$out/environment.txt"
  summarise
  [[ $(sed -n 2p "$out/summary.csv") == "1000,3,10,20,20,30,30,10,50.000000,8388608,0.000000,1.1,3" ]] || { cat "$out/summary.csv"; return 1; }
  [[ $(sed -n 3p "$out/summary.csv") == "500000000,3,1e+09,2e+09,2e+09,3e+09,3e+09,1e+09,0.250000,1048576,1.000000,0.4,3" ]] || { cat "$out/summary.csv"; return 1; }
  [[ $(jq -r '.sizes[1] | [.bytes, .gb_per_s, .ratio] | join(" ")' "$out/summary.json") == "500000000 0.25 0.4" ]]
  [[ $(jq -r '.environment[0]' "$out/summary.json") == "emulated: yes" ]]
}

@test "plot.sh draws, and says so when there is nothing to draw" {
  run -1 scripts/plot.sh "$out"
  [[ $output == *"no summary.csv"* ]]
  {
    echo bytes,samples,min_ns,mean_ns,median_ns,p99_ns,max_ns,stdev_ns,gb_per_s,perftest_message,perftest_gb_per_s,ratio,pairs
    echo 1048576,100,8e6,9e6,8.5e6,12e6,13e6,1e6,0.123,1048576,0.12,1.0,10
    echo 10485760,100,8e7,9e7,8.5e7,12e7,13e7,1e6,0.123,1048576,0.12,1.0,10
  } >"$out/summary.csv"
  printf 'emulated: the lab, QEMU TCG\ndevice: rxe0 (software)\n' >"$out/environment.txt"
  printf 'index,start_ns,latency_ns,bytes\n0,0,1000000,1048576\n1,1100000,1200000,1048576\n' >"$out/requests.csv"
  run -0 --separate-stderr scripts/plot.sh "$out"
  [[ -z $stderr ]] || { echo "$stderr"; return 1; }
  [[ $(head -c 4 "$out/latency.png" | tail -c 3) == PNG && $(head -c 4 "$out/requests.png" | tail -c 3) == PNG ]]
  grep -q 'EMULATED: the lab, QEMU TCG; device: rxe0 (software)' "$out/latency.svg"
}
