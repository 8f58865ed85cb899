#!/usr/bin/env bats
# transfer_engine/ over verbs between two nodes: processes and nodes are killed, links go down, with operations in
# flight. The source is on node-b. transfer_engine/tests/two_nodes.cpp says what sources and targets do and say.
# shellcheck disable=SC2016 # for a guest's shell, or wait_for, to expand
load helpers

program=build/engine/tests/two_nodes
slots=8 # of a target: so many operations are in flight to each

setup() {
  local name
  nodes_up
  # Slower than the guests are: no frame is lost without a fault, and some wait to be sent when one comes (SoftRoCE:
  # docs/RELIABILITY.md).
  for name in node-a node-b; do on "$name" tests/nodes/pace 150mbit; done
  rm -f "$share"/*
}
# Only what a failed test has left.
teardown() {
  local name
  [[ -z $BATS_TEST_COMPLETED ]] || return 0
  for name in "${!node_of[@]}"; do signal "$name" KILL || true; done
  on node-b ip link set eth0 up || true
}
# As they were, where they are up.
teardown_file() {
  local name
  for name in node-a node-b; do on "$name" tc qdisc delete dev eth0 root || true; done
}

# start NODE NAME ARGUMENT... : two_nodes there, in the background, with its output in $share/NAME.log.
declare -gA node_of job_of
start() {
  node_of[$2]=$1
  on "$1" bash -c 'echo $$ >$share/$2.pid; exec $1 "${@:3}" >$share/$2.log 2>&1' start "$program" "${@:2}" 3>&- &
  job_of[$2]=$!
}

# start_target NODE NAME : $share/NAME says where its memory is.
start_target() {
  rm -f "$share/$2"
  start "$1" "$2" target verbs:rxe0 "$share/$2"
  wait_for 20 "[[ -e \$share/$2 ]]" || { cat "$share/$2.log"; return 1; }
}

# start_source NAME TARGET...
start_source() {
  local targets=("${@:2}")
  start node-b "$1" source verbs:rxe0 "${targets[@]/#/$share/}"
}

signal() { # NAME SIGNAL
  on "${node_of[$1]}" bash -c 'pid=$(<$1); [[ $(</proc/$pid/comm) == two_nodes ]] && kill "-$2" "$pid"' signal "$share/$1.pid" "$2"
}

# end NAME... : each ends well, with nothing under way.
end() {
  local name
  for name in "$@"; do
    signal "$name" TERM
    wait "${job_of[$name]}" || { cat "$share/$name.log"; return 1; }
  done
}

# says SOURCE TIMES TEXT : within 20 s its output has so many lines that begin so.
says() { wait_for 20 "[[ \$(grep -c '^$3' \$share/$1.log) -eq $2 ]]" || { cat "$share/$1.log"; return 1; }; }

is_within() { awk -v least="$1" -v is="$2" -v most="$3" 'BEGIN { exit !(least <= is && is <= most) }'; }

# gave_up SOURCE TARGET TIME : for the so many'th time, every operation in flight to it has ended, with peer_down and
# within 10 s, where some 4 are expected, and on_peer_down was called once.
gave_up() {
  local lines seconds
  says "$1" "$3" on_peer_down
  lines=$(grep -E "^$2: (write|read) " "$share/$1.log" | tail -n +$((($3 - 1) * slots + 1)))
  echo "# $1 to ${lines%%$'\n'*}" >&3
  seconds=$(sed -n 's/.*: peer_down, \([0-9.]*\) s after the last that ended well: .*/\1/p' <<<"$lines" | sort -n)
  if [[ $(wc -l <<<"$lines") -ne $slots || $(wc -l <<<"$seconds") -ne $slots ]] || ! is_within 0 "${seconds##*$'\n'}" 10; then
    cat "$share/$1.log"
    return 1
  fi
}

# all_well SOURCE TARGET LEAST MOST : both have ended. Nothing failed, every byte and immediate has arrived, and the
# longest wait for the next operation to end was of LEAST to MOST s.
all_well() {
  local said waited
  said=$(sed -n "s/^$2: \(.* writes, \)/\1/p" "$share/$1.log")
  waited=${said% s} waited=${waited##* }
  echo "# $1 to $2: $said" >&3
  if [[ $said != *"; 0 wrong, 0 failed, longest wait "* || $(<"$share/$2.log") != "${said%;*}, $slots slots right" ]] ||
    ! is_within "$3" "$waited" "$4"; then
    cat "$share/$1.log" "$share/$2.log"
    return 1
  fi
}

@test "engine: a paged cache of 512 tokens goes from a prefill on node-b to a decode on node-a" {
  local example=build/engine/examples/prefill_decode decode
  on node-a timeout 120 "$example" --nic verbs:rxe0 --decode "$address:7000" >"$share/decode.log" 2>&1 3>&- &
  decode=$!
  wait_for 20 'grep -q "^waiting for prefill" $share/decode.log' || { cat "$share/decode.log"; return 1; }
  run -0 on node-b timeout 120 "$example" --nic verbs:rxe0 --layer-us 20000 --prefill "$address:7000"
  echo "# $(grep -E '^(exposed|whole)' <<<"$output" | paste -sd ' ')" >&3
  [[ $output == *"2048 pages of 32768 bytes"*"every one compared, twice: right"* ]] || { echo "$output"; return 1; }
  wait "$decode" || { cat "$share/decode.log"; return 1; }
}

# Two targets, on node-a and node-b, and a source that writes to both. A wait of less than 3 s for the other target is
# one that nobody held up: a peer that is gone takes longer to be noticed.
start_all() {
  start_target node-a a
  start_target node-b b
  start_source source a b
  says source 1 'a: under way'
  says source 1 'b: under way'
}

@test "engine: what is written to another node arrives and is counted, also when the link is down for 1.5 s meanwhile" {
  start_all
  on node-a bash -c 'ip link set eth0 down; sleep 1.5; ip link set eth0 up'
  end source a b
  says source 0 on_peer_down
  all_well source a 1 10
  all_well source b 0 3
}

@test "engine: a target's process is killed, the link loses everything: its operations end, no other's; then it is written to" {
  start_all
  signal a KILL
  gave_up source a 1
  start_target node-a a
  says source 2 'a: under way'

  # Not 'ip link set eth0 down', there: this wire holds back what nobody takes, and SoftRoCE waits for its frames.
  on node-b tc qdisc replace dev eth0 root netem loss 100%
  gave_up source a 2
  on node-b tests/nodes/pace 150mbit
  packet_across
  touch "$share/a"
  says source 3 'a: under way'
  end source a b
  says source 2 on_peer_down
  all_well source b 0 3
}

# A hello that cannot leave breaks the queue pair for datagrams on SoftRoCE. The way to node-a is known by then: from a
# target there that is gone, since with operations in flight SoftRoCE may wait for its frames.
@test "engine: a peer that is looked for while the source's own link is down is found when the link is back" {
  start_target node-a a
  start_target node-a c
  mv "$share/c" "$share/hidden"
  start_source source a c
  says source 1 'a: under way'
  signal a KILL
  gave_up source a 1

  on node-b ip link set eth0 down
  mv "$share/hidden" "$share/c"
  says source "$slots" 'c: write .* no answer to the handshake'
  on node-b ip link set eth0 up
  packet_across
  touch "$share/c"
  says source 1 'c: under way'
  end source c
}

@test "engine: a target's node is killed: its operations end, no other's; booted again it is written to" {
  start_all
  node kill node-a
  gave_up source a 1

  # Who has never heard of the node is told as well, and does not wait for its address.
  on node-b ip neighbour flush dev eth0
  node boot node-a 3>&- &
  local booting=$!
  mv "$share/a" "$share/gone"
  start_target node-b c
  start_source late gone c
  gave_up late gone 1
  end late c
  all_well late c 0 3

  wait "$booting"
  start_target node-a a
  says source 2 'a: under way'
  end source a b
  says source 1 on_peer_down
  all_well source b 0 3
}
