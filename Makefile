# Everything a fresh machine needs: `make quickstart` runs the main job, `make test` checks the tool.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: quickstart test test-all lint typecheck install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/python -m lmtools.quickstart quickstart

test: install lint typecheck
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff format --check lmtools tests benchmarks
	$(BIN)/ruff check lmtools tests benchmarks
	$(BIN)/lint-imports --no-cache

typecheck: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) quickstart .pytest_cache .mypy_cache .ruff_cache
