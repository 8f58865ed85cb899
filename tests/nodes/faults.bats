#!/usr/bin/env bats
# Two nodes: what breaks, when, what each side says and how long that takes. With default options where nothing
# else is said.
# shellcheck disable=SC2016,SC2034 # for a guest's shell, or wait_for, to expand; used by helpers.bash
load helpers

setup() { setup_nodes; }
# Only what a failed test has left; the server is there for the next.
teardown() {
  [[ -n $BATS_TEST_COMPLETED ]] || {
    on node-b bash -c 'kill -KILL $(<$share/reader.pid)' || true
    on node-a bash -c 'kill -KILL $(<$share/server.pid)' || true
    on node-b tc qdisc delete dev eth0 root || true
  } 2>/dev/null
}
# bats ends when nothing has its output open any more.
teardown_file() { ! server_is_up || signal_server TERM; }

all=268435456
first_tenth=$((all / 40)) # bytes after which the fault comes
last_tenth=$((all * 94 / 100))

# How each fault is made on node-a. Those of the link leave the process alone.
kill_process() { echo "kill -KILL \$(<\$share/server.pid)"; }
link_down() { echo "ip link set eth0 down"; }
link_down_and_up() { echo "ip link set eth0 down; sleep 1.5; ip link set eth0 up"; }

# A fault that comes while a reader reads, after it has got so many bytes.
fault_while_reading() { # BYTES COMMAND [RATE [OPTION...]]
  on node-a tests/nodes/after_sent "${3:-50mbit}" "$1" "$2" 3>&- &
  local watch=$!
  wait_for 20 '[[ -e $share/armed ]]'
  start_reader -o "$share/received" "${@:4}"
  wait "$watch" || { cat "$share/reader.log" "$share/server.log"; return 1; }
}

# The same for a link that comes back, with a wire slower than the guests: then some MiB wait to be sent and are lost.
# With none there, and the fault at the first byte of a READ, SoftRoCE would break the connection (below, "cannot
# send"). Four work requests are less than the wire takes in an ACK timeout.
outage_while_reading() {
  fault_while_reading "$1" "$(link_down_and_up); tests/nodes/pace 400mbit" 150mbit --outstanding 4
  sent_tenth=$((10 * $(<"$share/fault") / all))
}

# The whole node is killed from here: after the bytes have gone, as fast as that can be.
node_killed_while_reading() { # BYTES
  fault_while_reading "$1" true
  : >"$share/fault"
  node kill node-a
}

# in_tenth N : by what had arrived, the fault came when the test says.
in_tenth() {
  local arrived
  arrived=$(sed -n "s/.*: \([0-9]*\) of $all bytes had arrived.*/\1/p" "$share/reader.log")
  ((10 * arrived / all == $1)) || { echo "$arrived of $all bytes"; return 1; }
}

# A reader whose connect request waits at the server, which does not answer yet.
reader_in_handshake() {
  signal_server STOP
  start_reader -o "$share/received"
  on node-a bash -c 'for _ in {1..100}; do (($(rdma resource show cm_id | grep -c rdma_kv_server) > 1)) && exit; sleep 0.1; done; exit 1'
}

# ------------------------------------------------------------------ the server's process is killed

@test "server process killed, before connecting" {
  fault_now node-a bash -c "$(kill_process)"
  start_reader -o "$share/received"
  count_from_start
  reader_ends 1 "rejected: nobody listens on this port"
  within 5
  no_output
  record "server process killed" "before connecting"
}

@test "server process killed, in the handshake" {
  reader_in_handshake
  fault_now node-a bash -c "$(kill_process)"
  reader_ends 1 "rdma_connect($address:12345): rejected"
  within 5
  no_output
  record "server process killed" "in the handshake"
}

@test "server process killed, in the first tenth" {
  fault_while_reading "$first_tenth" "$(kill_process)"
  reader_ends 1 "RDMA READ: "
  in_tenth 0
  within 5
  no_output
  record "server process killed" "first tenth of the read"
}

@test "server process killed, in the last tenth" {
  fault_while_reading "$last_tenth" "$(kill_process)"
  reader_ends 1 "RDMA READ: "
  in_tenth 9
  within 5
  no_output
  record "server process killed" "last tenth of the read"
}

# --------------------------------------------------------------------- the server's node is killed

@test "server node killed, before connecting" {
  node kill node-a
  on node-b ip neighbour flush dev eth0
  start_reader -o "$share/received"
  count_from_start
  reader_ends 1 "rdma_resolve_addr($address:12345): "
  within 6 # of which the program takes some to start, and 5 are for connecting
  no_output
  record "server node killed" "before connecting"
}

@test "server node killed, in the handshake" {
  reader_in_handshake
  : >"$share/fault"
  node kill node-a
  reader_ends 1 "rdma_connect($address:12345): no answer in 5 s"
  within 5
  no_output
  record "server node killed" "in the handshake"
}

@test "server node killed, in the first tenth" {
  node_killed_while_reading "$first_tenth"
  reader_ends 1 "RDMA READ: "
  in_tenth 0
  within 5
  no_output
  record "server node killed" "first tenth of the read"
}

@test "server node killed, in the last tenth" {
  node_killed_while_reading "$last_tenth"
  reader_ends 1 "RDMA READ: "
  in_tenth 9
  within 5
  no_output
  record "server node killed" "last tenth of the read"
}

# ------------------------------------------------------ the link goes down and comes back within 1.5 s

# The reader ends well, with everything.
reader_has_all() {
  reader_ends 0 "MD5 "
  grep -q "equal to the server's" "$share/reader.log"
  [[ $(stat -c %s "$share/received") -eq $all ]]
  server_says "MD5 equal"
}

@test "link down for 1.5 s, before connecting" {
  # Whoever knows the address already may lose its connect request, which the kernel repeats after 4.3 s: for the
  # default timeout too late, as often as not.
  on node-b ip neighbour flush dev eth0
  fault_now node-a bash -c "$(link_down_and_up)" 3>&- &
  wait_for 10 '[[ -e $share/fault ]]'
  start_reader -o "$share/received"
  reader_has_all
  record "link down for 1.5 s" "before connecting"
}

@test "link down for 1.5 s, in the handshake" {
  reader_in_handshake
  fault_now node-a bash -c "$(link_down_and_up)"
  signal_server CONT
  reader_has_all
  record "link down for 1.5 s" "in the handshake"
}

@test "link down for 1.5 s, in the first tenth" {
  outage_while_reading "$first_tenth"
  reader_has_all
  [[ $sent_tenth -eq 0 ]]
  record "link down for 1.5 s" "first tenth of the read"
}

@test "link down for 1.5 s, in the last tenth" {
  outage_while_reading "$last_tenth"
  reader_has_all
  [[ $sent_tenth -eq 9 ]]
  record "link down for 1.5 s" "last tenth of the read"
}

# --------------------------------------------------------------- a READ that is done without its data

# What SoftRoCE makes of it: docs/RELIABILITY.md. Packets of node-b take their time, so that the fault is there between
# the accept and the READ; it is over when the data could not be sent.
@test "server's node cannot send, from the first byte of a READ on" {
  node run node-b tc qdisc replace dev eth0 root netem delay 1.5s
  on node-a bash -c 'errors=/sys/class/infiniband/rxe0/ports/1/hw_counters/send_err
                     before=$(<$errors)
                     : >$share/armed
                     for _ in {1..500}; do tail -n +$(($1 + 1)) $share/server.log | grep -q accepted && break; sleep 0.02; done
                     tc qdisc replace dev eth0 root pfifo limit 0
                     for _ in {1..100}; do (($(<$errors) > before)) && break; sleep 0.02; done
                     : >$share/fault
                     tc qdisc del dev eth0 root' fault "$server_lines" 3>&- &
  local watch=$!
  wait_for 20 '[[ -e $share/armed ]]'
  start_reader --size 4K -o "$share/received"
  wait "$watch"
  reader_ends 1 "closing message: "
  node run node-b tc qdisc del dev eth0 root
  grep -q '4096 bytes: not checked, and the connection broke behind them' "$share/reader.log"
  no_output
  record "server's node cannot send" "first byte of a READ"
  next_reader_is_served
}

# -------------------------------------------------------------------------- the link goes down for good

# It comes back when the reader has given up; then the server finds that out.

@test "link down for good, before connecting" {
  fault_now node-a bash -c "$(link_down)"
  start_reader -o "$share/received"
  count_from_start
  reader_ends 1 "$address:12345): "
  within 6 # as above
  no_output
  record "link down for good" "before connecting"
  link_up
  next_reader_is_served
}

@test "link down for good, in the handshake" {
  reader_in_handshake
  fault_now node-a bash -c "$(link_down)"
  signal_server CONT
  reader_ends 1 "rdma_connect($address:12345): no answer in 5 s"
  within 5
  no_output
  link_up
  # It is answered now: too late, whether this node has heard of that or not.
  server_says "refused: the server could not\|without a closing message"
  record "link down for good" "in the handshake"
  next_reader_is_served
}

@test "link down for good, in the first tenth" {
  fault_while_reading "$first_tenth" "$(link_down)"
  reader_ends 1 "RDMA READ: "
  in_tenth 0
  within 5
  no_output
  link_up
  server_says "without a closing message"
  record "link down for good" "first tenth of the read"
  next_reader_is_served
}

@test "link down for good, in the last tenth" {
  fault_while_reading "$last_tenth" "$(link_down)"
  reader_ends 1 "RDMA READ: "
  in_tenth 9
  within 5
  no_output
  link_up
  server_says "without a closing message"
  record "link down for good" "last tenth of the read"
  next_reader_is_served
}

# ---------------------------------------------------------------------------------- the reader's side

reader_node_boots() {
  node boot node-b
  packet_across
}

@test "reader node killed while reading, ten times in a row: the server is rid of each, then serves one" {
  local number
  reader_said="(gone)" reader_seconds=""
  for number in {1..10}; do
    server_lines=$(wc -l <"$share/server.log")
    fault_while_reading "$first_tenth" true
    : >"$share/fault"
    node kill node-b
    # The next boot and the server's noticing go on side by side; the last time it is looked at alone.
    ((number == 10)) || reader_node_boots
    server_says "no longer answers, without a closing message"
  done
  record "reader node killed" "first tenth of the read, ten times"
  reader_node_boots
  next_reader_is_served
}

@test "server stopped with SIGTERM while three readers read" {
  local number
  for number in 1 2 3; do
    on node-b bash -c './rdma_kv_reader -s $1 -n 1000 -o $share/received.$2 >$share/reader.log.$2 2>&1
                       echo $? >$share/reader.new.$2; mv $share/reader.new.$2 $share/reader.status.$2' reader "$address" "$number" 3>&- &
  done
  wait_for 30 '[[ $(tail -n +$((server_lines + 1)) $share/server.log | grep -c "connected, ") -eq 3 ]]'
  sleep 1
  fault_now node-a bash -c 'kill -TERM $(<$share/server.pid)'
  for number in 1 2 3; do
    wait_for 20 "[[ -s \$share/reader.status.$number ]]"
    [[ $(<"$share/reader.status.$number") -eq 1 ]]
    grep -q 'RDMA READ: ' "$share/reader.log.$number"
    ! grep -q 'no progress' "$share/reader.log.$number" || return 1 # they were told
  done
  server_says "^served [0-9]* of"
  reader_said=$(sed -n 's/^rdma_kv_reader: //p' "$share/reader.log.1" | head -n 1)
  reader_seconds=$(seconds_since_fault "$share/reader.status.3")
  within 5
  no_output
  [[ $(grep -c 'was disconnected without a closing message' "$share/server.log") -eq 3 ]]
  rm "$share/server.pid"
  record "server stopped with SIGTERM" "three readers reading"
}
