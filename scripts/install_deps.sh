#!/usr/bin/env bash
# Installs the Debian packages that a task needs; asks for sudo only when one is missing.
set -euo pipefail

usage() {
  cat <<TXT
usage: scripts/install_deps.sh [-n] [SET...]

SET: build  what 'make' needs                     (default)
     run    what the programs need on a machine   (default)
     test   what scripts/test.sh needs besides
     lab    what scripts/lab.sh needs besides
     bench  what scripts/bench.sh and plot.sh need besides
     engine what 'make engine' needs
     all    all of these
  -n, --dry-run   only print the packages that are missing
  -h, --help      this text
TXT
}

packages_of() {
  case $1 in
    build) echo g++ make libibverbs-dev librdmacm-dev libssl-dev ;;
    run) echo rdma-core ibverbs-providers iproute2 kmod ;;
    test) echo bats perl clang clang-format clang-tidy libclang-rt-dev valgrind binutils libgtest-dev shellcheck procps ibverbs-utils rdmacm-utils jq ;;
    lab) echo qemu-system-x86 busybox-static cpio kmod ;;
    bench) echo perftest rdmacm-utils ibverbs-utils ncat gnuplot-nox jq git ;;
    engine) echo g++ make pkg-config libibverbs-dev libfabric-dev libhwloc-dev libconcurrentqueue-dev ;;
    all) echo "$(packages_of build) $(packages_of run) $(packages_of test) $(packages_of lab) $(packages_of bench) $(packages_of engine)" ;;
    *) printf "install_deps.sh: unknown set '%s'\n" "$1" >&2; usage >&2; exit 2 ;;
  esac
}

is_installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

main() {
  local dry_run=false set package names
  local -a sets=() wanted=() missing=()
  for set in "$@"; do
    case $set in
      -h | --help) usage; exit 0 ;;
      -n | --dry-run) dry_run=true ;;
      *) sets+=("$set") ;;
    esac
  done
  [[ ${#sets[@]} -gt 0 ]] || sets=(build run)
  for set in "${sets[@]}"; do
    names=$(packages_of "$set") || exit
    read -ra wanted <<<"${wanted[*]} $names"
  done

  if ! command -v apt-get >/dev/null; then
    printf 'install_deps.sh: no apt-get here; install what corresponds to these Debian packages:\n  %s\n' "${wanted[*]}" >&2
    exit 1
  fi
  for package in "${wanted[@]}"; do
    is_installed "$package" || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || exit 0
  printf 'install_deps.sh: missing: %s\n' "${missing[*]}" >&2
  ! $dry_run || exit 0

  local -a as_root=()
  if [[ $(id -u) -ne 0 ]]; then
    command -v sudo >/dev/null || { printf 'install_deps.sh: not root, and no sudo here: have root install them\n' >&2; exit 1; }
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get -q update >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${missing[@]}" >&2
}

main "$@"
