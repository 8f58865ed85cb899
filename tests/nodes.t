#!/usr/bin/env bash
# The tests of tests/nodes/: beside two guests with a wire between them, server on node-a, reader on
# node-b. The table of what they saw is left in build/tests/reliability.tsv. Those of transfer_engine/ come first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The guests' processor has less than this machine's.
make -s -C transfer_engine -j"$(nproc)" MARCH= two-nodes examples
rm -rf build/tests/reliability.tsv build/tests/nodes # of an earlier run
exec scripts/lab.sh --nodes 2 --memory 2G --timeout 1600 -- bats --formatter tap tests/nodes/*.bats
