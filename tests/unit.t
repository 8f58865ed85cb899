#!/usr/bin/env bash
# GoogleTest's tests of common.hpp, as TAP.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p build/tests
"${CXX:-g++}" -std=c++20 -Wall -Wextra -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all \
  -D_GLIBCXX_ASSERTIONS tests/unit/common_test.cpp -o build/tests/common_test -lgtest_main -lgtest -libverbs -lrdmacm -lcrypto
status=0
build/tests/common_test --gtest_color=no >build/tests/common_test.log 2>&1 || status=$?
echo "exit $status" >>build/tests/common_test.log
awk -f tests/tap_of_gtest.awk build/tests/common_test.log
exit "$status"
