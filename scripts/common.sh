# shellcheck shell=bash
# Sourced by the other scripts and by the tests.

# An RDMA device that is in use and within this process's reach.
has_rdma_device() {
  grep -qs ACTIVE /sys/class/infiniband/*/ports/*/state &&
    [[ -w /dev/infiniband/rdma_cm && -n $(compgen -G '/dev/infiniband/uverbs*') ]]
}

# What comes before rdma_kv_server where it is not to run here: node run node-a.
on_server=()

# start_kv_server LOG OPTION... : rdma_kv_server in the background, once it listens. Sets server_pid;
# the caller stops it with stop_kv_server.
start_kv_server() {
  local log=$1
  shift
  rm -f "$log" # of an earlier one, which says "listening" too
  "${on_server[@]}" "$project/rdma_kv_server" "$@" >"$log" 2>&1 &
  server_pid=$!
  until grep -qs '^listening' "$log"; do
    kill -0 "$server_pid" 2>/dev/null || { cat "$log" >&2; return 1; }
    sleep 0.2
  done
}

stop_kv_server() {
  [[ -n ${server_pid:-} ]] || return 0
  kill "$server_pid" 2>/dev/null && wait "$server_pid"
  server_pid=""
}
