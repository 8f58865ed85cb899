#!/usr/bin/env bats
# The build: no warnings, the options of the Makefile, what it says when something is missing.
bats_require_minimum_version 1.5.0

setup() {
  cd "$BATS_TEST_DIRNAME/.." || return
  bin=$BATS_TEST_TMPDIR
}

built_without_warning() {
  run -0 make "BIN=$bin" "$@"
  [[ $output != *warning* ]] || { echo "$output"; return 1; }
  "$bin/rdma_kv_server" --version
  "$bin/rdma_kv_reader" --version
}

@test "make: C++20, -Wall -Wextra -O2 -march=native, no warning" {
  built_without_warning
  [[ $output == *"-std=c++20 -Wall -Wextra -O2 -march=native"* ]]
}

strict="-O2 -Wpedantic -Wshadow -Wconversion"
@test "g++ with -Wpedantic -Wshadow -Wconversion: no warning" { built_without_warning CXX=g++ CXXFLAGS="$strict"; }
@test "clang++ with -Wpedantic -Wshadow -Wconversion: no warning" { built_without_warning CXX=clang++ CXXFLAGS="$strict"; }

@test "the only libraries are libibverbs, librdmacm, OpenSSL and the compiler's" {
  make -s "BIN=$bin"
  run -0 bash -c "readelf -d $bin/rdma_kv_server $bin/rdma_kv_reader | sed -n 's/.*NEEDED.*\[\(.*\)\.so.*/\1/p' | sort -u | tr '\n' ' '"
  [[ $output == "libc libcrypto libgcc_s libibverbs librdmacm libstdc++ " || $output == "libc libcrypto libgcc_s libibverbs libm librdmacm libstdc++ " ]] ||
    { echo "$output"; return 1; }
}

@test "nothing is built twice; another flag builds anew" {
  make -s "BIN=$bin"
  run -0 make "BIN=$bin"
  [[ $output != *rdma_kv* ]] || { echo "$output"; return 1; }
  run -0 make "BIN=$bin" MARCH=-march=x86-64
  [[ $output == *"-march=x86-64 "* ]] || { echo "$output"; return 1; }
}

@test "make install and make clean" {
  make -s install "BIN=$bin" "DESTDIR=$bin/root" PREFIX=/usr
  "$bin/root/usr/bin/rdma_kv_server" --version
  "$bin/root/usr/bin/rdma_kv_reader" --version
  make -s clean "BIN=$bin"
  [[ ! -e $bin/rdma_kv_server && ! -e $bin/rdma_kv_reader ]]
}

@test "a missing header: one line that names the package" {
  run make -s "BIN=$bin" CPPFLAGS=-nostdinc
  [[ $status -ne 0 ]]
  [[ $output == "make: <infiniband/verbs.h> is missing: install libibverbs-dev (scripts/install_deps.sh build)"* ]]
  [[ $output != *error:* ]]
}

@test "flags that the compiler refuses are not called a missing package" {
  run make -s "BIN=$bin" MARCH=-march=nonsense
  [[ $status -ne 0 && $output == *"-march=nonsense"*"the compiler refuses this"* && $output != *missing* ]] || { echo "$output"; return 1; }
}

@test "a missing compiler: one line that names the package" {
  run make -s "BIN=$bin" CXX=no-such-compiler
  [[ $status -ne 0 && $output == "make: no compiler no-such-compiler: install g++"* ]]
}
