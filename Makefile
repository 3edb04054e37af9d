# Needs Python 3.11 or newer and make; everything else goes into a virtual environment of its own in .venv.
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
MEGATRON ?= megatron-core==0.16.1
NEMO ?= nemo-toolkit[lightning]==2.7.3 megatron-core==0.15.3
MINUTES ?= 10
WORKERS ?= 2
NCCL ?= build/nccl/2.27.5/libnccl.so.2
PYTHON_GPU ?= python
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
SHOW := $(VENV)/.show
READY := $(VENV)/.ready
MEGATRON_VENV := build/megatron
NEMO_VENV := build/nemo
SHOWN := plugins/init_gloo plugins/state_replica
PROJECTS := $(wildcard plugins/*/pyproject.toml examples/*/pyproject.toml)
CHECKED := core plugins tests examples benchmarks docs
TYPED := core plugins tests

.PHONY: help venv demo test test-megatron test-nemo test-nccl test-gpu bench stress sim docs lint format clean
.DEFAULT_GOAL := help

help:  ## show these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

venv: $(READY)  ## make the virtual environment

# Torch comes first and pinned, so that no later requirement can choose another one.
$(SHOW): pyproject.toml $(SHOWN:%=%/pyproject.toml) Makefile
	@echo "Setting up $(VENV), once. First torch:"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	@echo "instep and the two plugins that it needs to recover:"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch]' $(SHOWN:%=-e %)
	@touch $@

$(READY): $(SHOW) $(PROJECTS)
	@echo "Setting up $(VENV), once. All plugins, linters, what the tests compare with (two minutes):"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch,dev]' $(PROJECTS:%/pyproject.toml=-e %)
	@touch $@

demo: $(SHOW)  ## train a small GPT on 4 ranks through four faults, and compare with a run without any
	$(BIN)/python examples/demo.py $(ARGS)

# Most of a test's time goes by in waiting for others. All tests of a file stay in one process, where they share what they prepare; the
# longest files come first (`testpaths`), so that no process is left alone with one.
test: $(READY) $(NCCL)  ## run the tests (ARGS='-k plan' for some of them, ARGS='-m full' for the whole fault matrix)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The library alone is kept of the wheel's 300 MB: NCCL's ids and roots need no GPU. `make test NCCL=` skips their tests.
build/nccl/%/libnccl.so.2: | $(READY)
	@$(BIN)/python plugins/init_nccl/tests/fetch.py nvidia-nccl-cu12==$*

test-nccl: $(READY)  ## test against NCCL 2.27.5 and the newest release, which are downloaded into build/nccl
	$(BIN)/python plugins/init_nccl/tests/fetch.py nvidia-nccl-cu12==2.27.5 nvidia-nccl-cu13
	$(BIN)/python -m pytest plugins/init_nccl/tests/test_roots.py plugins/init_nccl/tests/test_store.py $(ARGS)

test-gpu:  ## run what needs a GPU, with the python of an environment that has a CUDA build of torch: PYTHON_GPU=...
	$(PYTHON_GPU) -m pytest -m gpu plugins/init_nccl/tests plugins/lightning/tests $(ARGS)

# An environment of its own, so that it can be another version of Megatron, with what that one needs: MEGATRON=megatron-core==0.15.3.
$(MEGATRON_VENV)/.ready: pyproject.toml $(PROJECTS) Makefile
	@echo "Setting up $(MEGATRON_VENV), once: this takes a minute or two."
	@$(PYTHON) -m venv $(MEGATRON_VENV)
	@$(MEGATRON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "$(MEGATRON)" einops
	@$(MEGATRON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch,testing]' -e plugins/init_gloo -e plugins/state_replica
	@touch $@

test-megatron: $(MEGATRON_VENV)/.ready  ## kill every rank before and after every collective of megatron-core, in every layout: half an hour and more
	$(MEGATRON_VENV)/bin/python -m pytest plugins/state_replica/tests/mcore -m 'full or not full' $(ARGS)

# NeMo's own requirements leave open what its LLM collection imports, and the newest releases of that do not go together.
$(NEMO_VENV)/.ready: plugins/nemo/tests/requirements.txt pyproject.toml $(PROJECTS) Makefile
	@echo "Setting up $(NEMO_VENV), once: this takes ten minutes and 2.5 GB."
	@$(PYTHON) -m venv $(NEMO_VENV)
	@$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "numpy<2"
	@$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(foreach package,$(NEMO),"$(package)") "$(TORCH)" -r plugins/nemo/tests/requirements.txt
	@$(NEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c plugins/nemo/tests/requirements.txt -e '.[torch,testing]' \
		-e plugins/init_gloo -e plugins/state_replica -e plugins/mmap_loader -e plugins/lightning -e plugins/nemo
	@touch $@

test-nemo: $(NEMO_VENV)/.ready  ## kill ranks in every part of a training of NVIDIA NeMo: builds an environment of 2.5 GB, half an hour
	$(NEMO_VENV)/bin/python -m pytest plugins/nemo/tests $(ARGS)

bench: $(READY)  ## run every benchmark
	$(BIN)/python benchmarks/recovery_time.py $(ARGS)
	$(BIN)/python benchmarks/comm_init.py $(ARGS)
	$(BIN)/python benchmarks/healthy_overhead.py $(ARGS)
	$(BIN)/python benchmarks/loader.py $(ARGS)
	$(BIN)/python benchmarks/plan_scale.py $(ARGS)
	$(BIN)/python benchmarks/bootstrap_scale.py $(ARGS)
	$(BIN)/python benchmarks/restore.py $(ARGS)
	$(BIN)/python benchmarks/buddy_overhead.py $(ARGS)

stress: $(READY)  ## random faults for MINUTES, seeds printed
	$(BIN)/python -m tests.recovery.stress --minutes $(MINUTES) $(ARGS)

sim: $(READY)  ## 200,000 simulated jobs with every kind of fault (ARGS='--seed N --trace' shows one)
	$(BIN)/python -m instep.testing.simulator --seeds 200000 $(ARGS)

# The tools of the site come into .venv here, not with the rest, so that the tests wait for fewer downloads.
$(VENV)/.docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## build the documentation into site/ and check every link in it (ARGS='--dirty', or see it: .venv/bin/mkdocs serve)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

lint: $(READY)  ## ruff and mypy --strict
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy --strict $(TYPED)

format: $(READY)  ## let ruff sort imports and format
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
	find core plugins tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
