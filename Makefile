# The project's verbs. Nothing is needed but make and python3 >= 3.11 with venv; everything else goes into .venv.
#
#   make serve [MODEL=hub/id or folder] [HOST=0.0.0.0] [PORT=3000] [ARGS="more launcher flags"]
#   make test  [ARGS="-k words"]      make t T=path [ARGS=…]      make test-long    make test-wheel
#   make test-oldest, test-newest [VERSIONS=folder] [T=path] [ARGS=…]
#   make test-clients [CLIENTS=folder] make test-real [REAL_MODELS=folder] [LLAMA_CPP=folder of programs]
#   make check                        make fmt                        make attacks [ARGS="-k name"]
#   make bench [NAME=…]               make proof [SUITE=name]
#   make gpu-check [ARGS="--only …"]  make gpu-pack
#   make setup [DEV=dev-all]          make proto    make docs    make site    make release-check [DIST=folder]
#
# DEV names the extras of pyproject.toml to install for tests: dev, or dev-all, which adds Triton, Ray and Go (1.6 GB).
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch from there; without it from pip's own index.

PYTHON ?= python3
MODEL ?=
HOST ?= 127.0.0.1
PORT ?= 3000
ARGS ?=
SUITE ?= $(PART)
PART ?=
T ?= tests
DEV ?= dev
TORCH_INDEX ?=
DIST ?=
CLIENTS ?= $(HOME)/.cache/lorikeet-clients
REAL_MODELS ?= $(HOME)/.cache/lorikeet-real
VERSIONS ?= $(HOME)/.cache/lorikeet-versions
VENV := .venv
PY := $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check
# pyproject.toml names the versions that are allowed, CONSTRAINTS those of them that are installed here.
CONSTRAINTS := constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup serve test t test-long test-oldest test-newest test-wheel test-clients test-real check fmt attacks bench proof gpu-check \
        gpu-pack release-check proto docs site clean

help:
	@sed -n '2,15s/^# \{0,1\}//p' Makefile

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Lorikeet needs Python 3.11 or newer as $(PYTHON): install one (Debian, Ubuntu: apt-get install python3 python3-venv) or run make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv; Fedora: dnf install python3-pip)" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# pip prints nothing while it writes files, which takes minutes on a busy machine: a line each 30 seconds.
WITH_PROGRESS = (while sleep 30 > /dev/null 2>&1 && kill -0 $$$$ 2> /dev/null; do echo "still installing"; done) & ticks=$$!; trap 'kill $$ticks' EXIT;

# What serving needs. torch is installed first, because TORCH_INDEX applies to it alone.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing what serving needs into $(VENV) (the first time takes a few minutes)"
	@$(WITH_PROGRESS) $(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --constraint $(CONSTRAINTS) torch
	@$(WITH_PROGRESS) $(PIP) install --constraint $(CONSTRAINTS) -e .
	@touch $@

# What tests and checks need in addition.
$(VENV)/.installed-$(DEV): $(VENV)/.installed
	@echo "installing what tests and checks need into $(VENV)"
	@$(PIP) install --constraint $(CONSTRAINTS) -e '.[$(DEV)]'
	@touch $@

setup: $(VENV)/.installed-$(DEV)

serve: $(VENV)/.installed
	@exec $(VENV)/bin/lorikeet-launcher --hostname $(HOST) --port $(PORT) --speculative-tokens 3 $(if $(MODEL),--model-id $(MODEL)) $(ARGS)

# Two tests more than cores, because tests wait for processes, and one thread per test: their models are too small to share threads.
WORKERS = $$($(PY) -c 'import os; print(min(6, len(os.sched_getaffinity(0)) + 2))')
# Python keeps compiled files, even where PYTHONDONTWRITEBYTECODE is set: to compile the tests takes each worker 15 seconds.
test t test-long: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-$(DEV)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# A focused run in one process: make t T=tests/shard/engine ARGS="-k memory"
t: $(VENV)/.installed-$(DEV)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(T) $(ARGS)

test-long: $(VENV)/.installed-$(DEV)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --maxprocesses 4 --dist worksteal -m 'long or device' $(ARGS)

# The oldest and the newest versions that pyproject.toml allows, by the constraints in tests/versions, each in an environment below VERSIONS, which is kept.
test-oldest test-newest: PY = $(VERSIONS)/$(@:test-%=%)/bin/python
test-oldest test-newest: export PYTHONDONTWRITEBYTECODE =
test-oldest test-newest: test-%: tests/versions/%.txt
	test -x $(PY) || $(PYTHON) -m venv $(VERSIONS)/$*
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --constraint $< torch
	$(PIP) install --constraint $< --editable '.[dev,dev-kernels]'
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile $(T) $(ARGS)

# Attackers next to another user, at full size, and faults of a server: 28 minutes, and a table at the end. ATTACK_SECONDS=10 takes 8.
attacks: $(VENV)/.installed-$(DEV)
	OMP_NUM_THREADS=1 $(PY) -m pytest -s -m "long or not long" tests/attacks -k "canary_next_to or test_faults" $(ARGS)

test-wheel: $(VENV)/.installed-$(DEV)
	$(PY) -m pytest -m wheel tests/test_wheel.py $(ARGS)

# Published clients, each in an environment of its own below CLIENTS, which is kept.
test-clients: $(VENV)/.installed-$(DEV)
	LORIKEET_CLIENTS=$(CLIENTS) $(PY) -m pytest -m clients tests/clients $(ARGS)

# Real models, from packages that hold them, in a folder outside the tree, which is kept. REAL_RESULTS=tests/real/results.json
# keeps the figures of docs/quantization.md, which `make docs` writes.
test-real: $(VENV)/.installed-$(DEV)
	REAL_MODELS=$(REAL_MODELS) LLAMA_CPP=$(LLAMA_CPP) REAL_RESULTS=$(REAL_RESULTS) OMP_NUM_THREADS=1 \
	  $(PY) -m pytest -n 2 --dist loadfile -m real -o faulthandler_timeout=3600 tests/real $(ARGS)

check: $(VENV)/.installed-$(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m pytest -q -p no:cacheprovider tests/test_layering.py

fmt: $(VENV)/.installed-$(DEV)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Lists the tools of benchmarks; `make bench NAME=kernels.tune` runs one.
bench: $(VENV)/.installed-$(DEV)
	$(PY) -m benchmarks$(if $(NAME),.$(NAME)) $(ARGS)

proof: $(VENV)/.installed-$(DEV)
	$(PY) -m benchmarks.proof $(if $(SUITE),--suite $(SUITE)) $(ARGS)

# Is the project right and fast on the card at hand: one table after a few minutes. make gpu-check ARGS="--only kernels --out folder"
gpu-check: $(VENV)/.installed-$(DEV)
	$(PY) -m benchmarks.cuda.check $(ARGS)

# Wheels and compiled kernels for a machine with a card and without network: benchmarks/cuda/check/packed.sh uses them there.
gpu-pack: $(VENV)/.installed-dev-all
	$(PY) -m benchmarks.cuda.check.pack $(ARGS)

# Builds the wheel unless DIST has one, and does with a local index what a release does with PyPI.
release-check: $(VENV)/.installed-dev-all
	.ci/release-check $(VENV)/bin $(DIST)

proto: $(VENV)/.installed-$(DEV)
	$(PY) -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src lorikeet/proto/shard.proto

docs: $(VENV)/.installed
	$(PY) -m tests.docs.pages.errors > docs/reference/errors.md
	$(PY) -m tests.docs.pages.wire > docs/reference/wire.md
	$(PY) -m tests.docs.pages.launcher > docs/launcher.md
	$(PY) -m tests.docs.pages.fields > docs/fields.md
	$(PY) -m tests.docs.pages.metrics > docs/reference/metrics.md
	$(PY) -m tests.docs.pages.draft_sources > docs/reference/draft-sources.md
	$(PY) -m tests.real.results
	$(PY) deploy/monitoring/dashboards.py

# The documentation as a site, in build/site.
site: docs $(VENV)/.installed
	@$(PIP) install --constraint $(CONSTRAINTS) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
