# What the tests of this folder share. They run beside two nodes, by way of tests/nodes.t: the server on
# node-a, the reader on node-b, and what either prints in files here.
bats_require_minimum_version 1.5.0

project=$(cd "$BATS_TEST_DIRNAME/../.." && pwd -P)
server=$project/rdma_kv_server
reader=$project/rdma_kv_reader
server_address=192.168.77.1
server_pid="" reader_pid="" watcher_pid=""

# An empty folder that both nodes see, for what a test makes; $log and $reader_log lie beside it.
make_folder() {
  [[ -n ${LAB_RUN:-} ]] || { echo "no nodes here: run this by way of tests/nodes.t"; return 1; }
  folder=$project/build/tests/nodes/folder log=$BATS_TEST_TMPDIR/server.log reader_log=$BATS_TEST_TMPDIR/reader.log
  rm -rf "$folder"
  mkdir -p "$folder"
}

# What runs in the background is 'node run' itself, so that a signal to it is passed on; without bats' own file 3.
on_node() { node run "$@" 3>&-; }

# wait_for CONDITION [SECONDS]
wait_for() {
  local deadline=$((SECONDS + ${2:-20}))
  until eval "$1" 2>/dev/null; do
    ((SECONDS < deadline)) || { echo "not within ${2:-20} s: $1"; return 1; }
    sleep 0.05
  done
}

# Both up, the link up, and RDMA works between them, whatever the test before did.
both_nodes_ready() {
  local name
  for name in node-a node-b; do
    on_node "$name" true 2>/dev/null || node boot "$name" 3>&- || return
    on_node "$name" ip link set eth0 up || return
  done
  node run node-a timeout 60 rping -s -a "$server_address" -p 7174 -C 1 3>&- &
  # The first tries may come before the server, or before the link's addresses are back.
  wait_for "on_node node-b timeout 10 rping -c -a $server_address -p 7174 -C 1" 60 || return
  wait $! # so that nothing of it is left when the test starts
}

# start_server OPTION... : returns once it listens; sets server_pid, which stands for it: a signal
# to that is passed on, and its exit status is the server's.
start_server() {
  rm -f "$log" # of an earlier one, which says "listening" too
  node run node-a "$server" "$@" >"$log" 2>&1 3>&- &
  server_pid=$!
  wait_for "grep -qs ^listening $log || ! kill -0 $server_pid" 60
  kill -0 "$server_pid" || { cat "$log"; return 1; }
}

# Stops the server as a user would, and sees that it ends well.
stop_server() {
  kill -TERM "$server_pid"
  server_ends 0
}

# server_ends STATUS
server_ends() {
  local status=0 pid=$server_pid
  wait_for "! kill -0 $pid" || { echo "the server does not end"; cat "$log"; return 1; }
  server_pid=""
  wait "$pid" || status=$?
  [[ $status -eq $1 ]] || { echo "server: exit status $status, not $1"; cat "$log"; return 1; }
}

# The server's process is killed: its machine lives, and tells the reader.
kill_server() {
  on_node node-a pkill -KILL -x rdma_kv_server
  server_ends 137
}

# The server's machine is gone, without a word.
kill_server_node() {
  node kill node-a
  [[ -z $server_pid ]] || server_ends 125
}

# The server is where it was, lives, and serves the next reader.
server_serves() {
  kill -0 "$server_pid" || { echo "the server is gone:"; cat "$log"; return 1; }
  run -0 --separate-stderr on_node node-b timeout 120 "$reader" -s "$server_address" --size 64K
}

# start_reader OPTION... : in the background; it writes $folder/received.
start_reader() {
  node run node-b "$reader" -s "$server_address" -o "$folder/received" "$@" >"$reader_log" 2>&1 3>&- &
  reader_pid=$!
}

# reader_ends STATUS SECONDS TEXT : it ends so within that time from now. Says after how long.
reader_ends() {
  local status=0 pid=$reader_pid start=${EPOCHREALTIME/[.,]/} tenths
  wait_for "! kill -0 $pid" "$2" || { cat "$reader_log"; return 1; }
  reader_pid=""
  tenths=$(((${EPOCHREALTIME/[.,]/} - start) / 100000))
  echo "# $BATS_TEST_DESCRIPTION: the reader ended after $((tenths / 10)).$((tenths % 10)) s" >&3
  wait "$pid" || status=$?
  if [[ $status -ne $1 ]] || ! grep -q "$3" "$reader_log"; then
    echo "reader: exit status $status"
    cat "$reader_log"
    return 1
  fi
}

# watch_received BYTES [COMMAND...] : from now on, until node-b has received so many bytes more; then COMMAND
# runs there at once. Before the reader is started: a job takes a while to start, and what is timed must not.
# wait_for_received returns when it has happened, after 0.01 s or so.
# shellcheck disable=SC2016 # for the guest's shell to expand
watch_received() {
  local bytes=$1
  shift
  rm -f "$folder"/watch.*
  node run node-b bash -c '
    folder=$1 bytes=$2 counter=/sys/class/net/eth0/statistics/rx_bytes
    shift 2
    exec {never}<> <(:)          # to sleep without starting a process
    read -r start <"$counter"
    : >"$folder/watch.started"
    until read -r now <"$counter"; ((now - start >= bytes)); do read -rt 0.002 <&"$never"; done
    "$@"
    : >"$folder/watch.done"' watch "$folder" "$bytes" "$@" 3>&- &
  watcher_pid=$!
  wait_for "[[ -e $folder/watch.started ]] || ! kill -0 $watcher_pid"
  [[ -e $folder/watch.started ]]
}

wait_for_received() {
  local deadline=$((SECONDS + ${1:-120}))
  until [[ -e $folder/watch.done ]]; do
    ((SECONDS < deadline)) || { echo "node-b has not received that much in ${1:-120} s"; cat "$reader_log"; return 1; }
    sleep 0.01
  done
}

# arrived_between LEAST MOST : how many bytes the reader had, by its last words. It counts work requests.
arrived_between() {
  local arrived
  arrived=$(grep -oE '[0-9]+ of [0-9]+ bytes had arrived' "$reader_log" | cut -d' ' -f1)
  ((${arrived:--1} >= $1 && arrived <= $2)) || { echo "arrived: $arrived, not $1 to $2"; cat "$reader_log"; return 1; }
}

# Nothing is in $folder but these and the watch's: neither an output nor part of one.
folder_only_has() {
  rm -f "$folder"/watch.*
  diff <(ls -A "$folder") <(printf '%s\n' "$@" | sort | sed '/^$/d')
}

# For teardown: what a failed test left running.
stop_what_runs() {
  local pid
  for pid in $reader_pid $server_pid $watcher_pid; do
    kill -TERM "$pid" 2>/dev/null || continue
    wait_for "! kill -0 $pid" 5 && continue
    # Whatever does not mind SIGTERM in the guest goes with its machine.
    node kill node-a || true
    node kill node-b || true
  done
}
