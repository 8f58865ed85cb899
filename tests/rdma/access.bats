#!/usr/bin/env bats
# Who may read: --allow and --isolate. What a key is worth to others is in hostile.bats.
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

@test "--allow: a reader from elsewhere is told that, and by the next server's one served" {
  start_server --size 1M --allow 10.0.0.0/8 --allow fd00::/8
  read_cache -o "$folder/received"
  fails 1 "refused by the server: your address, $address:" "is not allowed here (--allow)"
  only_has "$folder"
  grep -q "reader $address:[0-9]* refused: your address" "$log"
  stop_server
  start_server --size 1M --allow 10.0.0.0/8 --allow "$address/30"
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
  stop_server
}

@test "--allow over IPv6" {
  in_lab || skip "not in the lab: gives an interface an address"
  ip -6 address add fd77::1/64 dev "$netdev" nodad
  wait_for "grep -qi fd77:0000:0000:0000:0000:0000:0000:0001 /sys/class/infiniband/$device/ports/1/gids/*"
  start_server --size 1M --allow fd77::/64
  read_cache_at fd77::1
  local over_ipv6=$status
  read_cache # from an IPv4 address
  ip -6 address del fd77::1/64 dev "$netdev"
  fails 1 "is not allowed here"
  [[ $over_ipv6 -eq 0 ]] || { cat "$log"; return 1; }
  stop_server
}

@test "--isolate: readers one after the other and at once get the same bytes; no window stays" {
  head -c 4000037 /dev/urandom >"$folder/cache"
  start_server -f "$folder/cache" --isolate
  local number
  local -a pids=()
  for number in 1 2 3 4; do
    "$reader" -s "$address" -n 10 --timeout 30 -o "$folder/received.$number" >"$folder/log.$number" 2>&1 3>&- &
    pids+=($!)
  done
  for number in 1 2 3 4; do
    wait "${pids[number - 1]}" || { cat "$folder/log.$number" "$log"; return 1; }
    cmp "$folder/cache" "$folder/received.$number"
  done
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
  stop_server
  grep -q '^served 5 of 5 readers' "$log"
}

@test "--isolate: a device without type 2 windows is refused" {
  plain_build "a library comes before the sanitizers'"
  run --separate-stderr env LD_PRELOAD="$project/build/tests/without_windows.so" timeout 60 "$server" --size 1M --isolate
  fails 1 "--isolate: device $device has no type 2 memory windows" "hint: without it readers share one key"
}
