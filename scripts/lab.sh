#!/usr/bin/env bash
# Runs a command in a guest whose kernel has RDMA (SoftRoCE), on a machine whose own has none.
#
# The guest is QEMU (KVM where this processor has it, else emulation) with the distribution's
# stock kernel. Its root file system is this machine's, read-only, with a tmpfs over it: programs
# and libraries are the ones installed here, and nothing the command does outside the project's
# folder outlives it. The project's folder is shared writable, under the same path.
set -euo pipefail

here=$(unset CDPATH && cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
project=$(dirname "$here")
lab=$project/build/lab

usage() {
  cat <<TXT
usage: scripts/lab.sh [options] [-- COMMAND [ARGUMENT...]]

Boots a guest, runs COMMAND in it (in the current folder, where the guest has that), returns its
output and exit status. On a terminal COMMAND has it as its own; else its standard input is empty.
Without COMMAND: a shell, on a terminal.

  -m, --memory SIZE    the guest's memory, in M or G (default 4G)
  -c, --cpus N         the guest's processors (default: this machine's, 4 at most)
  -t, --timeout SEC    stop the guest after this long (default 3600)
  -a, --accel NAME     kvm or tcg (default: kvm where usable, else tcg, which is emulation)
  -p, --prepare        fetch the kernel and make the initramfs, then stop
  -v, --verbose        show the guest's console on stderr
  -h, --help           this text

Exit status: COMMAND's; 124 when the time ran out; 125 when the guest did not come that far.
Everything fetched or made lies under build/lab; a second start needs no network.
TXT
}

say() { printf 'lab: %s\n' "$*" >&2; }
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
    [[ ! -s $folder/pid ]] || kill -0 "$(<"$folder/pid")" 2>/dev/null || rm -rf "$folder"
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

# What the guest runs, as a script in its share: write_start_script FOLDER COMMAND...
# shellcheck disable=SC2016 # for the guest's shell to expand
write_start_script() {
  local folder=$1
  shift
  {
    echo "export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    echo "export LAB_NODE=$(<"$folder/node") LAB_ACCELERATOR=$accelerator TERM=${TERM:-dumb}"
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
  } >"$folder/start"
}

# boot_node NAME COMMAND... : starts the guest NAME on COMMAND in the background. Its share, its
# console's text and its exit status are in $run/NAME; node_pid[NAME] is its QEMU.
declare -A node_pid=()
boot_node() {
  local name=$1 folder=$run/$1 cpu=host append
  shift
  mkdir -p "$folder"
  echo "$name" >"$folder/node"
  echo "$project" >"$folder/project"
  write_start_script "$folder" "$@"

  # Under emulation the string instructions and pclmul are slow: without them the C library and
  # the kernel take faster ways (measured: 55 against 130 MB/s through SoftRoCE).
  [[ $accelerator == kvm ]] || cpu=max,-erms,-fsrm,-pclmulqdq
  append="console=ttyS0 quiet panic=-1 rdinit=/init"
  # An emulated processor does not promise a steady TSC, and the kernel would read the clock from the
  # HPET, a device: microseconds each time, within everything that is timed.
  [[ $accelerator == kvm ]] || append+=" mitigations=off tsc=reliable clocksource=tsc"

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
  )
  if $terminal; then
    qemu+=(-chardev "stdio,id=terminal,signal=off" -device "virtconsole,chardev=terminal")
    "${qemu[@]}" <&0 &
  else
    # Held open here until QEMU has ended, so that no reader waits for a QEMU that never came to write.
    mkfifo "$folder/out" "$folder/err"
    exec {hold_out}<>"$folder/out" {hold_err}<>"$folder/err"
    cat <"$folder/out" {hold_out}>&- {hold_err}>&- &
    reader_pids+=($!)
    cat <"$folder/err" >&2 {hold_out}>&- {hold_err}>&- &
    reader_pids+=($!)
    qemu+=(
      -chardev "file,id=out,path=$folder/out" -device "virtserialport,chardev=out,name=out"
      -chardev "file,id=err,path=$folder/err" -device "virtserialport,chardev=err,name=err"
    )
    "${qemu[@]}" </dev/null {hold_out}>&- {hold_err}>&- &
  fi
  node_pid[$name]=$!
}

# wait_for_node NAME : returns the command's exit status, 124 or 125.
wait_for_node() {
  local name=$1 folder=$run/$1 deadline=$((SECONDS + timeout))
  local late=false
  while kill -0 "${node_pid[$name]}" 2>/dev/null; do
    if ((SECONDS >= deadline)); then
      say "$name: not finished after $timeout s, stopped"
      late=true
      kill "${node_pid[$name]}"
      wait "${node_pid[$name]}" || true
    fi
    sleep 0.1
  done
  # Everything the guest wrote has to be out before its status is told.
  if [[ ${#reader_pids[@]} -gt 0 ]]; then
    exec {hold_out}>&- {hold_err}>&-
    wait "${reader_pids[@]}"
  fi
  ! $late || return 124
  if [[ ! -s $folder/exit_status ]]; then
    say "$name ended before its command did; the last lines of its console:"
    [[ ! -e $folder/console.log ]] || tail -n 15 "$folder/console.log" >&2
    return 125
  fi
  return "$(<"$folder/exit_status")"
}

# shellcheck disable=SC2317 # reached by trap
clean_up() {
  local pid
  for pid in "${node_pid[@]}" "${reader_pids[@]}" ${console_pid:+"$console_pid"}; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  [[ -z ${saved_terminal:-} ]] || stty "$saved_terminal"
  rm -rf "${run:?}"
}

main() {
  local options
  options=$(getopt -o +m:c:t:a:pvh -l memory:,cpus:,timeout:,accel:,prepare,verbose,help -n lab.sh -- "$@") ||
    { usage >&2; exit 2; }
  eval set -- "$options"
  memory=4G cpus=$(nproc) timeout=3600 accelerator="" verbose=false terminal=false
  ((cpus <= 4)) || cpus=4
  local prepare_only=false
  while [[ $1 != -- ]]; do
    case $1 in
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
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  say "booting a guest ($([[ $accelerator == kvm ]] && echo KVM || echo 'emulated, QEMU TCG'), $cpus processors, $memory)"
  boot_node node-a "$@"
  if $verbose; then
    tail -F -n +1 "$run/node-a/console.log" >&2 2>/dev/null &
    console_pid=$!
  fi
  local status=0
  wait_for_node node-a || status=$?
  exit "$status"
}

main "$@"
