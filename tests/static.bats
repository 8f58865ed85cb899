#!/usr/bin/env bats
# What can be said of the sources without running them. .clang-tidy and .shellcheckrc say what is looked for.
bats_require_minimum_version 1.5.0

setup() { cd "$BATS_TEST_DIRNAME/.." || return; }

# sources PATTERN... : the repository's files of such names, one a line, without what is built, fetched or data.
sources() {
  local -a names=()
  local pattern
  for pattern in "$@"; do
    names+=(-o -name "$pattern")
  done
  find . \( -path ./build -o -path ./.git \) -prune -o -type f -size -1024k \( "${names[@]:1}" \) -print
}

@test "clang-tidy finds nothing" {
  local -a files
  # The library's tests are left out: one of them takes a minute, for GoogleTest's macros.
  mapfile -t files < <(sources '*.cpp' | grep -v '^./transfer_engine/tests/')
  [[ " ${files[*]} " == *" ./rdma_kv_server.cpp "* && ${#files[@]} -ge 4 ]]
  # At idle priority: scripts/test.sh runs other tests beside these.
  printf '%s\n' "${files[@]}" |
    chrt --idle 0 xargs -P "$(nproc)" -I{} clang-tidy --quiet {} -- -std=c++20 -Itransfer_engine -Wall -Wextra -Wpedantic -Wshadow -Wconversion
}

@test "clang-format changes nothing" {
  local -a files
  mapfile -t files < <(sources '*.cpp' '*.hpp')
  clang-format --dry-run --Werror "${files[@]}"
}

@test "shellcheck finds nothing" {
  local -a scripts
  # By their first line, too: not every script has a suffix, and not every file with one has such a line.
  mapfile -t scripts < <(sources '*.sh' '*.bash'; sources '*' | xargs grep -lIE '^#!/.*(sh|bats)$')
  [[ " ${scripts[*]} " == *" ./scripts/lab/init "* && " ${scripts[*]} " == *" ./.ci/run "* ]]
  printf '%s\n' "${scripts[@]}" | sort -u | xargs shellcheck
}
