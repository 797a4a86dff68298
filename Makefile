# Every target sets itself up: `make demo` and `make test` work in a fresh clone. See README.md.

PYTHON ?= $(or $(shell command -v python3.11),python3)
# Plain 2.13.0 from PyPI may be a CUDA build of several GB; without a GPU:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
SEEDS ?= 300
JOBS ?= 2
# make demo MODEL=golden: a tiny DeepSeek-V4.1. PARALLEL=tp2 or dep2: two devices a worker.
MODEL ?= embedded
PARALLEL ?=

READY := .venv/.ready
RUN := .venv/bin/python
DEMO := $(RUN) -m rackserve demo --model $(MODEL) $(if $(PARALLEL),--parallel $(PARALLEL))

.PHONY: setup demo test lint verify exact swarm bench conformance sanitize clean

setup: $(READY)

demo: $(READY)
	$(DEMO)

# The README's first five minutes, then all tests in JOBS processes.
test: lint
	$(RUN) scripts/first_five_minutes.py
	$(RUN) -m pytest -n $(JOBS) --dist loadfile

lint: $(READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

verify: $(READY)
	$(DEMO) --verify --out runs/verify

exact: $(READY)
	$(DEMO) --serial --out runs/exact

swarm: $(READY)
	$(RUN) -m rackserve swarm --seeds $(SEEDS)

bench: $(READY)
	$(RUN) benchmarks/run.py

# Agents, libraries and harnesses of others, each in a folder under build/conformance, which takes 2 GB of packages once.
# make conformance SUITE="codex pi"; ON_DEMAND=1 adds what takes long.
conformance: $(READY)
	$(RUN) -m conformance $(if $(ON_DEMAND),--on-demand) $(SUITE)

# All tests that call native kernels, with kernels that stop at any access out of bounds and at undefined behaviour, and in memory
# that is NaN until somebody writes to it. NATIVE_TESTS= chooses some.
NATIVE_TESTS := tests/kernels/test_fence.py $(filter-out %/test_build.py,$(wildcard tests/kernels/cpu/test_*.py)) \
  tests/model/test_native.py tests/model/test_mailboxes.py $(wildcard tests/model/deepseek_v41/test_native*.py)

sanitize: export RACKSERVE_KERNELS_BUILT := $(CURDIR)/build/sanitized
sanitize: export ASAN_OPTIONS := detect_leaks=0:malloc_fill_byte=255:max_malloc_fill_size=1000000000
sanitize: export UBSAN_OPTIONS := print_stacktrace=1
sanitize: $(READY)
	$(RUN) -m rackserve.kernels.cpu.build --sanitize
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  $(RUN) -m pytest --capture=sys --timeout 900 $(NATIVE_TESTS)

# Leaves recordings (runs/) and the converted model (~/.cache/rackserve) alone.
clean:
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist

$(READY): pyproject.toml
	@TORCH='$(TORCH)' TORCH_INDEX='$(TORCH_INDEX)' scripts/set_up.sh '$(PYTHON)'
