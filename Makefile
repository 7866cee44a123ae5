# Every target sets up what it needs first; `make help` lists them.
#   RECIPE=h200 make train      a recipe by name or path
#   RUN=mine make serve         a run by name
#   TARGET=gke make deploy      a cluster's kind
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PROFILE ?= laptop
RECIPE ?= laptop
RUN ?=
TARGET ?= kind
CRDS ?= .strata/kuberay-crds
ARGS ?=
STRATA := $(VENV)/bin/strata
export PYTHONUNBUFFERED := 1

.PHONY: help setup train serve chat doctor runs demo bench-startup bench-serve bench-transfer chaos bench-train bench-checkpoint bench-memory bench-kernels monitor top dashboards docs pictures deploy crds test test-gpu lint clean lock

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install everything into .venv (PROFILE=laptop or gpu); does nothing when nothing changed
	@platform/setup/install "$(VENV)" "$(PROFILE)"
	@platform/setup/prometheus "$(VENV)"

train: setup ## train RECIPE (default laptop), named RUN or the next free name; ARGS="train.steps=50" changes the recipe
	@$(STRATA) train --recipe "$(RECIPE)" $(if $(RUN),--run "$(RUN)") $(ARGS)

serve: setup ## serve RUN (default: the newest) until Ctrl-C
	@$(STRATA) serve $(if $(RUN),--run "$(RUN)") $(ARGS)

chat: setup ## chat with the endpoint in the terminal
	@$(STRATA) chat $(ARGS)

doctor: setup ## what this machine has, and what would not work and why
	@$(STRATA) doctor

runs: setup ## list the runs
	@$(STRATA) runs

demo: setup ## train, export, serve disaggregated, ask, print the latencies, stop
	@$(STRATA) train --recipe "$(RECIPE)" $(if $(RUN),--run "$(RUN)") $(ARGS)
	@$(STRATA) serve $(if $(RUN),--run "$(RUN)") --ask

bench-startup: setup ## seconds from the command to the first answer, beside two bare vLLM servers
	@$(STRATA) bench startup $(if $(RUN),--run "$(RUN)") $(ARGS)

bench-serve: setup ## throughput and latencies beside bare vLLM and stock ray.serve.llm, in one run
	@$(STRATA) bench serve $(if $(RUN),--run "$(RUN)") $(ARGS)

bench-transfer: setup ## how fast one engine reads another's KV blocks on this machine
	@$(STRATA) bench transfer $(ARGS)

chaos: setup ## kill replicas under load and compare every answer with the undisturbed one; ARGS="--kill decode=2,gateway"
	@$(STRATA) chaos $(if $(RUN),--run "$(RUN)") $(ARGS)

bench-train: setup ## tokens a second when training RECIPE, beside a bare torch loop and, on GPUs, transformers with Liger
	@$(STRATA) bench train --recipe "$(RECIPE)" $(ARGS)

bench-kernels: setup ## our kernels beside torch's, Liger's and vLLM's; without a GPU, small shapes on the CPU
	@$(STRATA) bench kernels $(ARGS)

bench-checkpoint: setup ## how long steps of RECIPE stand still for a checkpoint, asynchronous and synchronous
	@$(STRATA) bench checkpoint --recipe "$(RECIPE)" $(ARGS)

bench-memory: setup ## what workers on this machine hold, beside what 'strata plan' says
	@$(STRATA) bench memory $(ARGS)

monitor: setup ## watch this machine: Prometheus, and Grafana where it is installed; ARGS="--port 9091"
	@$(STRATA) monitor $(ARGS)

top: setup ## GPUs or cores, runs and the endpoint, live in the terminal
	@$(STRATA) top $(ARGS)

dashboards: setup ## write the boards' JSON and ConfigMaps anew
	@$(STRATA) dashboards build

docs: setup ## write the results tables and the references anew from docs/results/data and the code
	@PYTHONPATH=docs $(VENV)/bin/python -m docgen

pictures: setup ## draw the pictures of docs/layouts.md and docs/planner.md anew
	@$(VENV)/bin/python docs/draw_layouts.py
	@$(VENV)/bin/python docs/draw_planner.py

deploy: setup ## show what RECIPE would change on a cluster (TARGET=gke, ack or kind), ask, apply; ARGS="--image R:T --with auth"
	@$(STRATA) deploy apply --target "$(TARGET)" --recipe "$(RECIPE)" $(if $(RUN),--run "$(RUN)") $(ARGS)

crds: ## fetch KubeRay's definitions for 'strata deploy check' and the tests: STRATA_KUBERAY_CRDS=$(CRDS)
	@for kind in rayclusters rayjobs rayservices; do curl -fsSL --create-dirs -o "$(CRDS)/ray.io_$$kind.yaml" \
	  "https://raw.githubusercontent.com/ray-project/kuberay/v1.7.0/ray-operator/config/crd/bases/ray.io_$$kind.yaml"; done

test: setup lint ## every test that needs no GPU
	@platform/setup/redis "$(VENV)"
	@$(VENV)/bin/pytest $(ARGS)

test-gpu: setup ## the tests that need a GPU
	@$(VENV)/bin/pytest tests/gpu $(ARGS)

lint: setup ## ruff and mypy
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy -p strata.platform -p strata.planner -p strata.training -p strata.serving -p strata.kernels -p strata.monitoring -p strata.deploy -p strata.dashboards

lock: setup ## write the constraint files anew from pyproject.toml
	@platform/setup/lock "$(VENV)"

clean: ## remove the environment and the caches; runs stay
	@rm -rf "$(VENV)" .strata .mypy_cache .pytest_cache .ruff_cache && find . -name __pycache__ -prune -exec rm -rf {} +
