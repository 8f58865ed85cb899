#!/usr/bin/env bats
# Peers that are broken or mean no good, against both programs: a thousand cases. None may cost the
# server anything, change a byte of the cache or disturb another reader; none may crash a reader, keep
# it past its deadline or make it leave a file. A failure names seed and case: see
# tests/hostile/hostile_reader.cpp. HOSTILE_SEED=N scripts/test.sh tests/sanitizers.t draws other details.
load helpers

setup() {
  need_device
  folder=$BATS_TEST_TMPDIR/folder
  mkdir "$folder"
  hostile_reader=$project/build/tests/hostile/hostile_reader
  hostile_server=$project/build/tests/hostile/hostile_server
  seed=$(<"$project/build/tests/hostile/seed")
}
teardown() {
  touch "$folder/stop"
  [[ -z ${bystander_pid:-} ]] || wait "$bystander_pid" || true
  kill_hard "${flood_pid:-}"
  kill_hard "${hostile_pid:-}"
  stop_what_runs
  nothing_reported
}

# What the kernel holds for the server, and its file descriptors.
held_by_server() {
  local kind
  for kind in qp mr cm_id; do
    echo "$kind $(rdma resource show "$kind" | grep -c " pid $server_pid ")"
  done
  echo "fd $(find "/proc/$server_pid/fd" -mindepth 1 | wc -l)"
}

# start_victim OPTION... : a server whose bytes the hostile reader knows.
start_victim() {
  start_server --size 256K "$@"
  read_cache
  [[ $status -eq 0 ]] || { show; return 1; }
  before=$(held_by_server)
}

# The server lives, an honest reader gets what the server had in the beginning, and all that the
# others had of the server is free again.
victim_is_unharmed() {
  server_is_alive
  read_cache
  [[ $status -eq 0 && $output == *"equal to the server's"* ]] || { show; return 1; }
  wait_for "[[ \$(held_by_server) == '$before' ]]" 60 ||
    { printf 'held before:\n%s\nnow:\n%s\n' "$before" "$(held_by_server)"; return 1; }
  stop_server
}

# An honest reader that reads all the time: visit after visit, of a thousand READs of the cache each.
start_bystander() {
  until [[ -e $folder/stop ]]; do
    "$reader" -s "$address" --events -n 1000 || exit
  done >"$folder/bystander.log" 2>&1 3>&- &
  bystander_pid=$!
  wait_for "grep -q ^reading $folder/bystander.log"
}

# bystander_was_undisturbed : every one of its visits ended well.
bystander_was_undisturbed() {
  local status=0 pid=$bystander_pid
  touch "$folder/stop"
  bystander_pid=""
  wait "$pid" || status=$?
  [[ $status -eq 0 && $(grep -c "equal to the server's" "$folder/bystander.log") -ge 1 ]] ||
    { echo "bystander: exit status $status"; cat "$folder/bystander.log"; return 1; }
}

# run_hostile_readers CASES OPTION... : three at once, a seed each.
run_hostile_readers() {
  local cases=$1 number failed=false
  shift
  local -a pids=()
  for number in 0 1 2; do
    timeout 300 "$hostile_reader" -s "$address" --seed $((seed + number)) --cases "$cases" "$@" \
      >"$folder/hostile.$number" 2>&1 3>&- &
    pids+=($!)
  done
  for number in 0 1 2; do
    wait "${pids[number]}" || { echo "exit status $?:"; failed=true; cat "$folder/hostile.$number"; }
  done
  ! $failed || { tail -n 20 "$log"; return 1; }
}

@test "600 cases of a hostile reader: the server, its cache and another reader are unharmed" {
  start_victim
  start_bystander
  run_hostile_readers 200
  bystander_was_undisturbed
  victim_is_unharmed
}

@test "the same with --isolate, 105 cases" {
  start_victim --isolate
  start_bystander
  run_hostile_readers 35 --isolated
  bystander_was_undisturbed
  victim_is_unharmed
}

@test "the key of a server that has ended opens nothing of the next one" {
  start_victim
  local stale
  stale=$("$hostile_reader" -s "$address" --offer | awk '{ print $NF }')
  stop_server
  start_victim
  run -0 "$hostile_reader" -s "$address" --seed "$seed" --cases 300 --only read-stale-key --stale-key "$stale"
  [[ $output == "read-stale-key "*" remote access error" && ${#lines[@]} -eq 1 ]] || { echo "$output"; return 1; }
  victim_is_unharmed
}

@test "without --isolate all readers have one key: another's opens the cache as well" {
  start_victim
  run -0 "$hostile_reader" -s "$address" --seed "$seed" --cases 130 --only borrowed-key
  [[ $output == *"of one that is there: read, of one that has left: read" ]] || { echo "$output"; return 1; }
  victim_is_unharmed
}

@test "with --isolate a reader's key opens nothing to another, nor once it has left" {
  start_victim --isolate
  run -0 "$hostile_reader" -s "$address" --seed "$seed" --cases 520 --only borrowed-key --isolated
  [[ $output == *" of one that is there: remote access error, of one that has left: remote access error" ]] ||
    { echo "$output"; return 1; }
  [[ ${#lines[@]} -eq 1 ]]
  victim_is_unharmed
}

@test "more connect requests than the queue holds, given up: a stopped server goes on unharmed" {
  start_victim
  kill -STOP "$server_pid"
  run -0 "$hostile_reader" -s "$address" --flood 220 --patience 2
  [[ $output == *"  220  no answer" ]] || { echo "$output"; return 1; }
  kill -CONT "$server_pid"
  victim_is_unharmed
}

# The kernel drops the requests that find the queue full, and their senders ask again for about a minute.
@test "more connect requests than the queue holds, waiting: all are served when the server goes on" {
  start_victim
  kill -STOP "$server_pid"
  timeout 120 "$hostile_reader" -s "$address" --flood 220 --patience 60 >"$folder/flood" 2>&1 3>&- &
  flood_pid=$!
  local most=129 # the listener and the 128 of its rdma_listen
  wait_for "[[ \$(held_by_server) == *'cm_id $most'* ]]" || { held_by_server; return 1; }
  read_cache --timeout 3
  [[ $status -eq 1 && $stderr == *"rdma_connect($address:12345): no answer in 3 s"* ]] || { show; return 1; }
  [[ $(held_by_server) == *"cm_id $most"* ]] # full, and no fuller
  kill -CONT "$server_pid"
  local pid=$flood_pid
  flood_pid=""
  wait "$pid"
  grep -q '^  220  RDMA_CM_EVENT_ESTABLISHED' "$folder/flood" || { cat "$folder/flood"; return 1; }
  victim_is_unharmed
}

# Of the last run: one error in our form (a READ that fails says besides how far it came), with hints
# perhaps, and nothing that a terminal obeys.
is_one_error() {
  local line errors=0 LC_ALL=C
  while IFS= read -r line; do
    [[ $line != *[^[:print:]]* ]] || return 1
    case $line in
      "rdma_kv_reader: iteration 1: "* | "  hint: "?*) ;;
      "rdma_kv_reader: "?*": "*[!\ ]) errors=$((errors + 1)) ;;
      *) return 1 ;;
    esac
  done <<<"$stderr"
  [[ $errors -eq 1 ]]
}

# Builtins of the shell where they do: processes cost time under emulation.
@test "72 connections to a hostile server: each reader ends as it has to, in time, and leaves no file" {
  mkdir "$folder/out"
  exec {said}< <(exec "$hostile_server" --seed "$seed" 2>&1 3>&-)
  hostile_pid=$!
  local line connection kind expected patience start
  read -r -t 30 -u "$said" line
  [[ $line == "listening on port 12345" ]] || { echo "$line"; return 1; }
  for connection in {1..72}; do # 24 kinds
    read -r -t 30 -u "$said" line
    [[ $line =~ ^connection\ $connection:\ ([^,]*),\ exit\ status\ ([0-9])$ ]] || { echo "$line"; return 1; }
    kind=${BASH_REMATCH[1]} expected=${BASH_REMATCH[2]} patience=8
    [[ $kind != silent && $kind != no-answer ]] || patience=2
    start=$SECONDS
    run --separate-stderr timeout 60 "$reader" -s "$address" --timeout $patience -o "$folder/out/received"
    if [[ $status -ne $expected ]] || ((SECONDS - start > patience + 5)) ||
      { [[ $expected -ne 0 ]] && { ! is_one_error || compgen -G "$folder/out/*"; }; }; then
      echo "seed $seed, connection $connection, $kind: after $((SECONDS - start)) s"
      show
      return 1
    fi
    [[ $expected -ne 0 ]] || rm "$folder/out/received"
  done
}
