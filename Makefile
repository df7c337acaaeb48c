# make demo      compile, run and check one GEMM, with or without a GPU
# make test      run the tests of some five minutes on two cores; where there is no GPU, test files run side by side, in up to four
#                processes
# make test-all  run all tests, also those that are marked long: they compile every kernel, and compare it with the record
# make lint      ruff and mypy
# make docs      build docs/_build/html; warnings are errors
# make dist      build the source distribution and the wheel in dist/, and check both with twine
# make wheel-with-kernels  build in dist/kernels/ the wheel that holds compiled kernels: some 14 minutes on two cores, no GPU;
#                KERNELS=DIRECTORY keeps the compiled kernels there, for the next build
# make shipped-calls  draw 20,000 calls for each GPU model, and fail if the wheel would lack the kernel of one: some two minutes
# make faults    repeat the cache's tests of faults and of many processes, COUNT=20 times; stops at the first failure
# make bench     on a GPU: record benchmarks/results of FP8 and BF16, draw README's chart, fill its tables; BUDGET=900 bounds the
#                seconds of each mode; DEEPGEMM=DIRECTORY also times the DeepGEMM that pip install --target put there
# make sanitize  on a GPU: run kernels of every kind under compute-sanitizer, which it installs; some 4 minutes
# make readme    fill the generated parts of README.md and docs/, and draw its chart, from benchmarks/results and the settings
# make clean     remove .venv
#
# All create .venv if it is missing. Variables: PYTHON=python3.12 picks the interpreter; INSTALL=wheel tests the built wheel instead
# of the source tree; BOOTSTRAP_ARGS are passed to .ci/bootstrap.py; PARALLEL= runs test files one after the other; PYTEST_ARGS are
# passed to pytest.

PYTHON ?= python3
VENV ?= .venv
INSTALL ?= editable
PYTEST_ARGS ?=
BOOTSTRAP_ARGS ?=
# One process more than there are cores, since some tests wait, but four at most.
PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 1))')
PARALLEL ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),,-n $(PROCESSES) --dist loadfile)
XDIST := $(if $(PARALLEL),--xdist)
BUDGET ?= 600
COUNT ?= 20
FAULTS := unit/test_cache.py unit/test_cache_limit.py unit/test_cache_maintenance.py \
	unit/test_builder.py unit/test_fork.py unit/test_process.py compile/test_builder_processes.py \
	compile/test_builder_faults.py compile/test_builder_compilers.py compile/test_signals.py \
	compile/test_next_compiler.py compile/test_foreign_paths.py unit/test_cache_whole.py unit/test_cache_owners.py \
	unit/test_cache_locks.py unit/test_tuner_store.py unit/test_solid.py
RUN := $(abspath $(VENV))/bin/python
STAMP := $(VENV)/.installed-$(INSTALL)$(XDIST)

.PHONY: demo test test-all bench faults sanitize lint dist wheel-with-kernels shipped-calls docs readme clean FORCE

# From another directory, so that what is imported is what is installed.
demo: $(STAMP)
	cd tests && $(RUN) -m deep_gemm demo

# Without a GPU, tests/gpu would only be collected, in each process.
test: SELECT := -m "not long" unit compile $(if $(PARALLEL),,gpu)
test-all: SELECT := unit compile gpu
test-all test: $(STAMP)
	cd tests && $(RUN) -m pytest $(SELECT) $(PARALLEL) $(PYTEST_ARGS)

faults: $(STAMP)
	cd tests && for run in $$(seq $(COUNT)); do \
		$(RUN) -m pytest -q $(FAULTS) $(PYTEST_ARGS) || { echo "run $$run of $(COUNT) failed"; exit 1; }; \
		echo "$$run of $(COUNT) runs passed"; \
	done

lint: INSTALL := wheel
lint:
	$(PYTHON) .ci/bootstrap.py --venv $(VENV) --mode wheel --lint
	rm -f $(VENV)/.installed-*
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	cd tests && $(RUN) -m mypy --config-file ../pyproject.toml -p deep_gemm

# The wheel is built from the unpacked source distribution, so a file that the latter leaves out is missing in both.
dist:
	$(PYTHON) .ci/bootstrap.py --venv $(VENV) --mode $(INSTALL) --dist
	rm -rf dist $(VENV)/.installed-*
	$(RUN) -m build --no-isolation
	$(RUN) -m twine check --strict dist/*

wheel-with-kernels:
	$(PYTHON) .ci/bootstrap.py --venv $(VENV) --mode $(INSTALL) --dist
	rm -f $(VENV)/.installed-*
	$(RUN) .ci/wheel_with_kernels.py $(if $(KERNELS),--cache $(KERNELS))

shipped-calls: $(STAMP)
	cd tests && $(RUN) shipped_calls.py

sanitize:
	$(PYTHON) .ci/bootstrap.py --venv $(VENV) --mode $(INSTALL) --sanitizer
	rm -f $(VENV)/.installed-*
	$(RUN) tests/sanitizer.py

# Each row is on disk as soon as it is measured, so an interrupted run loses nothing.
bench: THEIRS = $(if $(DEEPGEMM),--deepgemm $(DEEPGEMM))
bench: $(STAMP)
	rm -f benchmarks/results/reference.jsonl benchmarks/results/random.jsonl benchmarks/results/costs.jsonl \
		benchmarks/results/bf16.jsonl
	$(RUN) -m deep_gemm bench $(THEIRS) --mode flush --mode graph --set public --seconds $(BUDGET) --output benchmarks/results/reference.jsonl
	$(RUN) -m deep_gemm bench $(THEIRS) --mode steady --set steady --seconds $(BUDGET) --output benchmarks/results/reference.jsonl
	$(RUN) -m deep_gemm bench $(THEIRS) --op bf16_gemm_nt --mode flush --mode graph --set public --random 30 --seconds $(BUDGET) \
		--output benchmarks/results/bf16.jsonl
	for form in nn tn tt; do $(RUN) -m deep_gemm bench $(THEIRS) --op bf16_gemm_$$form --set public --m 4096 --seconds $(BUDGET) \
		--output benchmarks/results/bf16.jsonl; done
	$(RUN) -m deep_gemm bench $(THEIRS) --op bf16_gemm_tn --output-dtype f32 --accumulate --set public --m 4096 --seconds $(BUDGET) \
		--output benchmarks/results/bf16.jsonl
	$(RUN) -m deep_gemm bench --random 60 --mode flush --mode graph --mode steady --seconds $(BUDGET) --output benchmarks/results/random.jsonl
	$(RUN) benchmarks/selection.py benchmarks/results/selection.jsonl
	$(RUN) benchmarks/costs.py benchmarks/results/costs.jsonl
	$(RUN) benchmarks/readme.py
	$(RUN) benchmarks/doc_charts.py

# Both read the source tree, so that the install is editable.
docs: DO = cd docs && $(RUN) -m sphinx -n -W --keep-going -q -b html . _build/html
readme: DO = $(RUN) benchmarks/readme.py && $(RUN) benchmarks/doc_charts.py
docs readme:
	$(PYTHON) .ci/bootstrap.py --venv $(VENV) --docs $(BOOTSTRAP_ARGS)
	rm -f $(VENV)/.installed-*
	touch $(VENV)/.installed-editable
	$(DO)

# An editable install is made once; a wheel is built anew each time, since it must hold the sources of now.
$(VENV)/.installed-editable$(XDIST): pyproject.toml constraints.txt .ci/bootstrap.py
	$(PYTHON) .ci/bootstrap.py --venv $(VENV) $(XDIST) $(BOOTSTRAP_ARGS)
	rm -f $(VENV)/.installed-*
	touch $@

$(VENV)/.installed-wheel$(XDIST): FORCE
	$(PYTHON) .ci/bootstrap.py --venv $(VENV) --mode wheel $(XDIST) $(BOOTSTRAP_ARGS)
	rm -f $(VENV)/.installed-*

clean:
	rm -rf $(VENV)
