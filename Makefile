# Everything that is done to this repository, by name. `make` lists it.
#
# Four environments: .venv has all extras but [tflite] and the package editable; .venv-device, .venv-device-litert and
# .venv-device-tflite have the wheel with the extra of one runtime and nothing else, as a device would. `make pythons` adds
# .venv-3.12 and .venv-3.12-device, and the same of 3.13. `make zoo` adds .venv-zoo, which has packages of models and the
# package editable. Each has a stamp file, so that nothing is installed twice.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
PIP_FLAGS ?=
ARGS ?=
WORKERS ?= 2
# Installations and checks run side by side, and each line of output appears when it is written.
PARALLEL := --no-print-directory --jobs $(WORKERS) --output-sync=line
# Files in the order of their folders, so that the run ends with many short ones. xdist would begin with the files of most
# tests, and end with a few long ones on one worker.
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Tests sync thousands of small files, which costs nothing in memory. The largest test needs 4 GiB.
MEMORY := $(shell df -Pm /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 >= 8192 { print "/dev/shm" }')
IN_MEMORY := $(if $(MEMORY),PYTEST_DEBUG_TEMPROOT=$(MEMORY))

# One thread a process: training on the device is bit-exact only so, and the tests run side by side.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of processes. Without bytecode on disk each of them would compile fanin again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
DEVICES := $(VENV)-device $(VENV)-device-litert $(VENV)-device-tflite
CONSTRAINTS := .ci/constraints.txt
# tflite-runtime was built for numpy 1, the last of which knows no newer Python than 3.12.
TFLITE_CONSTRAINTS := .ci/constraints-tflite.txt
ZOO_CONSTRAINTS := .ci/constraints-zoo.txt
ZOO_PACKAGES := neuralforecast segmentation-models-pytorch timm torch-geometric torchaudio torchvision
# Versions of Python that `make pythons` checks: those of the classifiers without that of .venv.
PYTHONS := 3.12 3.13
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
EXTRAS := onnx,litert,server,backup,telemetry,export,datacenter,transformers,plots,parquet,privacy,simulation,ray,flower,dev
ROOTS := server clients edge datacenter protos
# What ruff reads. Other files in the root of a working copy, such as the script of an experiment, are left alone.
LINTED := $(ROOTS) tests examples benchmarks docs .ci README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md pyproject.toml
SOURCES := $(shell find $(ROOTS) -type f -not -path '*/__pycache__/*')
BIN := $(VENV)/bin
# pip installs uv, and uv installs the packages: 10 s instead of 73.
INSTALL := $(BIN)/python .ci/install.py
# Bytecode of all packages, but not of their tests and of the largest parts that nothing here imports. Without it, a first
# import under the tests would raise the warnings that compiling brings. Packages have templates that are no Python, which it
# reports as errors.
UNUSED := tests|pip|mypy|transformers/models|ray/(data|rllib|serve)|torch/testing|jax/experimental|jaxlib/mlir|scipy/stats
COMPILE := -m compileall -q -j 0 -x '/($(UNUSED))/'
STAMPS := $(DEVICES:%=%/.installed)

.PHONY: help
help: ## this list
	@echo "fanin: make TARGET [ARGS=...] [PYTHON=...] [PIP_FLAGS=...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.installed $(VENV)-device/.installed ## the whole loop on this machine; ARGS="--rounds 3" for its flags
	$(BIN)/fanin demo $(ARGS)

.PHONY: quick
quick: $(VENV)/.installed ## form, types, imports and the light tests: in about half a minute, without torch or device environments
	@$(MAKE) $(PARALLEL) types light lint imports

.PHONY: test
test: ## every gate and every test but the nightly ones
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=none lint types suite imports

# Lint and types need no device environment. An error of form appears before the tests start, and the other gates run in
# parallel with them: the workers of the tests wait for other processes an eighth of the time.
.PHONY: suite
suite: $(VENV)/.installed $(STAMPS)
	$(IN_MEMORY) $(BIN)/pytest $(SPREAD) -m "not nightly" $(ARGS)

# The long tests wait for other processes more than the others do. Three workers keep two cores busy.
.PHONY: nightly
nightly: WORKERS := 3
nightly: ## the tests that are too long for every change, all property tests on many new examples, other Pythons
	@$(MAKE) $(PARALLEL) $(VENV)/.installed $(VENV)/.docs $(VENV)/.browser $(VENV)-zoo/.installed $(STAMPS)
	$(IN_MEMORY) $(BIN)/pytest $(SPREAD) -m "nightly or hypothesis" --hypothesis-profile nightly $(ARGS)
	@$(MAKE) --no-print-directory pythons newest

# Each version has environments of its own. The last lines name the result of every version, also of one that is not here.
.PHONY: pythons
pythons: ## on Python 3.12 and 3.13, if they are here: the light tests, README with the demo, a federation of processes
	@results=; for version in $(PYTHONS); do \
	    python=; \
	    for each in python$$version $$(ls -dvr $(PYENV)/$$version.*/bin/python$$version 2> /dev/null || true); do \
	        python=$$("$$each" -c 'import sys; print(sys.executable)' 2> /dev/null) && break; \
	    done || true; \
	    if [ -n "$$python" ]; then \
	        $(MAKE) --no-print-directory VENV=.venv-$$version PYTHON="$$python" on-python; \
	        results+="Python $$version: passed ($$python)\n"; \
	    else \
	        results+="Python $$version: SKIPPED: no python$$version on PATH or in $(PYENV); install it\n"; \
	    fi; \
	done; printf "$$results"

# pip takes the newest packages that pyproject.toml allows, and not those of CONSTRAINTS, which the other tests run on. torch
# stays as it is: the newest one would bring gigabytes of CUDA. flwr is left out, which keeps others from their newest.
.PHONY: newest
newest: ## the light tests with the newest package of every range in pyproject.toml, as a user's pip takes them
	@mkdir -p build && grep '^torch==' $(CONSTRAINTS) > build/newest.txt
	$(MAKE) --no-print-directory VENV=.venv-newest CONSTRAINTS=build/newest.txt \
	    EXTRAS=onnx,litert,server,backup,telemetry,export,plots,parquet,privacy,simulation,dev light

# What proves most in minutes. README runs a simulation, and the demo with devices that have the wheel and one runtime. The
# tutorial runs a coordinator over TLS and two devices on onnxruntime.
.PHONY: on-python
on-python: $(VENV)/.installed $(VENV)-device/.installed light
	$(IN_MEMORY) $(BIN)/pytest -q tests/stories/test_pages.py -k "README or first-federation"

.PHONY: light
light: $(VENV)/.installed ## the tests that need neither torch nor a device environment nor a process
	$(IN_MEMORY) $(BIN)/pytest $(SPREAD) --light -q --ignore tests/stories $(ARGS)

.PHONY: kills
kills: $(VENV)/.installed ## a coordinator killed before and after every effect, and in every state of a Run
	$(BIN)/pytest -n $(WORKERS) tests/stories/test_every_kill.py tests/stories/test_killed_ledgers.py tests/stories/test_killed_measurements.py tests/stories/test_kills.py $(ARGS)

.PHONY: resume
resume: $(VENV)/.installed ## transfers that go on after a kill of either side, and Updates over 2 GB
	$(BIN)/pytest tests/stories/test_resume.py tests/stories/test_large_transfers.py $(ARGS)

.PHONY: flower
flower: $(VENV)/.installed ## FedAvg and strategies against Flower's on the same Updates
	$(BIN)/pytest tests/twins/test_flower.py tests/twins/test_flower_strategies.py $(ARGS)

.PHONY: parity
parity: $(VENV)/.installed ## meshes of four and eight ranks, and every schedule, against one process
	$(BIN)/pytest tests/parallel/test_matrix.py -m "not nightly" $(ARGS)

.PHONY: gpu
gpu: $(VENV)/.installed ## the tests that need a GPU: train steps of simulations and of jobs, against the CPU
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(BIN)/pytest -n $(WORKERS) tests/gpu $(ARGS)

.PHONY: bench
bench: $(VENV)/.installed $(STAMPS) ## speed and memory against benchmarks/records.json; status 3 on a busy machine
	$(BIN)/python benchmarks/ratchet.py $(ARGS)

.PHONY: zoo
zoo: $(VENV)/.installed $(VENV)-zoo/.installed $(STAMPS) ## models of public packages: export, train steps, int8; rows in build/
	@mkdir -p build
	$(BIN)/python benchmarks/zoo.py --json build/zoo.jsonl $(ARGS)

.PHONY: bench-peers
bench-peers: $(VENV)/.installed ## the same Rounds by Flower and NVFlare, in environments of their own
	$(BIN)/python benchmarks/peers/compare.py $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(VENV)/.installed ## tokens a second and MFU of a training job on one GPU
	$(BIN)/python benchmarks/datacenter_gpu.py $(ARGS)

.PHONY: docs
docs: $(VENV)/.docs ## the site of the docs, in build/site; a warning is an error
	$(BIN)/python docs/build.py

.PHONY: lint
lint: $(VENV)/.installed ## ruff: form and rules
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/ruff check $(LINTED)

.PHONY: types
types: $(VENV)/.installed ## mypy, strict
	$(BIN)/mypy

.PHONY: imports
imports: $(VENV)/.installed ## who may import whom
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: $(VENV)/.installed ## write the form that lint asks for
	$(BIN)/ruff format $(LINTED)
	$(BIN)/ruff check --fix $(LINTED)

.PHONY: protos
protos: $(VENV)/.installed ## generated code anew from protos/fanin/v1/*.proto
	$(BIN)/python tests/golden/protos.py

.PHONY: protos-release
protos-release: $(VENV)/.installed ## at a release: what later wire changes are compared with
	$(BIN)/python tests/golden/protos.py --release

.PHONY: constraints
constraints: $(VENV)/.installed ## the tested versions anew from .venv
	{ grep '^#' $(CONSTRAINTS); $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//'; } > $(CONSTRAINTS).new
	mv $(CONSTRAINTS).new $(CONSTRAINTS)

.PHONY: venv
venv: $(VENV)/.installed ## .venv: all extras, the package editable
	@# mypy reads all libraries in its first run. Later runs, as in `make quick`, find its cache.
	@$(BIN)/mypy > /dev/null || true

.PHONY: devices
devices: $(STAMPS) ## .venv-device, -litert and -tflite: the wheel with one runtime and nothing else

.PHONY: wheel
wheel: dist/.built ## the wheel, in dist/

.PHONY: clean
clean: ## remove the environments, what was built and the caches
	rm -rf $(VENV) $(VENV)-zoo $(VENV)-newest $(DEVICES) $(PYTHONS:%=.venv-%) $(PYTHONS:%=.venv-%-device) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What builds the wheel: enough for the device environments to be made while the rest is installed.
$(VENV)/.tools: $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"fanin: got Python {sys.version.split()[0]}, expected 3.11 or newer; name one: make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile $(PIP_FLAGS) -c $(CONSTRAINTS) build hatchling uv
	@touch $@

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/.tools
	@echo "$(VENV): installing (the first time takes minutes: torch is large)"
	$(INSTALL) $(VENV) $(PIP_FLAGS) -c $(CONSTRAINTS) -e ".[$(EXTRAS)]"
	@$(BIN)/python $(COMPILE) $(VENV)/lib > /dev/null || true
	@touch $@

# The tools of the site are in the same environment, since the pages of commands are made by running them. `make test`
# does without.
$(VENV)/.browser: pyproject.toml $(CONSTRAINTS) | $(VENV)/.installed
	$(INSTALL) $(VENV) $(PIP_FLAGS) -c $(CONSTRAINTS) -e ".[browser]"

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(VENV)/.installed
	$(INSTALL) $(VENV) $(PIP_FLAGS) -c $(CONSTRAINTS) -e ".[docs]"
	@touch $@

$(VENV)-zoo/.installed: pyproject.toml $(CONSTRAINTS) $(ZOO_CONSTRAINTS) | $(VENV)/.tools
	@test -x $(VENV)-zoo/bin/python || $(PYTHON) -m venv --without-pip $(VENV)-zoo
	$(INSTALL) $(VENV)-zoo $(PIP_FLAGS) -c $(CONSTRAINTS) -c $(ZOO_CONSTRAINTS) -e ".[export,transformers]" $(ZOO_PACKAGES)
	@touch $@

dist/.built: $(SOURCES) README.md LICENSE pyproject.toml | $(VENV)/.tools
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	@touch $@

$(VENV)-device/.installed: private EXTRA := onnx
$(VENV)-device-litert/.installed: private EXTRA := litert
$(VENV)-device-tflite/.installed: private EXTRA := tflite
$(VENV)-device-tflite/.installed: private CONSTRAINTS := $(TFLITE_CONSTRAINTS)

# The first command brings what the wheel needs, the second the wheel itself even if its version is the same.
$(STAMPS): %/.installed: dist/.built $(CONSTRAINTS) $(TFLITE_CONSTRAINTS)
	@test -x $*/bin/python || $(PYTHON) -m venv --without-pip $*
	@echo "$*: installing the wheel with [$(EXTRA)]"
	$(INSTALL) $* $(PIP_FLAGS) -c $(CONSTRAINTS) "$$(ls dist/fanin-*.whl)[$(EXTRA)]"
	$(INSTALL) $* $(PIP_FLAGS) --force-reinstall --no-deps dist/fanin-*.whl
	@$*/bin/python $(COMPILE) $*/lib > /dev/null || true
	@touch $@
