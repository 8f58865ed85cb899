#!/usr/bin/env bats
# scripts/lab.sh and, through it, scripts/demo.sh. Each guest takes some seconds: few of them here.
bats_require_minimum_version 1.5.0

# shellcheck source=../scripts/lab/functions.sh
source "$BATS_TEST_DIRNAME/../scripts/lab/functions.sh"

setup() {
  cd "$BATS_TEST_DIRNAME/.." || return
  [[ $(uname -m) == x86_64 ]] || skip "the lab was only made for x86_64"
  runs_before=$(runs)
}

runs() { ls -d build/lab/run.* 2>/dev/null || true; }

# Other guests of this folder, in another terminal, are not these tests' business.
no_guest_left() { [[ $(runs) == "$runs_before" ]] || { runs; return 1; }; }

teardown() { [[ -z ${lab_pid:-} ]] || kill "$lab_pid" 2>/dev/null || true; }

@test "a command's two outputs, exit status, folder and arguments" {
  # shellcheck disable=SC2016 # for the guest's shell to expand, or not at all
  run -7 --separate-stderr env -C tests ../scripts/lab.sh -- \
    bash -c 'uname -r; pwd; echo "$1|$2"; echo to stderr >&2; cat; exit 7' name 'a  b' '$c'
  [[ ${lines[0]} == "$(<build/lab/kernel/version)" && ${lines[1]} == "$PWD/tests" && ${lines[2]} == "a  b|\$c" && ${#lines[@]} -eq 3 ]] ||
    { echo "$output"; return 1; }
  [[ $stderr == *"to stderr"* && $stderr == *"lab: booting a guest"* ]]
  no_guest_left
}

@test "the host's files are out of a guest's reach, the project's are not" {
  local probe=build/tests/lab-probe
  mkdir -p build/tests
  rm -f "$probe"
  run -0 scripts/lab.sh -- bash -c "echo written >$probe; touch /etc/lab-probe /usr/lab-probe"
  [[ $(<"$probe") == written && ! -e /etc/lab-probe && ! -e /usr/lab-probe ]]
  rm "$probe"
  no_guest_left
}

@test "a guest that takes too long is stopped: exit status 124" {
  run -124 scripts/lab.sh --timeout 12 -- sleep 1000
  [[ $output == *"not finished after 12 s"* ]]
  no_guest_left
}

@test "a guest that dies: exit status 125, and its console" {
  run -125 scripts/lab.sh -- bash -c 'echo c >/proc/sysrq-trigger; sleep 100'
  [[ $output == *"ended before its command did"*"RIP:"* ]]
  no_guest_left
}

@test "SIGTERM stops the guest and leaves nothing" {
  scripts/lab.sh -- sleep 1000 >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
  lab_pid=$!
  local qemu="" status=0
  for _ in {1..200}; do
    qemu=$(pgrep -P "$lab_pid" qemu) && break
    sleep 0.1
  done
  [[ -n $qemu ]] || { cat "$BATS_TEST_TMPDIR/out"; return 1; }
  kill -TERM "$lab_pid"
  wait "$lab_pid" || status=$?
  [[ $status -eq 143 ]]
  run ! kill -0 "$qemu"
  no_guest_left
}

# without_qemu COMMAND... : exit status 125 where QEMU cannot start.
without_qemu() {
  mkdir "$BATS_TEST_TMPDIR/bin"
  printf '#!/bin/sh\necho no QEMU today >&2\nexit 1\n' >"$BATS_TEST_TMPDIR/bin/qemu-system-x86_64"
  chmod +x "$BATS_TEST_TMPDIR/bin/qemu-system-x86_64"
  PATH="$BATS_TEST_TMPDIR/bin:$PATH" run -125 "$@"
}

@test "a QEMU that cannot start: exit status 125, no waiting" {
  without_qemu timeout 30 scripts/lab.sh -- true
  [[ $output == *"no QEMU today"*"ended before its command did"* ]] || { echo "$output"; return 1; }
  no_guest_left
}

@test "output is whole, however slowly it is read, and what the command leaves running does not hold it up" {
  scripts/lab.sh -- bash -c 'sleep 1000 & seq 200000' 2>/dev/null | { sleep 12; cat; } | cmp - <(seq 200000)
  no_guest_left
}

@test "on a terminal the command has it as its own" {
  run -0 script -qec "scripts/lab.sh -- bash -c 'tty; stty size; exit 7'; echo status \$?" /dev/null </dev/null
  [[ $output == *"/dev/hvc0"*"status 7"* ]] || { echo "$output"; return 1; }
  no_guest_left
}

# The command of this test's two nodes, which runs here. Says of each step how it went.
two_nodes_command() {
  cat <<'TXT'
set -u
for name in node-a node-b; do
  node run $name cat /proc/sys/kernel/random/boot_id /proc/sys/kernel/hostname
done
echo "== a frame of 9000 bytes"
node run node-a busybox ping -c 2 -s 8972 node-b >&2 && node run node-a awk '/^Ip: [0-9]/ { print "fragments", $NF }' /proc/net/snmp
echo "== outputs, status, folder, arguments"
(cd tests && node run node-b bash -c 'pwd; echo "$1|$2"; echo to stderr >&2; cat; exit 7' name 'a  b' '$c' 2>"$out/stderr")
echo "status $?, stderr $(<"$out/stderr")"
node run node-a seq 200000 | md5sum
echo "== two at a time, and signals"
node run node-a bash -c 'trap "echo got TERM; exit 9" TERM; echo first; sleep 1000 & wait' >"$out/first" &
first=$!
node run node-a bash -c 'kill -INT $$; sleep 1000'
echo "second $?"
until [[ -s $out/first ]]; do sleep 0.1; done
kill -TERM $first
wait $first
status=$?
echo "$(<"$out/first") $status"
echo "== a node is lost"
before=$(node run node-a cat /proc/sys/kernel/random/boot_id)
node run node-a sleep 1000 &
first=$!
sleep 1
node kill node-a
wait $first
echo "running $?"
node run node-a true
echo "down $?"
node run node-b true
echo "other $?"
node boot node-a
echo "boot $?"
node boot node-a
echo "again $?"
[[ $(node run node-a cat /proc/sys/kernel/random/boot_id) != "$before" ]] && echo another kernel
echo "== RDMA after that"
timeout 60 node run node-a rping -s -a 192.168.77.1 -C 3 >&2 &
first=$!
for _ in {1..10}; do timeout 60 node run node-b rping -c -a 192.168.77.1 -C 3 >&2 && echo rping && break; sleep 1; done
wait $first
echo "== the link"
node run node-b ip link set eth0 down
node run node-a busybox ping -c 1 -W 2 node-b >&2 || echo down
node run node-b ip link set eth0 up
node run node-a busybox ping -c 10 -W 2 node-b >&2 && echo up
exit 3
TXT
}

@test "two nodes: two kernels and a wire, what 'node' runs, kills and boots, and RDMA after that" {
  two_nodes_command >"$BATS_TEST_TMPDIR/command"
  out=$BATS_TEST_TMPDIR run -3 --separate-stderr scripts/lab.sh --nodes 2 --memory 1G --timeout 400 -- bash "$BATS_TEST_TMPDIR/command"
  local ids
  ids=$(grep -xE '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}' <<<"$output") || { echo "$output"; return 1; }
  diff - <(grep -vxF "$ids" <<<"$output") <<TXT || { echo "$stderr"; return 1; }
node-a
node-b
== a frame of 9000 bytes
fragments 0
== outputs, status, folder, arguments
$PWD/tests
a  b|\$c
status 7, stderr to stderr
$(seq 200000 | md5sum)
== two at a time, and signals
second 130
first
got TERM 9
== a node is lost
running 125
down 125
other 0
boot 0
again 1
another kernel
== RDMA after that
rping
== the link
down
up
TXT
  [[ $(sort -u <<<"$ids" | wc -l) -eq 2 && $ids != *"$(</proc/sys/kernel/random/boot_id)"* ]]
  no_guest_left
}

@test "two nodes: SIGTERM, and the next start after SIGKILL, leave nothing" {
  local signal status seen
  for signal in TERM KILL; do
    # shellcheck disable=SC2016 # for the command to expand
    scripts/lab.sh --nodes 2 --memory 1G -- bash -c 'node run node-b true; touch "$0"; node run node-a sleep 1000' \
      "$BATS_TEST_TMPDIR/$signal" >"$BATS_TEST_TMPDIR/out" 2>&1 3>&- &
    lab_pid=$!
    for _ in {1..2000}; do
      [[ ! -e $BATS_TEST_TMPDIR/$signal ]] || break
      sleep 0.1
    done
    [[ -e $BATS_TEST_TMPDIR/$signal ]] || { cat "$BATS_TEST_TMPDIR/out"; return 1; }
    run=$(grep -lx "$lab_pid" build/lab/run.*/pid)
    run=$PWD/${run%/pid}
    # Two QEMU and the command, for sure; what the command runs comes and goes.
    for _ in {1..20}; do
      seen=$(processes_of_run "$run" | wc -l)
      ((seen < 3)) || break
      sleep 0.1
    done
    ((seen >= 3))
    kill "-$signal" "$lab_pid"
    status=0
    wait "$lab_pid" || status=$?
    if [[ $signal == TERM ]]; then
      [[ $status -eq 143 ]]
    else
      [[ -d $run ]] # nobody was left to remove it
      scripts/lab.sh --prepare
    fi
    [[ -z $(processes_of_run "$run") ]]
    no_guest_left
  done
}

@test "two nodes, a QEMU that cannot start: exit status 125, no waiting" {
  without_qemu timeout 30 scripts/lab.sh --nodes 2 -- true
  [[ $output == *"ended before it was ready"*"no QEMU today"* ]] || { echo "$output"; return 1; }
  no_guest_left
}

# a_cache_crosses DEMO_OPTION...
a_cache_crosses() {
  run -0 --separate-stderr scripts/demo.sh --size 32M "$@"
  [[ $(grep -cE '^[0-9a-f]{32}  (kv_cache|received)\.bin$' <<<"$output") -eq 2 ]] || { echo "$output"; return 1; }
  [[ $(grep -oE '^[0-9a-f]{32}  ' <<<"$output" | sort -u | wc -l) -eq 1 ]]
  [[ $output == *"MD5 "*", equal to the server's"* && $output == *"SoftRoCE in the lab"* ]]
  cmp build/demo/kv_cache.bin build/demo/received.bin
  no_guest_left
}

@test "demo.sh: a cache crosses, both MD5 sums are printed, equal" { a_cache_crosses --lab; }
@test "demo.sh --nodes 2: the same, between two guests" { a_cache_crosses --nodes 2; }

@test "bench.sh: every table has its rows, and plot.sh draws them" {
  local out=$BATS_TEST_TMPDIR/bench results=build/tests/bench
  rm -rf "$results"
  run -0 scripts/bench.sh --lab --sizes "64K 1M" --pairs 1 --rounds 1 --out "$results"
  [[ $output == *"ib_read_bw with its better message size"*"results: build/tests/bench"* ]]
  # Two runs of ten for each size, and a row for each of perftest's two message sizes.
  [[ $(tail -n +2 "$results/samples.csv" | wc -l) -eq 40 && $(tail -n +2 "$results/pairs.csv" | wc -l) -eq 4 ]]
  ! grep -E ',,|,$|,0$' "$results/pairs.csv" "$results/latency.csv" "$results/summary.csv" "$results/memory.csv" || return 1
  [[ $(cut -d, -f1 "$results/end_to_end.csv" | tr '\n' ' ') == "what rdma_kv_reader rcopy tcp " ]]
  [[ $(tail -n +2 "$results/registration.csv" | wc -l) -ge 12 ]]
  jq -e '.sizes | length == 2 and all(.median_ns > 0 and .ratio > 0)' "$results/summary.json"
  grep -q '^emulated: ' "$results/environment.txt"
  run -0 scripts/plot.sh "$results" "$out"
  [[ -s $out/latency.png && -s $out/requests.svg ]]
  no_guest_left
}
