#!/usr/bin/env bats
# The server's machine, its process or the link goes away: what the reader says, in how long, and that
# nothing is left that looks complete.
load helpers

readonly size=$((256 * 1048576))

setup() {
  make_folder
  both_nodes_ready
}
teardown() { stop_what_runs; }

@test "the server's node is killed in the first tenth of a 256 MiB read" {
  start_server --size $size
  watch_received $((2 * 1048576))
  start_reader
  wait_for_received
  kill_server_node
  reader_ends 1 15 "of $size bytes had arrived"
  arrived_between 0 $((size / 10))
  folder_only_has
}
