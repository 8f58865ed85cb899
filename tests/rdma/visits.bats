#!/usr/bin/env bats
# Every way through the programs, with few starts of them: for valgrind, under which a start takes long.
# Where a program is only the other's peer, it is the project's own build.
load helpers

setup() {
  need_device
  folder=$BATS_TEST_TMPDIR/folder
  mkdir "$folder"
}
teardown() {
  kill_hard "${peer_pid:-}"
  kill_hard "${reader_pid:-}"
  stop_what_runs
  nothing_reported
}

# patient_reader OPTION... : the reader under test, with a timeout for when everything is slow.
patient_reader() { read_cache --timeout 60 "$@"; }

# start_peer PROGRAM OPTION... : the project's build of it, as a peer of the program under test; sets peer_pid.
start_peer() {
  "$project/$1" "${@:2}" >"$folder/peer.log" 2>&1 3>&- &
  peer_pid=$!
  wait_for "grep -qs '^reading\|^listening' $folder/peer.log || ! kill -0 $peer_pid"
  kill -0 "$peer_pid" || { cat "$folder/peer.log"; return 1; }
}

@test "one server, and a visit of each kind" {
  head -c 100003 /dev/urandom >"$folder/cache"
  start_server -v -f "$folder/cache"

  patient_reader -v -n 3 -o "$folder/received" --csv "$folder/run.csv" --json "$folder/run.json"
  [[ $status -eq 0 ]] || { show; return 1; }
  cmp "$folder/cache" "$folder/received"
  wait_for "grep -q '100003 bytes x 3, .*MD5 equal' $log"

  patient_reader --events -c 4K --outstanding 3 --offset 5 --size 50001 -o "$folder/received"
  [[ $status -eq 0 ]] || { show; return 1; }
  cmp -n 50001 -i 5:0 "$folder/cache" "$folder/received"
  wait_for "grep -q '50001 bytes x 1, .*MD5 not checked' $log"

  patient_reader --offset 1T
  [[ $status -eq 1 && $stderr == *"beyond the cache"* ]] || { show; return 1; }
  wait_for "grep -q 'left without a closing message' $log"

  run timeout 60 "$project/build/tests/rdma_kv_reader" -s "$address" --timeout 60
  [[ $status -eq 1 && $output == *"refused by the server: handshake version 999"* ]] || { show; return 1; }
  run timeout 60 rping -c -a "$address" -p 12345 -C 1
  wait_for "grep -q 'refused: no handshake of this program' $log"

  start_peer rdma_kv_reader -s "$address" -n 100000000 --timeout 60
  kill_hard "$peer_pid"
  wait_for "[[ \$(grep -c 'left without a closing message' $log) -eq 2 ]]"

  start_peer rdma_kv_reader -s "$address" -n 100000000 --timeout 60
  stop_server
  grep -q 'was disconnected without a closing message' "$log"
  grep -q '^served 2 of 5 readers' "$log"
}

@test "--isolate: a window is made, read by, and gone" {
  start_server --size 64K --isolate --allow "$address" --readers 1
  patient_reader
  [[ $status -eq 0 && $output == *"equal to the server's"* ]] || { show; return 1; }
  server_ends
}

@test "a reader whose server is killed" {
  start_peer rdma_kv_server --size 64K
  "$reader" -s "$address" -n 100000000 --timeout $((10 * slowness)) -o "$folder/received" >"$folder/reader.log" 2>&1 3>&- &
  reader_pid=$!
  local result=0
  wait_for "grep -qs ^reading $folder/reader.log || ! kill -0 $reader_pid" 60
  kill -0 "$reader_pid" || { cat "$folder/reader.log"; return 1; }
  kill_hard "$peer_pid"
  peer_pid=""
  wait_for "! kill -0 $reader_pid"
  wait "$reader_pid" || result=$?
  reader_pid=""
  [[ $result -eq 1 ]] && grep -q 'of 65536 bytes had arrived' "$folder/reader.log" || { cat "$folder/reader.log"; return 1; }
  only_has "$folder" peer.log reader.log
}

@test "a reader without a server, a server without a port" {
  patient_reader -p 12399
  [[ $status -eq 1 && $stderr == *"nobody listens on this port"* ]] || { show; return 1; }
  start_peer rdma_kv_server --size 64K
  run --separate-stderr timeout "$((120 * slowness))" "$server" --size 64K
  [[ $status -eq 1 && $stderr == *"the port is in use by another program"* ]] || { show; return 1; }
}
