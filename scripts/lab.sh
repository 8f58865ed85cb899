#!/usr/bin/env bash
# Runs a command in a guest whose kernel has RDMA (SoftRoCE), on a machine whose own has none.
#
# The guest is QEMU (KVM where this processor has it, else emulation) with the distribution's
# stock kernel. Its root file system is this machine's, read-only, with a tmpfs over it: programs
# and libraries are the ones installed here, and nothing the command does outside the project's
# folder outlives it. The project's folder is shared writable, under the same path.
#
# With --nodes 2 there are two guests with a wire between them, and the command runs here.
set -euo pipefail

here=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
project=$(dirname "$here")
lab=$project/build/lab
# shellcheck source=lab/functions.sh
source "$here/lab/functions.sh"

usage() {
  cat <<TXT
usage: scripts/lab.sh [options] [-- COMMAND [ARGUMENT...]]

Boots a guest, runs COMMAND in it (in the current folder, where the guest has that), returns its
output and exit status. On a terminal COMMAND has it as its own; else its standard input is empty.
Without COMMAND: a shell, on a terminal.

With --nodes 2: boots two, node-a (192.168.77.1) and node-b (192.168.77.2), with a SoftRoCE device each
on the wire between them, and runs COMMAND here. It reaches them with the tool 'node', in its PATH:
  node run node-b COMMAND...      node kill node-a      node boot node-a      node -h

  -n, --nodes N        1 or 2 (default 1)
  -m, --memory SIZE    a guest's memory, in M or G (default 4G)
  -c, --cpus N         a guest's processors (default: this machine's, 4 at most)
  -t, --timeout SEC    stop after this long (default 3600)
  -a, --accel NAME     kvm or tcg (default: kvm where usable, else tcg, which is emulation)
  -p, --prepare        fetch the kernel and make the initramfs, then stop
  -v, --verbose        show the guest's console on stderr
  -h, --help           this text

Exit status: COMMAND's; 124 when the time ran out; 125 when the guest did not come that far.
Everything fetched or made lies under build/lab; a second start needs no network.
TXT
}

die() {
  printf 'lab.sh: %s\n' "$1" >&2
  [[ $# -lt 2 ]] || printf '  hint: %s\n' "$2" >&2
  exit 125
}

# The kernel: unpacked from its package, not installed.
fetch_kernel() {
  [[ ! -e $lab/kernel/version ]] || return 0
  local package unpacked version
  package=$({ LC_ALL=C apt-cache depends linux-image-amd64 2>/dev/null || true; } | awk '/Depends: linux-image-/ { print $2; exit }')
  [[ -n $package ]] || die "apt-cache depends linux-image-amd64: no kernel package found" \
    "the lab uses Debian's kernel; where the package lists are empty, run 'apt-get update' (as root)"
  say "fetching $package (about 70 MB)"
  unpacked=$lab/kernel.new
  rm -rf "$unpacked" "$lab/kernel"
  mkdir -p "$unpacked"
  (cd "$unpacked" && apt-get -q -o APT::Sandbox::User="$(id -un)" download "$package" >&2) ||
    die "apt-get download $package: failed"
  dpkg-deb -x "$unpacked"/linux-image-*.deb "$unpacked"
  rm "$unpacked"/linux-image-*.deb
  version=${package#linux-image-}
  /sbin/depmod -b "$unpacked" "$version"
  echo "$version" >"$unpacked/version"
  mv "$unpacked" "$lab/kernel"
}

# The initramfs: busybox, scripts/lab/init and the modules needed to reach the host's files. The
# RDMA modules are loaded in the guest by softroce.sh, as on any machine.
make_initramfs() {
  local version=$1 tree=$lab/initramfs.tree module source
  for source in "$here/lab/init" "$lab/kernel/version" "${BASH_SOURCE[0]}"; do
    [[ $lab/initramfs -nt $source ]] || break
  done
  [[ ! $lab/initramfs -nt $source ]] || return 0
  rm -rf "$tree"
  mkdir -p "$tree"/{bin,dev,proc,sys,modules}
  cp "$(command -v busybox)" "$tree/bin/busybox"
  ln -s busybox "$tree/bin/sh"
  cp "$here/lab/init" "$tree/init"
  chmod +x "$tree/init"
  for module in virtio_pci virtio_console 9pnet_virtio 9p overlay virtio_net; do
    /sbin/modprobe -d "$lab/kernel" -S "$version" --show-depends "$module"
  done | awk 'sub(/^insmod /, "") { sub(/ +$/, ""); if (!seen[$0]++) print }' | while read -r module; do
    cp "$module" "$tree/modules/"
    basename "$module"
  done >"$tree/modules/order"
  (cd "$tree" && find . | cpio --quiet -o -H newc) >"$lab/initramfs.new"
  mv "$lab/initramfs.new" "$lab/initramfs"
  rm -rf "$tree"
}

prepare() {
  [[ $(uname -m) == x86_64 ]] || die "this machine is $(uname -m): the lab was only made for x86_64"
  [[ $project != *[,:]* ]] || die "folder $project: QEMU cannot share a path with a comma or a colon"
  "$here/install_deps.sh" lab || die "its packages could not be installed"
  mkdir -p "$lab"
  (
    flock 9 # two first starts at a time would undo each other's work
    remove_stale_runs
    fetch_kernel
    make_initramfs "$(<"$lab/kernel/version")"
  ) 9>"$lab/lock" || exit
}

# What is left of a lab.sh that was killed.
remove_stale_runs() {
  local folder
  for folder in "$lab"/run.*; do
    if [[ -s $folder/pid ]] && ! kill -0 "$(<"$folder/pid")" 2>/dev/null; then
      stop_run "$folder"
      rm -rf "$folder"
    fi
  done
}

# A /dev/kvm may exist where a stock kernel cannot run on it: the processor's flags decide as well.
choose_accelerator() {
  if ! grep -qwE 'vmx|svm' /proc/cpuinfo || [[ ! -e /dev/kvm ]]; then
    echo tcg
  elif [[ ! -w /dev/kvm ]]; then
    say "/dev/kvm is not yours to write (group kvm?): emulating, which is slower"
    echo tcg
  else
    echo kvm
  fi
}

# make_guest NAME QEMU_OPTION... : the folder of a guest that is to run the script on standard input.
make_guest() {
  local name=$1 folder=$run/$1 cpu=host append
  shift
  mkdir -p "$folder"
  echo "$name" >"$folder/node"
  echo "$project" >"$folder/project"
  {
    echo "export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    echo "export LAB_NODE=$name LAB_ACCELERATOR=$accelerator TERM=${TERM:-dumb}"
    cat
  } >"$folder/start"

  # Under emulation the string instructions and pclmul are slow: without them the C library and
  # the kernel take faster ways (measured: 55 against 130 MB/s through SoftRoCE).
  [[ $accelerator == kvm ]] || cpu=max,-erms,-fsrm,-pclmulqdq
  append="console=ttyS0 quiet panic=-1 rdinit=/init"
  # An emulated processor does not promise a steady TSC, and the kernel would read the clock from the
  # HPET, a device: microseconds each time, within everything that is timed.
  # And on a busy machine the timer's interrupts may come too late for the kernel's test of them: it panics.
  [[ $accelerator == kvm ]] || append+=" mitigations=off tsc=reliable clocksource=tsc no_timer_check"

  local qemu=(
    qemu-system-x86_64 -nodefaults -no-user-config -no-reboot -display none -name "$name"
    -M q35 -accel "$accelerator" -cpu "$cpu" -smp "$cpus" -m "$memory"
    -kernel "$lab/kernel/boot/vmlinuz-$(<"$lab/kernel/version")" -initrd "$lab/initramfs" -append "$append"
    -serial "file:$folder/console.log"
    -device virtio-serial-pci
    -virtfs "local,path=/,mount_tag=root,security_model=none,multidevs=remap,readonly=on"
    -virtfs "local,path=$project,mount_tag=project,security_model=none,multidevs=remap"
    -virtfs "local,path=$folder,mount_tag=run,security_model=none,multidevs=remap"
    -virtfs "local,path=$lab/kernel/lib/modules,mount_tag=modules,security_model=none,readonly=on"
    "$@"
  )
  {
    printf 'cd %q && exec' "$run"
    printf ' %q' "${qemu[@]}"
  } >"$folder/qemu"
}

# What the one guest runs.
# shellcheck disable=SC2016 # for the guest's shell to expand
print_start_script() {
  printf 'cd %q 2>/dev/null || cd %q\n' "$PWD" "$project"
  # With a terminal the command gets the console as its own; without, its two outputs stay apart.
  if $terminal; then
    printf 'stty rows %s cols %s </dev/hvc0\n' "$(tput lines)" "$(tput cols)"
    printf 'exec setsid -c -w '
    printf '%q ' "$@"
    printf '</dev/hvc0 >/dev/hvc0 2>&1\n'
  else
    # By way of pipes: a port can be opened once, and programs open /dev/stderr again. When the command
    # has ended, what it left running must not hold them open for ever.
    printf 'mkfifo /run/out /run/err\n'
    printf 'cat </run/out >/dev/virtio-ports/out &\ncat </run/err >/dev/virtio-ports/err &\n'
    printf '%q ' "$@"
    printf '</dev/null >/run/out 2>/run/err\nstatus=$?\n'
    cat <<'TXT'
for _ in {1..10}; do [[ -n $(jobs -r) ]] || exit $status; sleep 0.1; done
for file in /proc/[0-9]*/fd/*; do
  process=${file#/proc/} process=${process%%/*}
  [[ ! $file -ef /run/out && ! $file -ef /run/err || " $(jobs -p | tr '\n' ' ') " == *" $process "* ]] || kill -KILL "$process"
done
wait
exit $status
TXT
  fi
}

# run_in_guest COMMAND... : returns its exit status, 124 or 125.
run_in_guest() {
  local folder=$run/node-a guest
  mkdir "$folder"
  if $terminal; then
    print_start_script "$@" |
      make_guest node-a -chardev "stdio,id=terminal,signal=off" -device "virtconsole,chardev=terminal"
    start_guest node-a <&0
    guest=$!
  else
    # Held open here until QEMU has ended, so that no reader waits for a QEMU that never came to write.
    mkfifo "$folder/out" "$folder/err"
    exec {hold_out}<>"$folder/out" {hold_err}<>"$folder/err"
    cat <"$folder/out" {hold_out}>&- {hold_err}>&- &
    reader_pids+=($!)
    cat <"$folder/err" >&2 {hold_out}>&- {hold_err}>&- &
    reader_pids+=($!)
    print_start_script "$@" | make_guest node-a \
      -chardev "file,id=out,path=$folder/out" -device "virtserialport,chardev=out,name=out" \
      -chardev "file,id=err,path=$folder/err" -device "virtserialport,chardev=err,name=err"
    start_guest node-a </dev/null
    guest=$!
  fi
  local late=0
  wait_until_ended "$guest" || late=$?
  # Everything the guest wrote has to be out before its status is told.
  if ! $terminal; then
    exec {hold_out}>&- {hold_err}>&-
    wait "${reader_pids[@]}"
  fi
  [[ $late -eq 0 ]] || return "$late"
  if [[ ! -s $folder/exit_status ]]; then
    say "node-a ended before its command did; the last lines of its console:"
    show_console node-a
    return 125
  fi
  return "$(<"$folder/exit_status")"
}

# A node of two, ready to boot. The wire carries Ethernet frames as datagrams: it has no connection that
# the end of one node could break. Its sockets have short names, seen from the run's folder: a longer
# path than 107 bytes cannot be a socket's.
make_node() {
  local name=$1 other=$2 number=$3
  mkdir -p "$run/$name/jobs"
  mkfifo "$run/$name/jobs.in" "$run/$name/jobs.out"
  make_guest "$name" \
    -chardev "pipe,id=jobs,path=$run/$name/jobs" -device "virtserialport,chardev=jobs,name=jobs" \
    -netdev "dgram,id=wire,local.type=unix,local.path=wire.$name,remote.type=unix,remote.path=wire.$other" \
    -device "virtio-net-pci,netdev=wire,host_mtu=9000,mac=52:54:00:00:00:0$number" <<TXT
printf '192.168.77.%s\n' '1 node-a' '2 node-b' >>/etc/hosts
ip address add 192.168.77.$number/24 dev eth0
ip link set eth0 up
cd $(printf %q "$project")
scripts/softroce.sh up eth0 || exit
exec scripts/lab/agent
TXT
}

# run_beside_nodes COMMAND... : returns its exit status, 124 or 125.
run_beside_nodes() {
  local name boot command booting=()
  make_node node-a node-b 1
  make_node node-b node-a 2
  for name in node-a node-b; do
    LAB_RUN=$run "$here/lab/node" boot "$name" &
    booting+=($!)
  done
  for boot in "${booting[@]}"; do
    wait "$boot" || { say "not both nodes came up"; return 125; }
  done
  # In the background, so that a signal to this script is heeded at once. Such a command would ignore SIGINT.
  LAB_RUN=$run PATH=$here/lab:$PATH env --default-signal=INT,QUIT "$@" <&0 &
  command=$!
  wait_until_ended "$command" || return
  wait "$command"
}

# Returns 124 when the time ran out before that process, a child of this one, had ended.
wait_until_ended() {
  local pid=$1 deadline=$((SECONDS + timeout))
  while kill -0 "$pid" 2>/dev/null; do
    if ((SECONDS >= deadline)); then
      say "not finished after $timeout s, stopped"
      stop_run "$run"
      return 124
    fi
    sleep 0.1
  done
}

# shellcheck disable=SC2317 # reached by trap
clean_up() {
  local pid
  stop_run "$run"
  for pid in "${reader_pids[@]}" ${console_pid:+"$console_pid"}; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  [[ -z ${saved_terminal:-} ]] || stty "$saved_terminal"
  rm -rf "${run:?}"
}

main() {
  local options
  options=$(getopt -o +n:m:c:t:a:pvh -l nodes:,memory:,cpus:,timeout:,accel:,prepare,verbose,help -n lab.sh -- "$@") ||
    { usage >&2; exit 2; }
  eval set -- "$options"
  nodes=1 memory=4G cpus=$(nproc) timeout=3600 accelerator="" verbose=false terminal=false
  ((cpus <= 4)) || cpus=4
  local prepare_only=false
  while [[ $1 != -- ]]; do
    case $1 in
      -n | --nodes) nodes=$2; shift 2 ;;
      -m | --memory) memory=$2; shift 2 ;;
      -c | --cpus) cpus=$2; shift 2 ;;
      -t | --timeout) timeout=$2; shift 2 ;;
      -a | --accel) accelerator=$2; shift 2 ;;
      -p | --prepare) prepare_only=true; shift ;;
      -v | --verbose) verbose=true; shift ;;
      -h | --help) usage; exit 0 ;;
    esac
  done
  shift
  [[ -n $accelerator ]] || accelerator=$(choose_accelerator)
  [[ $accelerator == kvm || $accelerator == tcg ]] || { say "--accel takes kvm or tcg, not '$accelerator'"; exit 2; }
  [[ $nodes == [12] ]] || { say "--nodes takes 1 or 2, not '$nodes'"; exit 2; }
  [[ $memory =~ ^[1-9][0-9]*[MG]$ ]] || { say "--memory takes a size in M or G, not '$memory'"; exit 2; }
  [[ $cpus =~ ^[1-9][0-9]*$ ]] || { say "--cpus takes a number, not '$cpus'"; exit 2; }
  [[ $timeout =~ ^[0-9]+$ ]] || { say "--timeout takes seconds, not '$timeout'"; exit 2; }
  if [[ -t 0 && -t 1 && -t 2 ]]; then terminal=true; fi
  [[ $# -gt 0 ]] || $prepare_only || $terminal || { say "a shell needs a terminal; give a command after --"; exit 2; }
  [[ $# -gt 0 ]] || set -- bash

  prepare
  ! $prepare_only || exit 0

  run=$(mktemp -d "$lab/run.XXXXXX")
  echo $$ >"$run/pid"
  reader_pids=()
  if $terminal; then saved_terminal=$(stty -g); fi
  trap clean_up EXIT
  trap 'say "stopped by SIGINT"; exit 130' INT
  trap 'say "stopped by SIGTERM or SIGHUP"; exit 143' TERM HUP
  say "booting $([[ $nodes -eq 1 ]] && echo a guest || echo two guests)" \
    "($([[ $accelerator == kvm ]] && echo KVM || echo 'emulated, QEMU TCG'), $cpus processors, $memory)"
  if $verbose; then
    tail -F -n +1 "$run"/node-{a,b}/console.log >&2 2>/dev/null &
    console_pid=$!
  fi
  local status=0
  if [[ $nodes -eq 1 ]]; then
    run_in_guest "$@" || status=$?
  else
    run_beside_nodes "$@" || status=$?
  fi
  exit "$status"
}

main "$@"
