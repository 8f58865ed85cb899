#!/usr/bin/env bash
# SoftRoCE (rdma_rxe) on this kernel: a software RDMA device on an Ethernet interface.
set -euo pipefail

# What 'up' did, one step a line, in order; 'down' undoes exactly these lines in reverse.
readonly state=/run/rdma_kv_softroce
readonly own_netdev=rdmakv0 own_peer=rdmakv1
address=192.168.77.1/24

usage() {
  cat <<TXT
usage: scripts/softroce.sh [--address A/P] up [NETDEV] | down | status

  up            makes a veth pair of its own ($own_netdev, $address, MTU 9000) and a SoftRoCE
                device on it; no existing interface is touched
  up NETDEV     makes the SoftRoCE device on NETDEV, which keeps its address and MTU
  down          undoes exactly what 'up' did
  status        what is there; exit status 1 when there is no SoftRoCE device

  --address A/P   another address and prefix for the veth pair
  -h, --help      this text
TXT
}

die() {
  printf 'softroce.sh: %s\n' "$1" >&2
  [[ $# -lt 2 ]] || printf '  hint: %s\n' "$2" >&2
  exit 1
}

require_root() { [[ $(id -u) -eq 0 ]] || die "$1 needs root" "sudo scripts/softroce.sh $1 ..."; }

did() { printf '%s\n' "$*" >>"$state"; }

loaded_modules() { awk '{ print $1 }' /proc/modules | tac; } # the oldest first

# Loads a module and what that needs, and writes down all that is new.
load_module() {
  local module=$1 before new
  [[ ! -d /sys/module/$module ]] || return 0
  before=$(loaded_modules)
  modprobe "$module" 2>/dev/null || return 1
  for new in $(loaded_modules | grep -vxF "$before"); do
    did module "$new"
  done
}

need_module() {
  load_module "$1" ||
    die "modprobe $1: kernel $(uname -r) has no such module" \
      "cloud kernels lack rdma_rxe: use the distribution's standard kernel (Debian: linux-image-amd64), or scripts/lab.sh"
}

load_modules() {
  # Up to Linux 6.14 rxe asks the crypto layer for crc32 by name; without it 'rdma link add' fails
  # with "No such file or directory". Later kernels have no such module and need none.
  load_module crc32_generic || true
  local module
  for module in ib_uverbs rdma_ucm rdma_rxe; do
    need_module "$module"
  done
}

make_veth_pair() {
  [[ ! -d /sys/class/net/$own_netdev ]] || die "interface $own_netdev exists already" "ip link delete $own_netdev"
  local network
  network=$(ip -o route show match "${address%/*}" | grep -v '^default' || true)
  [[ -z $network && -z $(ip -o address show to "$address") ]] ||
    die "address $address: this machine uses that network already" "choose another: --address 10.77.0.1/24"
  need_module veth
  ip link add "$own_netdev" mtu 9000 type veth peer name "$own_peer" mtu 9000 ||
    die "ip link add $own_netdev type veth: failed"
  did netdev "$own_netdev"
  ip address add "$address" dev "$own_netdev"
  ip link set "$own_peer" up
  ip link set "$own_netdev" up
}

# The RDMA device on an interface, if there is one.
device_on() {
  rdma link show 2>/dev/null | awk -v netdev="$1" '{
    for (i = 1; i < NF; i++) if ($i == "netdev" && $(i + 1) == netdev) { split($2, part, "/"); print part[1]; exit }
  }'
}

free_device_name() {
  local number=0
  while [[ -e /sys/class/infiniband/rxe$number ]]; do number=$((number + 1)); done
  echo "rxe$number"
}

# The IPv4-mapped GID that stands for an IPv4 address, as sysfs spells it.
gid_of() {
  local a b c d
  IFS=. read -r a b c d <<<"$1"
  printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x\n' "$a" "$b" "$c" "$d"
}

# The GID table lags behind 'rdma link add': a program that connects at once would fail.
wait_until_ready() {
  local device=$1 netdev=$2 port=/sys/class/infiniband/$1/ports/1 ip attempt
  ip=$(ip -4 -o address show dev "$netdev" | awk '{ sub("/.*", "", $4); print $4; exit }')
  for ((attempt = 0; attempt < 100; attempt++)); do
    if grep -q ACTIVE "$port/state" && { [[ -z $ip ]] || grep -qi "$(gid_of "$ip")" "$port"/gids/* 2>/dev/null; }; then
      return 0
    fi
    sleep 0.1
  done
  die "$device: port not ACTIVE with the GID of ${ip:-its address} after 10 s (state: $(<"$port/state"))" \
    "is $netdev up, with a carrier?"
}

up() {
  local netdev=${1:-} device
  require_root up
  [[ ! -e $state ]] || die "up was done already" "scripts/softroce.sh status, or down first"
  command -v rdma >/dev/null || die "no 'rdma' command" "scripts/install_deps.sh run (package iproute2)"
  if [[ -n $netdev ]]; then
    [[ -d /sys/class/net/$netdev ]] || die "interface $netdev: does not exist" "ip -brief link"
    [[ $netdev != lo ]] || die "interface lo: rdma_cm never connects over 127.0.0.1" "without a name, 'up' makes its own interface"
    device=$(device_on "$netdev")
    [[ -z $device ]] || die "interface $netdev carries RDMA device $device already"
  fi

  : >"$state"
  trap 'undo' EXIT # until all of it stands
  load_modules
  if [[ -z $netdev ]]; then
    make_veth_pair
    netdev=$own_netdev
  fi
  device=$(free_device_name)
  rdma link add "$device" type rxe netdev "$netdev" ||
    die "rdma link add $device type rxe netdev $netdev: failed" \
      "dmesg names the cause ('failed to allocate crc algorithm': modprobe crc32_generic)"
  did link "$device"
  wait_until_ready "$device" "$netdev"
  trap - EXIT
  status
}

# Never stops half-way: what cannot be undone is said, the rest is undone all the same.
undo() {
  local kind name
  [[ -e $state ]] || return 0
  while read -r kind name; do
    case $kind in
      link) rdma link delete "$name" ;;
      netdev) ip link delete "$name" ;;
      module) modprobe -r "$name" 2>/dev/null || [[ ! -d /sys/module/$name ]] ;; # gone with an earlier one?
    esac || printf 'softroce.sh: %s %s stays: it is in use, or gone already\n' "$kind" "$name" >&2
  done < <(tac "$state")
  rm -f "$state"
}

down() {
  require_root down
  [[ -e $state ]] || die "nothing to undo: 'up' has done nothing here"
  undo
}

status() {
  local device netdev port found=1
  for device in /sys/class/infiniband/*; do
    # Only rxe and siw devices have a 'parent': the interface they were made on.
    [[ -e $device/parent ]] || continue
    found=0
    netdev=$(<"$device/parent")
    port=$device/ports/1
    printf '%s: port %s, on %s, MTU %s, %s\n' "${device##*/}" "$(cut -d' ' -f2 "$port/state")" "$netdev" \
      "$(<"/sys/class/net/$netdev/mtu")" "$(ip -o address show dev "$netdev" | awk '{ printf "%s%s", separator, $4; separator = " " }')"
  done
  [[ $found -eq 0 ]] || echo "no SoftRoCE device"
  return "$found"
}

main() {
  while [[ ${1:-} == -* ]]; do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --address)
        address=${2:-}
        [[ $address =~ ^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+/[0-9]+$ ]] || { usage >&2; exit 2; }
        shift 2
        ;;
      *) usage >&2; exit 2 ;;
    esac
  done
  case ${1:-} in
    up) [[ $# -le 2 ]] || { usage >&2; exit 2; }; up "${2:-}" ;;
    down) down ;;
    status) status ;;
    *) usage >&2; exit 2 ;;
  esac
}

main "$@"
