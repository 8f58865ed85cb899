#!/usr/bin/env bats
# At the limits of a machine: memory, disk, a file that changes, many readers. More of it is in errors.bats
# (memlock, a full disk) and hostile.bats (the queue of connections).
load helpers

setup() {
  need_device
  folder=$BATS_TEST_TMPDIR/folder
  mkdir "$folder"
}
teardown() {
  stop_what_runs
  [[ ! -d $folder/read-only ]] || umount "$folder/read-only"
  nothing_reported
}

@test "a cache larger than memory: told before any is taken" {
  local total=$(($(awk '/MemTotal/ { print $2 }' /proc/meminfo) * 1024))
  run --separate-stderr timeout 20 "$server" --size "$((total + 1))"
  fails 1 "mmap($((total + 1)) bytes): only " " bytes of memory are available here" "hint: the cache has to fit into memory"
  truncate -s "$((total * 2))" "$folder/cache" # a file with a hole: it takes no disk
  run --separate-stderr timeout 20 "$server" -f "$folder/cache"
  fails 1 "mmap($((total * 2)) bytes): only "
}

@test "a cache that fits the server's memory but not the reader's: the reader says so, the server goes on" {
  plain_build "memory and time"
  local available=$(($(awk '/MemAvailable/ { print $2 }' /proc/meminfo) * 1024))
  start_server --size "$((available * 6 / 10))"
  read_cache -o "$folder/received"
  fails 1 "mmap($((available * 6 / 10)) bytes): only "
  only_has "$folder"
  read_cache --size 1M
  [[ $status -eq 0 ]] || { show; return 1; }
  stop_server
}

@test "output in a folder that cannot be written: told before the transfer" {
  in_lab || skip "not in the lab: mounts a file system"
  mkdir "$folder/read-only"
  mount -t tmpfs -o ro tmpfs "$folder/read-only"
  start_server --size 1M
  read_cache -o "$folder/read-only/received"
  fails 1 "-o $folder/read-only/received: Read-only file system"
  [[ $(grep -c '^reader' "$log") -eq 0 ]]
  stop_server
}

@test "the cache file is truncated while the server loads it" {
  truncate -s 1G "$folder/cache"
  "$server" -f "$folder/cache" >"$folder/log" 2>&1 3>&- &
  local pid=$! status=0
  # Stopped while it touches the pages that it will read into.
  wait_for "[[ \$(awk '/VmRSS/ { print \$2 }' /proc/$pid/status) -gt 65536 ]]"
  kill -STOP "$pid"
  run ! grep prepared "$folder/log"
  truncate -s 1M "$folder/cache"
  kill -CONT "$pid"
  wait_for "! kill -0 $pid" 60
  wait "$pid" || status=$?
  [[ $status -eq 1 ]] && grep -q "read($folder/cache): the file became shorter while it was loaded" "$folder/log" ||
    { cat "$folder/log"; return 1; }
}

@test "64 readers at once" {
  start_server -v --size 64K --readers 64
  # Their outputs go to a pipe that is full: each connects, then waits with its first line.
  local number gate drain
  local -a pids=()
  mkfifo "$folder/gate"
  exec {gate}<>"$folder/gate"
  head -c 65536 /dev/zero >&"$gate"
  for number in {1..64}; do
    timeout 120 "$reader" -s "$address" -n 20 --timeout 60 >&"$gate" 2>"$folder/log.$number" 3>&- &
    pids+=($!)
  done
  wait_for "grep -q 'connected, 64 now' $log" 100 || { cat "$log" "$folder"/log.*; return 1; }
  cat <&"$gate" >/dev/null 3>&- &
  drain=$!
  for number in {1..64}; do
    wait "${pids[number - 1]}" || { cat "$folder/log.$number" "$log"; kill "$drain"; return 1; }
  done
  kill "$drain"
  server_ends
  grep -q '^served 64 of 64 readers' "$log"
}

# What the server has: file descriptors, and its queue pairs, memory regions and connections.
holdings() {
  echo "fds $(find "/proc/$server_pid/fd" -type l | wc -l)"
  local kind
  for kind in qp mr cm_id pd cq; do
    echo "$kind $(rdma resource show "$kind" | grep -c "pid $server_pid ")"
  done
}
resident() { awk '/VmRSS/ { print $2 }' "/proc/$server_pid/status"; }

@test "200 connections, one after the other: the server holds no more than before" {
  plain_build "many program starts"
  start_server --size 64K
  local connection before memory_before # not i: run uses that
  for connection in {1..5}; do read_cache; done
  wait_for "[[ \$(grep -c ^reader $log) -eq 5 ]]"
  before=$(holdings) memory_before=$(resident)
  grep -q '^mr 1$' <<<"$before" # it would be seen
  for connection in {1..200}; do
    read_cache
    [[ $status -eq 0 ]] || { echo "connection $connection"; show; return 1; }
  done
  wait_for "[[ \$(grep -c ^reader $log) -eq 205 ]]"
  wait_for "diff <(holdings) <(echo '$before')" || { holdings; echo "before: $before"; return 1; }
  (($(resident) <= memory_before + 64)) || { echo "resident: $memory_before KiB, then $(resident)"; return 1; }
  stop_server
  [[ $(grep -c 'MD5 equal' "$log") -eq 205 ]]
}
