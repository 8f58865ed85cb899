#!/usr/bin/env bats
# What arrives is what was sent: every size, part, way of cutting and way of waiting.
load helpers

setup() {
  need_device
  folder=$BATS_TEST_TMPDIR/folder
  mkdir "$folder"
}
teardown() {
  stop_what_runs
  nothing_reported
}

# round_trip BYTES OPTION... : a random file crosses and is compared byte for byte.
round_trip() {
  local bytes=$1
  shift
  head -c "$bytes" /dev/urandom >"$folder/cache"
  start_server -f "$folder/cache" --readers 1
  read_cache -o "$folder/received" "$@"
  [[ $status -eq 0 ]] || { show; return 1; }
  cmp "$folder/cache" "$folder/received"
  server_ends
  grep -q "$bytes bytes x 1, median .* us, MD5 equal" "$log"
}

@test "1 byte" { round_trip 1; }
@test "4095 bytes" { round_trip 4095; }
@test "4096 bytes" { round_trip 4096; }
@test "4097 bytes" { round_trip 4097; }
@test "1 MiB - 1" { round_trip 1048575; }
@test "1 MiB" { round_trip 1048576; }
@test "1 MiB + 1" { round_trip 1048577; }
@test "8 MiB + 1" { round_trip 8388609; }
@test "100 MB" {
  plain_build "memory and time"
  round_trip 100000000
}
@test "8 MiB + 1 with -c 0: work requests as large as the port's max_msg_sz" {
  round_trip 8388609 -c 0 --json "$folder/run.json"
  local most
  most=$(ibv_devinfo -v -d "$device" | awk '$1 == "max_msg_sz:" { print $2; exit }')
  [[ $(jq .chunk "$folder/run.json") -eq $((most < 8388609 ? most : 8388609)) ]] || { echo "max_msg_sz $most"; show; return 1; }
}

@test "1 GiB" {
  plain_build "memory and time"
  # In the project's folder: the guest's /tmp is in its memory.
  folder=$project/build/tests/1g
  rm -rf "$folder"
  mkdir -p "$folder"
  round_trip 1073741824
  rm -r "$folder"
}

@test "chunks and depths, polling and asleep: the same bytes" {
  head -c 1000003 /dev/urandom >"$folder/cache"
  start_server -f "$folder/cache"
  local options head
  while IFS='|' read -r options head; do
    rm -f "$folder/received"
    # shellcheck disable=SC2086 # several options
    read_cache -o "$folder/received" $options
    [[ $status -eq 0 && $output == *"$head"* ]] || { echo "$options"; show; return 1; }
    cmp "$folder/cache" "$folder/received"
  done <<'TXT'
-c 0|work requests of 1000003 bytes, 16 outstanding, polling
-c 0 --outstanding 1|work requests of 1000003 bytes, 1 outstanding, polling
-c 64K --outstanding 1|work requests of 65536 bytes, 1 outstanding, polling
-c 4095 --outstanding 7|work requests of 4095 bytes, 7 outstanding, polling
-c 100 --outstanding 128|work requests of 100 bytes, 128 outstanding, polling
-c 1000002|work requests of 1000002 bytes, 16 outstanding, polling
-c 1T|work requests of 1000003 bytes, 16 outstanding, polling
--events|work requests of 1000003 bytes, 16 outstanding, completion events
-c 4K --events|work requests of 4096 bytes, 16 outstanding, completion events
-c 4K --outstanding 1 --events|work requests of 4096 bytes, 1 outstanding, completion events
TXT
  stop_server
}

@test "chunks of one byte" { round_trip 3001 -c 1; }

@test "outstanding work requests are held to what the device has" {
  start_server --size 1M
  read_cache --outstanding 2000000000 --json "$folder/run.json"
  [[ $status -eq 0 ]] || { show; return 1; }
  local limit
  limit=$(ibv_devinfo -v -d "$device" | awk '$1 == "max_cqe:" || $1 == "max_qp_wr:" { print $2 }' | sort -n | head -n 1)
  [[ $(jq .outstanding "$folder/run.json") -eq $limit ]] || { show; return 1; }
}

@test "parts of the cache" {
  head -c 1000003 /dev/urandom >"$folder/cache"
  start_server -f "$folder/cache"
  local part offset size
  for part in "0 1" "1 1" "1000002 1" "4097 500000" "999 0"; do
    read -r offset size <<<"$part"
    local options=(--offset "$offset")
    [[ $size -eq 0 ]] || options+=(--size "$size") # 0 here: to the end
    read_cache -o "$folder/received" "${options[@]}"
    [[ $status -eq 0 && $output == *"MD5 not checked: a part cannot be compared"* ]] || { echo "$part"; show; return 1; }
    [[ $size -ne 0 ]] || size=$((1000003 - offset))
    [[ $(stat -c %s "$folder/received") -eq $size ]]
    cmp -n "$size" -i "$offset:0" "$folder/cache" "$folder/received"
  done
  grep -q "1 bytes x 1, .*MD5 not checked" "$log"
  stop_server
}

@test "a synthetic cache differs at every word" {
  start_server --size 80K
  read_cache -o "$folder/received"
  [[ $status -eq 0 ]] || { show; return 1; }
  [[ $(od -An -v -t x8 -w8 "$folder/received" | sort | uniq -d | wc -l) -eq 0 ]]
}

@test "100 iterations: every figure agrees with the rows they come from" {
  start_server --size 1M
  read_cache -n 100 --csv "$folder/run.csv" --json "$folder/run.json"
  [[ $status -eq 0 && $output != *"fewer than 100"* ]] || { show; return 1; }
  # Computed again from the rows: nearest rank is row 50, 99 and 100 of the sorted hundred.
  local expected
  expected=$(tail -n +2 "$folder/run.csv" | cut -d, -f3 | sort -n | awk '
    { row[NR] = $1; sum += $1 }
    END { printf "%d %.0f %.0f %.0f %.0f %.1f\n", NR, row[1], row[50], row[99], row[100], sum / NR }')
  [[ $(jq -r '"\(.iterations) \(.min_ns) \(.median_ns) \(.p99_ns) \(.max_ns)"' "$folder/run.json") == "${expected% *}" ]]
  awk -v a="$(jq .mean_ns "$folder/run.json")" -v b="${expected##* }" 'BEGIN { exit !(a - b < 1 && b - a < 1) }'
  # In order, and one after the other.
  awk -F, 'NR == 1 { exit $0 != "index,start_ns,latency_ns,bytes" }' "$folder/run.csv"
  awk -F, 'NR > 1 { if ($1 != NR - 2 || $2 < end || $4 != 1048576) exit 1; end = $2 + $3 }' "$folder/run.csv"
  [[ $(jq -r .verdict "$folder/run.json") == equal ]]
  grep -q "1048576 bytes x 100, .*MD5 equal" "$log"
}

@test "fewer than 100 samples: the output says what p99 is" {
  start_server --size 64K
  read_cache -n 99
  [[ $status -eq 0 && $output == *"fewer than 100 samples: t_p99 is t_max"* ]] || { show; return 1; }
}

@test "the table has perftest's columns; only results are on stdout" {
  start_server --size 64K
  read_cache -v
  [[ $status -eq 0 ]] || { show; return 1; }
  [[ $output == *"#bytes"*"#iterations"*"t_min[usec]"*"t_median[usec]"*"t_avg[usec]"*"t_p99[usec]"*"t_max[usec]"*"t_stdev[usec]"*"GB/s"*"Gb/s"* ]]
  [[ $output == *"device  $device"*", port 1, GID ::ffff:$address, MTU "* ]]
  [[ $stderr == *"READ depth "* && $output != *"READ depth"* ]]
}

@test "the READ depth is more than 1, and no more than the device has" {
  start_server --size 64K
  read_cache --json "$folder/run.json"
  local depth limit
  depth=$(jq .read_depth "$folder/run.json")
  limit=$(ibv_devinfo -v -d "$device" | awk '$1 == "max_qp_init_rd_atom:" { print $2 }')
  ((depth > 1 && depth <= limit)) || { echo "depth $depth of $limit"; show; return 1; }
}

@test "8 readers at once" {
  head -c 4000037 /dev/urandom >"$folder/cache"
  start_server -v -f "$folder/cache" --readers 8
  local i
  local -a pids=()
  for i in {1..8}; do
    timeout 120 "$reader" -s "$address" -n 40 -o "$folder/received.$i" >"$folder/log.$i" 2>&1 3>&- &
    pids+=($!)
  done
  for i in {1..8}; do
    wait "${pids[i - 1]}" || { cat "$folder/log.$i" "$log"; return 1; }
    cmp "$folder/cache" "$folder/received.$i"
  done
  server_ends
  grep -q 'connected, 8 now' "$log" || { cat "$log"; return 1; }
}

@test "a loopback address is mapped to a device's own, and said" {
  start_server --size 64K
  local loopback
  for loopback in 127.0.0.1 127.1.2.3 localhost ::1; do
    read_cache_at "$loopback"
    [[ $status -eq 0 && $stderr == *"$loopback is loopback, over which RDMA never connects: using $address:12345"* ]] || { show; return 1; }
  done
}

@test "IPv6: an address of the device, and a server bound to it" {
  in_lab || skip "not in the lab: the interface's addresses are not the test's to change"
  ip address add fd00:77::1/64 dev "$netdev" nodad
  wait_for "grep -q fd00:0077:0000:0000:0000:0000:0000:0001 /sys/class/infiniband/$device/ports/1/gids/*"
  start_server --size 64K -b fd00:77::1
  read_cache_at fd00:77::1
  [[ $status -eq 0 && $output == *"server  [fd00:77::1]:12345"* ]] || { show; return 1; }
  stop_server
  ip address del fd00:77::1/64 dev "$netdev"
}

@test "-d and -b on both sides" {
  start_server --size 64K -d "$device" -b "$address"
  read_cache -d "$device" -b "$address"
  [[ $status -eq 0 ]] || { show; return 1; }
  read_cache -d "$device"
  [[ $status -eq 0 ]] || { show; return 1; }
}

@test "the output replaces a file, follows a symbolic link, and leaves nothing else" {
  mkdir "$folder/out"
  echo old >"$folder/out/received"
  ln -s received "$folder/out/link"
  start_server --size 64K
  read_cache -o "$folder/out/link"
  [[ $status -eq 0 ]] || { show; return 1; }
  [[ -L $folder/out/link && $(stat -c %s "$folder/out/received") -eq 65536 ]]
  [[ $(stat -c %a "$folder/out/received") == 644 ]]
  only_has "$folder/out" link received
}

@test "--no-verify does not compare, and says so to both sides" {
  start_server --size 64K --readers 1
  read_cache --no-verify
  [[ $status -eq 0 && $output == *"MD5 not checked: --no-verify"* ]] || { show; return 1; }
  server_ends
  grep -q 'MD5 not checked' "$log"
}

@test "server.sh and reader.sh, as in the specification" {
  plain_build "the scripts run the project's build"
  cd "$folder"
  "$project/scripts/make_kv_cache.sh" 1M
  log=server.out
  "$project/scripts/server.sh" -p 12346 --readers 1 >"$log" 2>&1 3>&- &
  # shellcheck disable=SC2034 # for server_ends
  server_pid=$!
  wait_for "grep -qs ^listening $log"
  run -0 timeout 120 "$project/scripts/reader.sh" "$address" -p 12346
  server_ends
  [[ $(md5sum <kv_cache.bin) == "$(md5sum <received.bin)" ]]
}

@test "load.sh: the latency of each request, and of readers at once" {
  plain_build "the script runs the project's build"
  run -0 timeout 300 "$project/scripts/load.sh" --requests 20 --readers 4 --size 64K --out "$folder"
  [[ $output == *"one connection "*"a connection each: READ"*"4 readers at once"* ]]
  [[ $(tail -n +2 "$folder/requests.csv" | wc -l) -eq 20 && $(tail -n +2 "$folder/connections.csv" | wc -l) -eq 20 ]]
  [[ $(tail -n +2 "$folder/readers.csv" | wc -l) -eq 80 && $(tail -n +2 "$folder/readers.csv" | cut -d, -f1 | sort -u | wc -l) -eq 4 ]]
  run -1 timeout 300 "$project/scripts/load.sh" -s "$address" -p 12399 --out "$folder"
  [[ $output == *"load.sh: the sequential READs failed: "*"nobody listens on this port"* ]] || { echo "$output"; return 1; }
}
