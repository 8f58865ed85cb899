#!/usr/bin/env bats
# A process that goes away in the middle costs the other side an error in bounded time, and the
# server nothing.
load helpers

setup() {
  need_device
  folder=$BATS_TEST_TMPDIR/folder
  mkdir "$folder"
}
teardown() {
  kill_hard "${reader_pid:-}"
  stop_what_runs
  nothing_reported
}

# A reader that will be at it for a while; returns when it reads. 32 MiB is well under a second's work.
start_long_reader() {
  rm -f "$folder/reader.log" # of an earlier one, which says "reading" too
  "$reader" -s "$address" -n 100000 -o "$folder/received" "$@" >"$folder/reader.log" 2>&1 3>&- &
  reader_pid=$!
  wait_for "grep -qs ^reading $folder/reader.log || ! kill -0 $reader_pid"
  sleep 0.5
  kill -0 "$reader_pid" || { cat "$folder/reader.log"; return 1; }
}

# reader_ends STATUS SECONDS TEXT
reader_ends() {
  local status=0 pid=$reader_pid
  wait_for "! kill -0 $pid" "$2"
  reader_pid=""
  wait "$pid" || status=$?
  if [[ $status -ne $1 ]] || ! grep -q "$3" "$folder/reader.log"; then
    echo "reader: exit status $status"
    cat "$folder/reader.log"
    return 1
  fi
}


@test "a reader is killed while reading: another is served, and nothing stays behind" {
  start_server --size 32M
  start_long_reader
  [[ $(rdma resource show qp | grep -c rdma_kv_) -ge 2 ]] # they would be seen
  kill_hard "$reader_pid"
  wait_for "grep -q 'left without a closing message' $log"
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
  wait_for "[[ \$(rdma resource show qp | grep -c rdma_kv_) -eq 0 ]]"
  only_has "$folder" reader.log
  stop_server
}

@test "ten readers are killed one after the other: the eleventh is served" {
  plain_build "many program starts"
  start_server --size 32M
  for _ in {1..10}; do
    start_long_reader
    kill_hard "$reader_pid"
  done
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
  wait_for "[[ \$(rdma resource show qp | grep -c rdma_kv_) -eq 0 ]]"
  [[ $(rdma resource show mr | grep -c rdma_kv_server) -eq 1 ]] # the cache
  stop_server
}

@test "the server is killed while a reader reads: the reader ends with an error, and no output" {
  start_server --size 32M
  start_long_reader --timeout 10
  kill_hard "$server_pid"
  server_pid=""
  reader_ends 1 12 'of 33554432 bytes had arrived'
  only_has "$folder" reader.log
}

@test "the same for a reader that sleeps on events" {
  start_server --size 32M
  start_long_reader --timeout 10 --events
  kill_hard "$server_pid"
  server_pid=""
  reader_ends 1 12 'of 33554432 bytes had arrived'
  only_has "$folder" reader.log
}

@test "SIGTERM to the server while a reader reads: both end, the server well" {
  start_server --size 32M
  start_long_reader
  stop_server
  reader_ends 1 12 'the server disconnected\|flushed'
  grep -q 'was disconnected without a closing message' "$log"
  only_has "$folder" reader.log
}

@test "SIGINT to a server that still loads: exit status 0, soon" {
  plain_build "memory and time"
  "$server" --size 1G >"$folder/log" 2>&1 3>&- &
  server_pid=$! log=$folder/log
  sleep 1
  kill -INT "$server_pid"
  server_ends
  grep -q 'interrupted' "$log"
}

@test "SIGINT and SIGTERM to an idle server: exit status 0" {
  start_server --size 64K
  stop_server
  start_server --size 64K
  kill -INT "$server_pid"
  server_ends
  grep -q '^served 0 of 0 readers' "$log"
}

@test "SIGINT to a reader: it ends at once, leaves nothing, and the server goes on" {
  start_server --size 32M
  local signal
  for signal in INT TERM; do
    start_long_reader
    kill "-$signal" "$reader_pid"
    reader_ends 1 3 interrupted
  done
  only_has "$folder" reader.log
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
  stop_server
}

@test "a server that does not answer: the reader gives up within its timeout" {
  start_server --size 64K
  kill -STOP "$server_pid"
  local start=$SECONDS
  read_cache --timeout 2
  kill -CONT "$server_pid"
  [[ $status -eq 1 && $stderr == *"rdma_connect($address:12345): no answer in 2 s"* ]] || { show; return 1; }
  ((SECONDS - start <= 5))
  # It goes on as if nothing had been.
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
  stop_server
}

@test "a stopped server still serves READs: they are one-sided" {
  start_server --size 32M
  # With a timeout far below the time that passes, it lives only while data comes.
  start_long_reader --timeout 1
  kill -STOP "$server_pid"
  sleep 5
  kill -0 "$reader_pid" || { cat "$folder/reader.log"; return 1; }
  kill_hard "$reader_pid"
  kill -CONT "$server_pid"
  stop_server
}
