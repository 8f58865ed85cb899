#!/usr/bin/env bats
# scripts/softroce.sh, and the programs where there is no RDMA device. In the lab alone: on another
# machine this would touch what is there. First of the files, as it leaves no device behind.
load helpers

setup() {
  in_lab || skip "not in the lab: this machine's devices and modules are not the test's to change"
  softroce=$project/scripts/softroce.sh
}

# What 'up' may change.
machine_state() {
  ip -o address | awk '{ print $2, $4 }' | sort
  lsmod | awk '{ print $1 }' | grep -xE 'veth|rdma_rxe|.*_ucm|rdma_cm|iw_cm|ib_cm|ib_uverbs|crc32_generic' | sort || true
  rdma link show 2>/dev/null || true
  ls /run/rdma_kv_softroce 2>/dev/null || true
}

@test "without a device both programs say so, and what can be done" {
  [[ ! -e /sys/class/infiniband ]] || [[ -z $(ls /sys/class/infiniband) ]]
  run ! "$server" --size 1M
  [[ $output == *"no RDMA device on this machine"*"scripts/softroce.sh up"*"scripts/lab.sh"* ]]
  run ! "$reader" -s 192.168.77.1
  [[ $output == *"no RDMA device on this machine"*"scripts/softroce.sh up"*"scripts/lab.sh"* ]]
}

@test "a device that the process cannot reach: what to load" {
  modprobe rdma_rxe
  ip link add test0 type veth peer name test1
  rdma link add test_device type rxe netdev test0
  mv /dev/infiniband /dev/infiniband.away
  run ! "$server" --size 1M
  mv /dev/infiniband.away /dev/infiniband
  rdma link delete test_device
  modprobe -r rdma_rxe
  modprobe -r ib_uverbs
  [[ $output == *"the kernel has an RDMA device, but /dev/infiniband is incomplete"*"load ib_uverbs and rdma_ucm"* ]] || { echo "$output"; false; }
}

@test "status without a device, and down without an up" {
  plain_build "of the script, not of the programs"
  run -1 "$softroce" status
  [[ $output == "no SoftRoCE device" ]]
  run -1 "$softroce" down
  [[ $output == *"nothing to undo"* ]]
}

@test "up NETDEV: refuses lo, an interface that is not there, and users other than root" {
  plain_build "of the script, not of the programs"
  local before
  before=$(machine_state)
  run -1 "$softroce" up lo
  [[ $output == *"interface lo"* ]]
  run -1 "$softroce" up nosuch0
  [[ $output == *"interface nosuch0: does not exist"* ]]
  as_nobody "$softroce" up
  [[ $status -eq 1 && $stderr == *"up needs root"* ]]
  diff <(echo "$before") <(machine_state)
}

@test "up, status, down: a device appears, is ready at once, and nothing is left" {
  plain_build "of the script, not of the programs"
  local before
  before=$(machine_state)
  "$softroce" up
  run -0 "$softroce" status
  [[ $output == "rxe0: port ACTIVE, on rdmakv0, MTU 9000, 192.168.77.1/24"* ]]
  ibv_devinfo -d rxe0 | grep -q 'active_mtu:.*4096'
  run -1 "$softroce" up
  [[ $output == *"up was done already"* ]]

  # Ready means that a connection succeeds, without a wait of ours.
  start_server --size 64K
  read_cache_at 192.168.77.1
  [[ $status -eq 0 ]] || { show; false; }
  stop_server

  "$softroce" down
  diff <(echo "$before") <(machine_state)
}

@test "up NETDEV: the interface keeps its address and outlives the device" {
  plain_build "of the script, not of the programs"
  ip link add test0 mtu 1500 type veth peer name test1
  ip address add 192.168.78.1/24 dev test0
  ip link set test0 up
  ip link set test1 up
  local before
  before=$(machine_state)
  "$softroce" up test0
  run -0 "$softroce" status
  [[ $output == "rxe0: port ACTIVE, on test0, MTU 1500, 192.168.78.1/24"* ]]

  # A small MTU is worth a remark.
  start_server --size 64K
  read_cache_at 192.168.78.1
  [[ $status -eq 0 && $output == *"MTU 1024"* && $stderr == *"MTU 1024: 4096 takes a netdev MTU of at least 4200"* ]] || { show; false; }
  stop_server

  "$softroce" down
  diff <(echo "$before") <(machine_state)
  ip link delete test0
}

@test "up: what failed half-way is undone" {
  plain_build "of the script, not of the programs"
  ip link add rdmakv1 type veth peer name other1 # the name that 'up' wants for its own
  local before
  before=$(machine_state)
  run -1 "$softroce" up
  [[ $output == *"ip link add rdmakv0 type veth: failed"* ]]
  diff <(echo "$before") <(machine_state)
  ip link delete rdmakv1
}

@test "up: an address in use is refused, another can be chosen" {
  plain_build "of the script, not of the programs"
  ip link add test0 type veth peer name test1
  ip address add 192.168.77.9/24 dev test0
  run -1 "$softroce" up
  [[ $output == *"192.168.77.1/24: this machine uses that network already"* ]]
  "$softroce" --address 192.168.79.1/24 up
  run -0 "$softroce" status
  [[ $output == *" 192.168.79.1/24"* ]]
  "$softroce" down
  ip link delete test0
}

teardown() {
  in_lab || return 0
  stop_what_runs
  "$softroce" down 2>/dev/null || true
  ip link delete test0 2>/dev/null || true
  ip link delete rdmakv1 2>/dev/null || true
  nothing_reported
}
