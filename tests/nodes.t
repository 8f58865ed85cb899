#!/usr/bin/env bash
# The tests of tests/nodes/: they run here, beside two guests with a wire between them.
# NODES_TESTS="faults" chooses among the files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $(uname -m) == x86_64 ]] || { echo "1..0 # SKIP the lab was only made for x86_64"; exit; }

read -ra files <<<"${NODES_TESTS:-faults}"
files=("${files[@]/%/.bats}")
files=("${files[@]/#/tests\/nodes\/}")
exec scripts/lab.sh --nodes 2 --memory 1536M --timeout 1800 -- bats --formatter tap "${files[@]}"
