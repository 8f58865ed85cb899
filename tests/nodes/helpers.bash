# shellcheck shell=bash disable=SC2016 # for a guest's shell, or wait_for, to expand
# What the tests of this folder share. They run here, on the host, beside two nodes that `node` reaches
# (scripts/lab/node -h). Both nodes and the host see $share: the programs write their logs there, and
# the times of the files that they leave are all by the host's clock.
bats_require_minimum_version 1.5.0

project=$(cd "$BATS_TEST_DIRNAME/../.." && pwd)
address=192.168.77.1 # of node-a, where the server is
export share=$project/build/tests/nodes
table=$project/build/tests/reliability.tsv

# on NODE COMMAND... : in that guest, with $share.
on() { node run "$1" env share="$share" "${@:2}"; }

# wait_for SECONDS CONDITION
wait_for() {
  local deadline=$((SECONDS + $1))
  until eval "$2" 2>/dev/null; do
    ((SECONDS < deadline)) || { echo "not within $1 s: $2"; return 1; }
    sleep 0.05
  done
}

# A server that is left from the last test serves on: it has to bear that.
server_is_up() {
  [[ -e $share/server.pid ]] && on node-a bash -c '[[ $(</proc/$(<$share/server.pid)/comm) == rdma_kv_server ]]' 2>/dev/null
}

# start_server OPTION... : in the background of node-a.
start_server() {
  rm -f "$share"/server.*
  on node-a bash -c 'echo $$ >$share/server.pid; exec ./rdma_kv_server -v "$@" >$share/server.log 2>&1' server "$@" 3>&- &
  wait_for 60 'grep -q ^listening $share/server.log' || { cat "$share/server.log"; return 1; }
}

signal_server() { on node-a bash -c "kill -$1 \$(<\$share/server.pid)"; }

# start_reader OPTION... : in the background of node-b. Its outputs are in $share/reader.log, its exit
# status in $share/reader.status.
start_reader() {
  rm -f "$share"/{reader.log,reader.status}
  on node-b bash -c 'echo $$ >$share/reader.pid; ./rdma_kv_reader -s "$@" >$share/reader.log 2>&1
                     echo $? >$share/reader.new; mv $share/reader.new $share/reader.status' reader "$address" "$@" 3>&- &
}

# reader_ends STATUS TEXT : within a minute. Sets reader_said and reader_seconds, since the fault.
reader_ends() {
  wait_for 60 '[[ -s $share/reader.status ]]' || { cat "$share/reader.log"; return 1; }
  reader_said=$(grep -v '^  hint:\|^$' "$share/reader.log" | grep '^rdma_kv_reader:\|^MD5' | sed 's/^rdma_kv_reader: //' | head -n 1)
  reader_seconds=$(seconds_since_fault "$share/reader.status")
  [[ $(<"$share/reader.status") -eq $1 && $reader_said == *"$2"* ]] ||
    { echo "reader: exit status $(<"$share/reader.status"), $reader_seconds s; wanted: $1, $2"; cat "$share/reader.log" "$share/server.log"; return 1; }
}

# server_says TEXT : within 20 s, after what its log had when the fault came. Sets server_said and server_seconds.
server_says() {
  local now
  wait_for 20 "tail -n +$((server_lines + 1)) \$share/server.log | grep -q '$1'" || { cat "$share/server.log"; return 1; }
  now=$(stat -c %.9Y "$share/server.log") # when it was last written to
  server_said=$(tail -n +$((server_lines + 1)) "$share/server.log" | grep "$1" | head -n 1 | sed 's/reader [0-9.:]*/reader/')
  server_seconds=$(echo "$now $(stat -c %.9Y "$share/fault")" | awk '{ printf "%.1f", $1 - $2 }')
}

seconds_since_fault() { echo "$(stat -c %.9Y "$1") $(stat -c %.9Y "$share/fault")" | awk '{ printf "%.1f", $1 - $2 }'; }

# fault_now NODE COMMAND... : the time, and the fault.
fault_now() {
  on "$1" bash -c ': >$share/fault; exec "$@"' fault "${@:2}"
}

# For a fault that was there before the reader: it cannot notice before it is started.
count_from_start() {
  wait_for 20 '[[ -e $share/reader.pid ]]'
  touch -r "$share/reader.pid" "$share/fault"
}

# within SECONDS : that the reader took no longer to notice.
within() { awk -v is="$reader_seconds" -v most="$1" 'BEGIN { exit !(is <= most) }' || { echo "$reader_seconds s, not $1"; return 1; }; }

# record FAULT WHEN : a row of the table.
record() {
  printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$reader_said" "$reader_seconds" "$server_said" "$server_seconds" >>"$table"
}

# No output, nor a part of one.
no_output() { [[ -z $(compgen -G "$share/received*") ]] || { ls "$share"; return 1; }; }

# The first packet may be lost, and a lost connect request is repeated only after more than 4 s.
packet_across() { node run node-b busybox ping -q -c 1 -w 20 "$address"; }
link_up() {
  node run node-a ip link set eth0 up
  packet_across
}

# Both nodes up, the wire too.
nodes_up() {
  local name
  mkdir -p "$share"
  for name in node-a node-b; do
    node run "$name" true 2>/dev/null || node boot "$name"
  done
  link_up
}

# And a server of 256 MiB; then as if nothing had been.
setup_nodes() {
  nodes_up
  node run node-a tests/nodes/pace 400mbit
  rm -f "$share"/{received*,armed,fault,reader.*}
  server_is_up || start_server --size 256M
  server_lines=$(wc -l <"$share/server.log")
  server_said="" server_seconds=""
}

# The next reader is served: nothing of the fault has stayed, on this side or that.
next_reader_is_served() {
  start_reader --size 8M "$@"
  : >"$share/fault"
  reader_ends 0 ""
  wait_for 10 "[[ \$(on node-a rdma resource show qp | grep -c rdma_kv_) -eq 0 ]]"
}
