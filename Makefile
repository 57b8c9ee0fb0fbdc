# Few targets, the same in CI. Everything runs in .venv, made on first use.
PY ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo up test check proto bench docs

$(BIN)/.installed: pyproject.toml
	$(PY) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(BIN)/.installed  ## start the stack, run the main job, stop
	$(BIN)/kvspd demo

up: $(BIN)/.installed  ## keep the stack running in the foreground
	$(BIN)/kvspd up

test: $(BIN)/.installed
	$(BIN)/pytest -n 2

check: $(BIN)/.installed  ## style, types, floors, stale generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/generate.py --check

proto docs: $(BIN)/.installed  ## regenerate kvsp/v1, docs/openapi.json, docs/conformance.md
	$(BIN)/python tools/generate.py

bench: $(BIN)/.installed
	$(BIN)/python -m benchmarks
