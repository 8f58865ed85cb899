# Builds rdma_kv_server and rdma_kv_reader; the library of transfer_engine/ by its own Makefile.
#   make            both programs, here         make install      into $(DESTDIR)$(PREFIX)/bin
#   make demo       1 GB by RDMA READ           make clean
#   make engine     the library                 make engine-test  its tests
#   make test       every test
# CXX, CXXFLAGS, CPPFLAGS, LDFLAGS and MARCH (say MARCH=-march=x86-64-v3 for another machine) may be set.
CXX      ?= g++
MARCH    ?= -march=native
CXXFLAGS ?= -O2
PREFIX   ?= /usr/local
# Where the programs go; the tests build variants elsewhere.
BIN      ?= .

# CXX has a default of make's own, which ?= does not replace.
ifeq ($(origin CXX),default)
CXX := g++
endif

programs := $(BIN)/rdma_kv_server $(BIN)/rdma_kv_reader
compile   = $(CXX) -std=c++20 -Wall -Wextra $(CXXFLAGS) $(MARCH) $(CPPFLAGS)
libraries = -libverbs -lrdmacm -lcrypto -lpthread
# Holds the command the programs were built with: they are built anew when it changes.
command  := $(BIN)/build/command

all: $(programs)

$(programs): $(BIN)/%: %.cpp common.hpp $(command)
	$(compile) $(LDFLAGS) -o $@ $< $(libraries)

# What measures and tests besides: build/bench/registration, build/tests/hostile/hostile_reader, ...
build/%: %.cpp common.hpp $(wildcard tests/hostile/*.hpp) $(command)
	@mkdir -p $(@D)
	$(compile) $(LDFLAGS) -o $@ $< $(libraries)

# One line that names the package, instead of a page from the compiler.
header_packages := infiniband/verbs.h:libibverbs-dev rdma/rdma_cma.h:librdmacm-dev openssl/evp.h:libssl-dev

$(command): FORCE
	@command -v $(firstword $(CXX)) >/dev/null || { echo "make: no compiler $(CXX): install g++ (scripts/install_deps.sh build)" >&2; exit 1; }
	@echo | $(compile) -x c++ -E -o /dev/null - || { echo "make: $(compile): the compiler refuses this" >&2; exit 1; }
	@for pair in $(header_packages); do \
	  echo "#include <$${pair%:*}>" | $(compile) -x c++ -E -o /dev/null - 2>/dev/null || \
	    { echo "make: <$${pair%:*}> is missing: install $${pair#*:} (scripts/install_deps.sh build)" >&2; exit 1; }; \
	done
	@mkdir -p $(@D)
	@echo '$(compile) $(LDFLAGS)' | cmp -s - $@ || echo '$(compile) $(LDFLAGS)' >$@

install: $(programs)
	install -D -t $(DESTDIR)$(PREFIX)/bin $(programs)

# What was built, and what demo and tests left. The lab's kernel stays: rm -r build/lab removes it.
clean:
	rm -rf $(programs) $(BIN)/build/command build/tests build/demo build/bench build/engine

# The library transfer_engine; its own Makefile says what else there is.
engine:
	$(MAKE) -C transfer_engine all examples
engine-test:
	tests/engine.t

demo:
	scripts/demo.sh

test:
	scripts/test.sh

FORCE:
.PHONY: all install clean engine engine-test demo test FORCE
