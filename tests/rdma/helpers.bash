# What the tests of this folder share. They run where an RDMA device is, or can be made: in the lab
# or on a machine that has one.
bats_require_minimum_version 1.5.0

project=$(cd "$BATS_TEST_DIRNAME/../.." && pwd)
# The programs under test: the project's, or those that tests/sanitizers.t or tests/valgrind.t built.
programs=${RDMA_KV_PROGRAMS:-$project}
server=$programs/rdma_kv_server
reader=$programs/rdma_kv_reader
server_pid=""
# By how much longer these may take: sanitizers and valgrind are slow.
slowness=1
[[ -z ${RDMA_KV_PROGRAMS:-} ]] || slowness=4

# Where sanitizers and valgrind write what they find, whoever runs the program. Theirs are exit statuses
# of their own as well, but not every test looks at one.
export RDMA_KV_REPORTS=/tmp/rdma_kv_reports
[[ -d $RDMA_KV_REPORTS ]] || mkdir -m 1777 "$RDMA_KV_REPORTS"
export ASAN_OPTIONS=log_path=$RDMA_KV_REPORTS/asan:exitcode=99:detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=log_path=$RDMA_KV_REPORTS/ubsan:exitcode=99:print_stacktrace=1

# shellcheck source=../../scripts/common.sh
source "$project/scripts/common.sh"

in_lab() { [[ -n ${LAB_NODE:-} ]]; }
# For tests that are nothing for a build with sanitizers or valgrind: plain_build WHY
plain_build() { [[ -z ${RDMA_KV_PROGRAMS:-} ]] || skip "$1"; }
need_root() { [[ $(id -u) -eq 0 ]] || skip "needs root"; }

# An active device, and an address of it; SoftRoCE's where there is none yet.
need_device() {
  if ! has_rdma_device; then
    in_lab || { echo "no RDMA device here: run this by way of tests/rdma.t"; return 1; }
    "$project/scripts/softroce.sh" up >&2
  fi
  # Before every test, in a guest where starting a program takes its time: by the shell's own means.
  for device in /sys/class/infiniband/*; do
    [[ $(<"$device/ports/1/state") != *ACTIVE ]] || break
  done
  netdev=$(<"$device/ports/1/gid_attrs/ndevs/0")
  device=${device##*/}
  address=$(ip -4 -o address show dev "$netdev" | awk '{ sub("/.*", "", $4); print $4; exit }')
}

# start_server OPTION... : sets server_pid once it listens; its output is in $log.
start_server() {
  log=$BATS_TEST_TMPDIR/server.log
  rm -f "$log" # of an earlier one, which says "listening" too
  "$server" "$@" >"$log" 2>&1 3>&- &
  server_pid=$!
  wait_for "grep -qs ^listening $log || ! kill -0 $server_pid" 120
  kill -0 "$server_pid" || { cat "$log"; return 1; }
}

# Stops the server as a user would, and sees that it ends well.
stop_server() {
  kill -TERM "$server_pid"
  server_ends
}

# Waits for a server that stops by itself (--readers, a signal), and sees that it ends well.
server_ends() {
  local pid=$server_pid
  server_pid=""
  wait_for "! kill -0 $pid" || { echo "the server does not end"; kill -KILL "$pid"; cat "$log"; return 1; }
  wait "$pid" || { echo "server: exit status $?"; cat "$log"; return 1; }
}

# wait_for CONDITION [SECONDS]
wait_for() {
  local seconds=$((${2:-20} * slowness))
  local deadline=$((SECONDS + seconds))
  until eval "$1" 2>/dev/null; do
    ((SECONDS < deadline)) || { echo "not within $seconds s: $1"; return 1; }
    sleep 0.1
  done
}

# read_cache OPTION... : a reader with a limit on its time; sets status, output, stderr as run does.
read_cache() { read_cache_at "$address" "$@"; }
read_cache_at() { run --separate-stderr timeout "$((120 * slowness))" "$reader" -s "$@"; }

# fails STATUS "text in stderr"... : what the last run must have ended with.
fails() {
  local expected=$1 part
  shift
  [[ $status -eq $expected ]] || { echo "expected status $expected"; show; return 1; }
  for part in "$@"; do
    [[ $stderr == *"$part"* ]] || { echo "expected: $part"; show; return 1; }
  done
}

# as_nobody COMMAND... : a program of the project as an ordinary user, with 64 KiB of lockable memory.
# A copy of it: such a user may not be let into the project's folder.
as_nobody() {
  need_root
  local copy=/tmp/as_nobody
  mkdir -p "$copy"
  cp "$1" "$copy/"
  chmod -R a+rX "$copy"
  run --separate-stderr timeout "$((60 * slowness))" setpriv --reuid 65534 --clear-groups --inh-caps=-all --bounding-set=-all \
    bash -c 'ulimit -l 64 && exec "$@"' as_nobody "$copy/$(basename "$1")" "${@:2}"
  rm -r "$copy"
}

# Shown when a test fails.
show() {
  echo "status $status; stdout:"; echo "$output"
  echo "stderr:"; echo "${stderr:-}"
  [[ ! -e ${log:-} ]] || { echo "server:"; cat "$log"; }
}

# The server has served and lives; says so when it does not.
server_is_alive() { kill -0 "$server_pid" || { echo "the server is gone:"; cat "$log"; return 1; }; }

# Nothing but these is in a folder: neither an output nor part of one.
only_has() {
  local folder=$1
  shift
  diff <(ls -A "$folder") <(printf '%s\n' "$@" | sort | sed '/^$/d')
}

# kill_hard PID : SIGKILL, and no word about it from the shell.
kill_hard() { { [[ -z $1 ]] || { kill -KILL "$1" && wait "$1"; }; } 2>/dev/null || true; }

stop_what_runs() { [[ -z $server_pid ]] || { kill -CONT "$server_pid"; stop_server; }; }

# Neither sanitizers nor valgrind have found anything in the programs that ended. Shows what they have.
nothing_reported() {
  local report found=0
  for report in "$RDMA_KV_REPORTS"/*; do
    [[ -s $report ]] || continue
    found=1
    cat "$report"
  done
  rm -f "$RDMA_KV_REPORTS"/*
  return "$found"
}
