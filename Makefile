# Every target installs its requirements first; `make help` lists the targets.
#   RECIPE=h200 make train      a recipe by name or path
#   RUN=mine make serve         a run by name
#   TARGET=gke make deploy      a kind of cluster
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PROFILE ?= laptop
RECIPE ?= laptop
RUN ?=
TARGET ?= kind
CRDS ?= .strata/crds
ARGS ?=
STRATA := $(VENV)/bin/strata
# Two processes share the tests (tests/selection.py). pytest ends with 5 if ARGS selects no test of a kind. Bytecode is written, also
# where the environment turns it off: each of hundreds of processes would compile the same modules again.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/pytest -n 2
FAST_TESTS = { $(PYTEST) -m "not slow" $(ARGS) || [ $$? -eq 5 ]; }
SLOW_TESTS = { $(PYTEST) -m slow $(ARGS) || [ $$? -eq 5 ]; }
TOOK = echo "make $@ took $$((SECONDS / 60)) min $$((SECONDS % 60)) s"
export PYTHONUNBUFFERED := 1

.PHONY: help setup train serve chat doctor runs demo demo-pictures finetune bench-startup bench-serve bench-transfer chaos bench-train bench-checkpoint bench-memory bench-kernels bench-matmul bench-monitoring wheel-kernels monitor top dashboards docs results pictures ladder deploy crds check test test-gpu lint clean lock

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install everything into .venv (PROFILE=laptop or gpu); nothing happens if nothing changed
	@platform/setup/install "$(VENV)" "$(PROFILE)"
	@platform/setup/prometheus "$(VENV)"

train: setup ## train RECIPE (default laptop) as RUN (default: the next free name); ARGS="train.steps=50" changes the recipe
	@$(STRATA) train --recipe "$(RECIPE)" $(if $(RUN),--run "$(RUN)") $(ARGS)

serve: setup ## serve RUN (default: the newest) until Ctrl-C
	@$(STRATA) serve $(if $(RUN),--run "$(RUN)") $(ARGS)

chat: setup ## chat with the endpoint in the terminal
	@$(STRATA) chat $(ARGS)

doctor: setup ## check this machine: hardware, software, and the reasons for what cannot work
	@$(STRATA) doctor

runs: setup ## list the runs
	@$(STRATA) runs

demo: setup ## train a small model, serve it disaggregated, send it prompts, print the latencies
	@$(STRATA) train --recipe "$(RECIPE)" $(if $(RUN),--run "$(RUN)") $(ARGS)
	@$(STRATA) serve $(if $(RUN),--run "$(RUN)") --ask

demo-pictures: setup ## train a small text-to-image model, show pictures of captions that it has not seen, serve it and ask for more
	@$(STRATA) train --recipe pictures $(if $(RUN),--run "$(RUN)") $(ARGS)
	@$(STRATA) serve $(if $(RUN),--run "$(RUN)") --ask

finetune: setup ## train a small model, fine-tune it on conversations, serve it, ask it held-out questions
	@$(STRATA) train --run base --or-resume
	@test -d .strata/data/chat || $(STRATA) data make chat --count 8000 --to .strata/data/chat
	@$(STRATA) train --recipe sft --run chat --or-resume model.from=base $(ARGS)
	@$(STRATA) serve --run chat --ask

bench-startup: setup ## time from the command to the first answer, beside bare vLLM
	@$(STRATA) bench startup $(if $(RUN),--run "$(RUN)") $(ARGS)

bench-serve: setup ## throughput and latencies beside bare vLLM and Ray Serve LLM, in one run
	@$(STRATA) bench serve $(if $(RUN),--run "$(RUN)") $(ARGS)

bench-transfer: setup ## rate at which an engine reads another engine's KV blocks on this machine
	@$(STRATA) bench transfer $(ARGS)

chaos: setup ## kill replicas under load and compare every answer with an undisturbed run; ARGS="--kill decode=2,gateway"
	@$(STRATA) chaos $(if $(RUN),--run "$(RUN)") $(ARGS)

bench-train: setup ## training throughput of RECIPE beside a bare torch loop and, on GPUs, transformers with Liger
	@$(STRATA) bench train --recipe "$(RECIPE)" $(ARGS)

bench-kernels: setup ## kernels beside torch, Liger and vLLM; without a GPU, small shapes on the CPU
	@$(STRATA) bench kernels $(ARGS)

bench-matmul: setup ## one matrix product from naive to tensor cores, step by step, beside cuBLAS; needs a GPU
	@$(STRATA) bench matmul $(ARGS)

bench-checkpoint: setup ## step stalls of asynchronous and synchronous checkpoints of RECIPE
	@$(STRATA) bench checkpoint --recipe "$(RECIPE)" $(ARGS)

bench-memory: setup ## memory of workers on this machine beside the prediction of 'strata plan'
	@$(STRATA) bench memory $(ARGS)

bench-monitoring: setup ## board queries and rules on a real Prometheus with simulated GPUs; ARGS="--gpus 1024"
	@$(STRATA) bench monitoring $(ARGS)

monitor: setup ## monitor this machine with Prometheus, and Grafana if it is installed; ARGS="--port 9091"
	@$(STRATA) monitor $(ARGS)

top: setup ## GPUs or cores, runs and the endpoint, live in the terminal
	@$(STRATA) top $(ARGS)

dashboards: setup ## regenerate the dashboards' JSON and ConfigMaps
	@$(STRATA) dashboards build

docs: setup ## regenerate results tables, references, code excerpts and the ladder's picture from docs/results/data and the code
	@PYTHONPATH=docs $(VENV)/bin/python -m docgen

results: docs ## regenerate the results tables (a part of 'make docs')

pictures: setup ## redraw the pictures of docs/layouts.md, docs/planner.md and the web page
	@$(VENV)/bin/python docs/draw_layouts.py
	@$(VENV)/bin/python docs/draw_planner.py
	@platform/setup/chromium "$(VENV)" && PYTHONPATH=tests $(VENV)/bin/python docs/draw_page.py

ladder: setup ## compile the steps of docs/kernel-ladder.md again, for the table of 'make docs'; needs nvcc
	@$(VENV)/bin/python docs/compile_ladder.py

deploy: setup ## show the changes of RECIPE on a cluster (TARGET=gke, ack or kind), confirm, apply; ARGS="--image R:T --with auth"
	@$(STRATA) deploy apply --target "$(TARGET)" --recipe "$(RECIPE)" $(if $(RUN),--run "$(RUN)") $(ARGS)

crds: ## fetch the definitions of infra/crds.txt for 'strata deploy check' and the tests: STRATA_KUBERAY_CRDS=$(CRDS)
	@infra/fetch-crds "$(CRDS)"

check: setup ## lint, types and the fast tests: before every commit
	@SECONDS=0; $(MAKE) --no-print-directory lint; $(FAST_TESTS); $(TOOK)

test: setup ## lint, types and every test that needs no GPU (of the rare ones a part: ARGS="--rotation all")
	@SECONDS=0; platform/setup/redis "$(VENV)"; platform/setup/chromium "$(VENV)"; $(MAKE) --no-print-directory lint; $(FAST_TESTS); $(SLOW_TESTS); $(TOOK)

test-gpu: setup ## run the tests that need a GPU
	@$(VENV)/bin/pytest tests/gpu $(ARGS)

lint: setup ## run ruff and mypy
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy -p strata.platform -p strata.planner -p strata.training -p strata.serving -p strata.kernels -p strata.monitoring -p strata.deploy -p strata.dashboards

wheel-kernels: setup ## build the package strata-kernels, the operations without the rest of Strata, into dist/
	@uv=$$(command -v uv || echo "$(VENV)/bin/uv"); "$$uv" build --wheel --out-dir dist kernels

lock: setup ## regenerate the constraint files from pyproject.toml
	@platform/setup/lock "$(VENV)"

clean: ## remove the environment and the caches; runs stay
	@rm -rf "$(VENV)" .strata .mypy_cache .pytest_cache .ruff_cache && find . -name __pycache__ -prune -exec rm -rf {} +
