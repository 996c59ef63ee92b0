# The project's verbs. Nothing is needed but make and python3 >= 3.11 with venv; everything else goes into .venv.
#
#   make serve [MODEL=hub/id or folder] [PORT=8080] [ARGS="more launcher flags"]
#   make test  [ARGS="-k words"]      make check     make fmt
#   make bench [NAME=…]               make proof [SUITE=name]     make bench-cuda [SUITE=name]
#   make setup                        make proto    make docs
#
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch from there; without it from pip's own index.

PYTHON ?= python3
MODEL ?=
PORT ?= 8080
ARGS ?=
SUITE ?= $(PART)
PART ?=
TORCH_INDEX ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# One place names the versions: pyproject.toml.
TORCH_PIN = $$(sed -n 's/^ *"\(torch[<>=!~].*\)",/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help setup serve test check fmt bench proof bench-cuda proto docs clean

help:
	@sed -n '2,9s/^# \{0,1\}//p' Makefile

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Lorikeet needs Python 3.11 or newer as $(PYTHON): install one (Debian, Ubuntu: apt-get install python3 python3-venv) or run make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv; Fedora: dnf install python3-pip)" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# What serving needs. torch goes first, so that TORCH_INDEX decides about it alone.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing what serving needs into $(VENV) (the first time takes a few minutes)"
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH_PIN)"
	@$(PIP) install -e .
	@touch $@

# What work on the project needs besides.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests and checks need into $(VENV)"
	@$(PIP) install -e '.[dev]'
	@touch $@

setup: $(VENV)/.installed-dev

serve: $(VENV)/.installed
	@exec $(VENV)/bin/lorikeet-launcher --port $(PORT) --speculative-tokens 3 $(if $(MODEL),--model-id $(MODEL)) $(ARGS)

# A test at a time on each core, and one thread for each: models of tests are far too small to share.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --maxprocesses 4 --dist worksteal $(ARGS)

check: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m pytest -q -p no:cacheprovider tests/test_layering.py

fmt: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Lists the benchmarks; `make bench NAME=serving.start` runs one.
bench: $(VENV)/.installed-dev
	$(PY) -m benchmarks$(if $(NAME),.$(NAME)) $(ARGS)

proof: $(VENV)/.installed-dev
	$(PY) -m benchmarks.proof $(if $(SUITE),--suite $(SUITE)) $(ARGS)

bench-cuda: $(VENV)/.installed-dev
	$(PY) -m benchmarks.cuda $(if $(SUITE),--suite $(SUITE)) $(ARGS)

proto: $(VENV)/.installed-dev
	$(PY) -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src lorikeet/proto/shard.proto

docs: $(VENV)/.installed
	$(PY) -m lorikeet.launcher.config.reference > docs/launcher.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
