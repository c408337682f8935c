# Every target makes .venv itself, with pinned packages; once made, that costs a hash.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test check lint format bench bench-kernels bench-step bench-hf bench-lightning simulate soak venv-demo venv-dev pins clean

PYTHON ?= python3
RUN := .venv/bin/python
json = $(if $(JSON),--json '$(JSON)')

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: venv-demo  ## Train together from a directory, with a kill and a late join: JSON=FILE SEEDS=0,1,2 ARGS='...'.
	$(RUN) -m gradientmail_core.cli.main demo $(json) $(if $(SEEDS),--seeds '$(SEEDS)') $(ARGS)

test: lint  ## Everything a change must pass: lint, types, layers, size rules, tests. ARGS='-k name'.
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

check: lint  ## The same without the tests that run the library.
	$(RUN) -m pytest -q tests/test_layers.py tests/test_tidy.py tests/test_readme.py

lint: venv-dev
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: venv-dev  ## Rewrite the sources in the project's format.
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

bench: bench-kernels bench-step bench-hf bench-lightning  ## All benchmarks.

bench-step: venv-dev  ## What a session adds to an optimizer step: JSON=FILE.
	$(RUN) benchmarks/session_step.py $(json)

bench-hf: venv-dev  ## What the callback adds to a step of the Hugging Face Trainer: JSON=FILE.
	$(RUN) benchmarks/hf_overhead.py $(json) $(ARGS)

bench-lightning: venv-dev  ## What the Lightning strategy adds to a training step of 20 ms: JSON=FILE.
	$(RUN) benchmarks/lightning_overhead.py $(json)

simulate: venv-dev  ## Random runs with every fault, judged: SEEDS=1000 JSON=FILE.
	$(RUN) -m gradientmail_core.sim --seeds $(or $(SEEDS),1000) $(json) $(ARGS)

bench-kernels: venv-dev  ## Arithmetic beside one memory copy: JSON=FILE.
	$(RUN) benchmarks/kernels.py $(json) $(ARGS)

soak: venv-dev  ## The slow tests, ten times over.
	for round in {1..10}; do echo "soak round $$round of 10"; $(RUN) -m pytest -q -m 'slow or soak' $(ARGS); done

venv-demo:
	@$(PYTHON) scripts/environment.py demo

venv-dev:
	@$(PYTHON) scripts/environment.py dev

pins: venv-dev  ## Write requirements/*.txt from what .venv holds.
	$(RUN) scripts/pins.py

clean:  ## Remove .venv and every cache.
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
