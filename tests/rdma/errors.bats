#!/usr/bin/env bats
# What a user sees when something is wrong: the message, the hint, the exit status, in bounded time.
load helpers

setup() {
  need_device
  folder=$BATS_TEST_TMPDIR/folder
  mkdir "$folder"
}
teardown() {
  stop_what_runs
  kill_hard "${other_pid:-}"
  nothing_reported
}

@test "wrong port: nobody listens" {
  read_cache -p 12399
  fails 1 "rdma_connect($address:12399): rejected: nobody listens on this port" "hint: is rdma_kv_server running"
}

@test "wrong address on the device's network: an error within the timeout" {
  in_lab || skip "not in the lab: the address may be somebody's"
  local start=$SECONDS
  read_cache_at "${address%.*}.99" --timeout 2
  fails 1 "rdma_resolve_addr(${address%.*}.99:12345)" "hint: is the address right"
  ((SECONDS - start <= 5))
}

@test "wrong address that no RDMA device leads to" {
  in_lab || skip "not in the lab: this machine's routes are not known"
  read_cache_at 10.99.0.1 --timeout 2
  fails 1 "rdma_resolve_addr(10.99.0.1:12345)" "hint: "
}

@test "a name that does not resolve" {
  read_cache_at no-such-host.invalid
  fails 1 "getaddrinfo(no-such-host.invalid): "
  run --separate-stderr timeout 60 "$server" --size 1M -b no-such-host.invalid
  fails 1 "getaddrinfo(no-such-host.invalid): "
}

@test "a device that is not there, on both sides" {
  read_cache -d mlx9_9
  fails 1 "device mlx9_9: not on this machine" "hint: there are: " "$device"
  run --separate-stderr timeout 60 "$server" --size 1M -d mlx9_9
  fails 1 "device mlx9_9: not on this machine" "hint: there are: " "$device"
}

@test "the server's port is in use" {
  start_server --size 1M
  run --separate-stderr timeout 60 "$server" --size 1M
  fails 1 "rdma_bind_addr([::]:12345): the port is in use by another program" "hint: choose another with -p"
  run --separate-stderr timeout 60 "$server" --size 1M -b "$address"
  fails 1 "rdma_bind_addr($address:12345): the port is in use by another program"
  stop_server
  start_server --size 1M -b "$address"
  run --separate-stderr timeout 60 "$server" --size 1M -b "$address"
  fails 1 "rdma_bind_addr($address:12345): the port is in use by another program"
}

@test "the server bound to an address without RDMA" {
  run --separate-stderr timeout 60 "$server" --size 1M -b 127.0.0.1
  fails 1 "rdma_bind_addr(127.0.0.1:12345): a loopback address, over which RDMA never connects"
  run --separate-stderr timeout 60 "$server" --size 1M -b 192.0.2.1
  fails 1 "rdma_bind_addr(192.0.2.1:12345): Cannot assign requested address" "no RDMA device here has this address"
}

@test "-b and -d of the server that contradict each other" {
  need_second_device
  run --separate-stderr timeout 60 "$server" --size 1M -b "$address" -d "$second"
  fails 1 "-b $address -d $second: that address belongs to device $device"
}

@test "a reader that arrives on another device than the cache's is told both" {
  need_second_device
  start_server --size 1M -d "$device"
  read_cache_at "$second_address"
  fails 1 "refused by the server: the cache is on device $device, this connection arrives on $second"
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
}

@test "--offset and --size beyond the cache" {
  start_server --size 1M
  local options
  for options in "--offset 1M" "--offset 1048575 --size 2" "--size 1048577" "--offset 1T" "--offset 18446744073709551615 --size 1"; do
    # shellcheck disable=SC2086 # several options
    read_cache -o "$folder/received" $options
    fails 1 "--offset " "beyond the cache, which has 1048576 bytes"
  done
  [[ ! -e $folder/received ]]
  server_is_alive
}

@test "memlock limit too low: bytes needed, the limit, the remedy" {
  as_nobody "$server" --size 4M
  fails 1 "ibv_reg_mr(4194304 bytes): Cannot allocate memory" \
    "hint: 4194304 bytes have to be locked in memory, the limit is 65536: 'ulimit -l unlimited'"
  start_server --size 4M
  as_nobody "$reader" -s "$address"
  fails 1 "ibv_reg_mr(4194304 bytes): Cannot allocate memory" "the limit is 65536"
  server_is_alive
}

@test "output that cannot be written is told before the transfer" {
  start_server --size 1M
  read_cache -o "$folder/no/such/folder/received"
  fails 1 "-o $folder/no/such/folder/received: No such file or directory"
  read_cache -o "$folder"
  fails 1 "-o $folder: is a folder"
  read_cache -o /dev/null
  fails 1 "-o /dev/null: is not a regular file"
  [[ -c /dev/null ]]
  read_cache --csv "$folder/no/run.csv"
  fails 1 "--csv $folder/no/run.csv: No such file or directory"
  as_nobody "$reader" -s "$address" -o /usr/received # a folder that anybody may enter
  fails 1 "-o /usr/received: Permission denied"
  [[ $(grep -c '^reader' "$log") -eq 0 ]] # none of them had connected
}

@test "the disk is full: no output that looks complete" {
  in_lab || skip "not in the lab: mounts a file system"
  mkdir "$folder/small"
  mount -t tmpfs -o size=512k tmpfs "$folder/small"
  start_server --size 1M
  read_cache -o "$folder/small/received"
  only_has "$folder/small"
  umount "$folder/small"
  fails 1 "No space left on device" "$folder/small/received."
}

@test "a peer that is not our server" {
  rping -s -a "$address" -p 12377 >/dev/null 2>&1 3>&- &
  other_pid=$!
  sleep 1
  read_cache_at "$address" -p 12377 --timeout 3
  fails 1 "rdma_connect($address:12377): the peer is not an rdma_kv_server"
}

@test "a client that is not our reader is refused, and the next reader served" {
  start_server --size 1M
  run timeout 60 rping -c -a "$address" -p 12345 -C 1
  [[ $status -ne 0 ]]
  wait_for "grep -q 'refused: no handshake of this program' $log"
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
  stop_server
}

@test "a reader of another handshake version is told both, and the next one served" {
  start_server --size 1M
  run --separate-stderr timeout 60 "$project/build/tests/rdma_kv_reader" -s "$address"
  fails 1 "refused by the server: handshake version 999, not 1"
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
  stop_server
}

@test "bytes that differ: exit status 3, the server told, no output, an older one kept" {
  head -c 1M /dev/zero >"$folder/cache"
  mkdir "$folder/out"
  echo old >"$folder/out/received"
  # Of the project's own build the cache is the one mapping of its size; sanitizers have others.
  local server=$project/rdma_kv_server
  start_server -f "$folder/cache"
  # One byte of the registered cache changes, as by a fault of the memory, after its MD5 was taken.
  local place
  place=$(awk '/^[0-9a-f]+-/ && $6 == "" { split($1, at, "-"); print at[1], at[2] }' "/proc/$server_pid/maps" |
    while read -r from to; do
      [[ $((16#$to - 16#$from)) -ne 1048576 ]] || echo "$((16#$from))"
    done | head -n 1)
  [[ -n $place ]]
  need_root # to write to another process's memory
  printf x | dd of="/proc/$server_pid/mem" bs=1 seek="$((place + 777777))" conv=notrunc status=none
  read_cache -o "$folder/out/received"
  fails 3 "the server's is b6d81b360a5672d80c27430f39153e2c" "hint: what arrived is not the cache"
  only_has "$folder/out" received
  [[ $(<"$folder/out/received") == old ]]
  wait_for "grep -q 'MD5 DIFFERENT' $log"
}

@test "a cache file that is missing, empty, unreadable, or no file" {
  run --separate-stderr timeout 60 "$server" -f "$folder/missing"
  fails 1 "open($folder/missing): No such file or directory" "hint: scripts/make_kv_cache.sh"
  : >"$folder/empty"
  run --separate-stderr timeout 60 "$server" -f "$folder/empty"
  fails 1 "open($folder/empty): the file is empty"
  run --separate-stderr timeout 60 "$server" -f "$folder"
  fails 1 "open($folder): not a regular file"
  as_nobody "$server" -f /etc/shadow
  fails 1 "open(/etc/shadow): Permission denied"
}

# A second device, for what needs two.
need_second_device() {
  in_lab || skip "not in the lab: makes a second device"
  second=rxe_second second_address=192.168.80.1
  [[ ! -e /sys/class/infiniband/$second ]] || return 0
  ip link add second0 mtu 9000 type veth peer name second1
  ip address add "$second_address/24" dev second0
  ip link set second0 up
  ip link set second1 up
  rdma link add "$second" type rxe netdev second0
  wait_for "grep -q ffff:c0a8:5001 /sys/class/infiniband/$second/ports/1/gids/*"
}

teardown_file() {
  [[ ! -e /sys/class/infiniband/rxe_second ]] || { rdma link delete rxe_second; ip link delete second0; }
}
