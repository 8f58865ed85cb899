#!/usr/bin/env bats
# What the programs say to a wrong command line; needs no RDMA device.
bats_require_minimum_version 1.5.0

setup() {
  cd "$BATS_TEST_DIRNAME/.." || return
  server=./rdma_kv_server reader=./rdma_kv_reader
}

# The long options that a program hands to getopt_long.
options_of() { grep -oP '\{"\K[a-z-]+(?=", (no|required)_argument)' "$1"; }

# usage_error PROGRAM ARGUMENT... : exit status 2, the message on stderr, nothing on stdout.
usage_error() {
  run --separate-stderr "$@"
  [[ $status -eq 2 && -z $output ]] || { echo "status $status, stdout: $output, stderr: $stderr"; return 1; }
}

@test "--help: on stdout, every option, the exit statuses" {
  local program option
  for program in "$server" "$reader"; do
    for option in -h --help; do
      run -0 --separate-stderr "$program" "$option"
      [[ $output == usage:* && $output == *"Exit status: 0"* && -z $stderr ]]
    done
    # Whatever getopt_long takes is listed.
    while read -r option; do
      [[ $output == *"--$option"* ]] || { echo "--$option is not in the help"; return 1; }
    done < <(options_of "$program.cpp")
  done
}

@test "README names every option" {
  local program option
  for program in rdma_kv_server rdma_kv_reader; do
    while read -r option; do
      # Its row, in the table below that program's line.
      sed -n "/^\`$program -/,/^\`rdma_kv_reader -/p; /^\`$program -/,/^Sizes take/p" README.md | grep -q -e "--${option}[ \`]" ||
        { echo "--$option of $program is not in the README"; return 1; }
    done < <(options_of "$program.cpp")
  done
}

@test "--version" {
  run -0 "$server" --version
  [[ $output == "rdma_kv_server "*"(handshake version 1)" ]]
  run -0 "$reader" --version
  [[ $output == "rdma_kv_reader "*"(handshake version 1)" ]]
}

@test "unknown options and missing arguments" {
  usage_error "$reader" --no-such-option
  [[ $stderr == *"unrecognized option '--no-such-option'"*usage:* ]]
  usage_error "$server" -z
  [[ $stderr == *"invalid option -- 'z'"* ]]
  usage_error "$reader" -s
  [[ $stderr == *"option requires an argument -- 's'"* ]]
  usage_error "$server" --size
  [[ $stderr == *"option '--size' requires an argument"* ]]
}

@test "bad numbers are refused by name and value" {
  local case
  for case in "--port 0" "--port 65536" "--port abc" "--port -1" "--iterations 0" "--iterations 1x" "--outstanding 0" "--timeout 0" \
    "--timeout 99999999999999999999" "--size 0" "--size 1.5G" "--size 10KB" "--size -1" "--offset x" "--chunk 1Q" "--size 99999999999999999999" \
    "--size 16777216T"; do
    # shellcheck disable=SC2086 # option and argument
    usage_error "$reader" -s host $case
    [[ $stderr == "rdma_kv_reader: $case: not a "* ]] || { echo "$case: $stderr"; return 1; }
  done
  usage_error "$server" --size 1M --readers 0
  [[ $stderr == "rdma_kv_server: --readers 0: not a number of 1 to "* ]]
}

@test "a positional host: did you mean -s HOST?" {
  usage_error "$reader" node-a
  [[ $stderr == *"unexpected argument 'node-a'; did you mean -s node-a?"* ]]
  usage_error "$server" kv_cache.bin
  [[ $stderr == *"did you mean -f kv_cache.bin?"* ]]
}

@test "what cannot be left out" {
  usage_error "$reader"
  [[ $stderr == *"the server is missing: -s HOST"* ]]
  usage_error "$server"
  [[ $stderr == *"one of -f FILE and --size N"* ]]
  usage_error "$server" -f x --size 1M
  [[ $stderr == *"one of -f FILE and --size N"* ]]
}
