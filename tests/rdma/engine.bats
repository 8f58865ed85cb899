#!/usr/bin/env bats
# transfer_engine/ on real verbs: on one device and on two, as if the process had two adapters.
load helpers

setup() {
  plain_build "the library is none of these programs"
  need_device
  built=$project/build/engine
}

# A second SoftRoCE device, on a network interface of its own.
need_second_device() {
  in_lab || skip "not in the lab: makes a second device"
  [[ -e /sys/class/infiniband/rxe1 ]] || {
    ip link add rdmakv2 mtu 9000 type veth peer name rdmakv3
    ip address add 192.168.78.1/24 dev rdmakv2
    ip link set rdmakv2 up
    ip link set rdmakv3 up mtu 9000
    rdma link add rxe1 type rxe netdev rdmakv2
  }
  wait_for "[[ \$(</sys/class/infiniband/rxe1/ports/1/state) == *ACTIVE ]]"
}

@test "transfer_engine: the verbs backend does what domain.hpp says" {
  local test count=0
  for test in "$built"/asan/tests/verbs_*_test; do
    TE_DEVICES="$device" run timeout 200 "$test" --gtest_brief=1
    [[ $status -eq 0 && $output == *PASSED* && $output != *SKIPPED* ]] || { echo "$test"; echo "$output"; return 1; }
    count=$((count + 1))
  done
  [[ $count -ge 2 ]]
}

@test "transfer_engine: a paged cache of 512 tokens goes from prefill to decode, with one adapter" {
  run timeout 120 "$built/examples/prefill_decode" --layer-us 20000 --nic "verbs:$device"
  echo "$output"
  [[ $status -eq 0 && $output == *"every one compared, twice: right"* ]]
}

@test "transfer_engine: the same with two adapters" {
  need_second_device
  run timeout 120 "$built/examples/prefill_decode" --layer-us 20000 --nic "verbs:$device" --nic verbs:rxe1
  echo "$output"
  [[ $status -eq 0 && $output == *"every one compared, twice: right"* ]]
}
