# Each target makes what it needs first: a virtual environment in .venv, and packages of Debian or Ubuntu where missing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

export NO_MKDOCS_2_WARNING := 1
# Tests start some hundred processes of tpucare, and each would compile it anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# The modules that decide and touch nothing; at least 90 % of their lines and branches are run by their own tests.
# Those run first and alone for it: to trace the whole suite makes stories and storms two to three times as slow.
PURE := fleetfile model.accelerators planner adapters.google.classify adapters.runner.scripts integrations.ray.packing integrations.ray.rules
TESTS := tests/fleetfile tests/model tests/planner tests/adapters/test_classify.py tests/adapters/test_scripts.py tests/integrations/test_ray_rules.py
# Two processes for each core of a small machine, since a test with machines waits more than it works. A file goes to one
# of them as a whole, because its tests share what it builds.
PYTEST := $(BIN)/pytest --dist loadfile --no-loadscope-reorder -m "not slow"
COVERAGE := $(PURE:%=--cov=tpucare.%) --cov-branch --cov-report=term:skip-covered --cov-fail-under=90

.PHONY: help setup demo demo-ray test check bench storm format

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## Everything for working on tpucare
	@.ci/setup dev machines

demo: ## Train through preemptions on an emulated cloud; ARGS="--preemptions 3"
	@.ci/setup demo machines
	@$(BIN)/tpucare demo $(ARGS)

demo-ray: ## Run a job of TPU tasks on slices that come for it, through a preemption, on an emulated cloud
	@.ci/setup demo,ray machines
	@$(BIN)/tpucare ray demo $(ARGS)

test: ## The tests of the pure modules, with their coverage, then all others but the slow ones; ARGS="-k store"
	@.ci/setup dev machines
	$(if $(ARGS),,@$(PYTEST) -n 2 $(COVERAGE) $(TESTS))
	@$(PYTEST) -n 4 --durations=20 $(or $(ARGS),$(TESTS:%=--ignore=%))

check: ## Style, types, import contracts, docs
	@.ci/setup dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict

format: ## Let ruff arrange the code
	@.ci/setup dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: ## Measure: bench.json and the table in docs/performance.md
	@.ci/setup dev machines
	$(BIN)/python -m tests.bench $(ARGS)

storm: ## Live through a million simulated node-days; figures go into docs/storms.md; ARGS="--storms 10 --node-days 1e4"
	@.ci/setup dev
	nice -n 5 $(BIN)/python -m tests.storm $(ARGS)
