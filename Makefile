# `make up` and `make test` are all that a newcomer needs; both set everything up first.
# A clean environment is made once and then reused until the lock file or pyproject.toml changes.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.quire-stamp
PIP_FLAGS := --disable-pip-version-check -qq
UP ?=
TESTS ?=
# Processes that share the tests. More than one makes tests that look at the clock compete with others.
WORKERS ?= 0
BENCH ?= engine
PEERS ?=
CHECK ?=
# The check needs no environment of its own: torch with CUDA, triton and transformers are enough.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) $(PYTHON))

.PHONY: help setup native up down test test-full test-native lint format protos bench bench-peers gpu-check lock system-tools

help: ## shows this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | column -t -s "$$(printf '\t')"

$(STAMP): requirements.lock pyproject.toml tools/build_backend.py
	@test -n "$(PYTHON)" || { echo "setup: Python 3.11 or newer is needed and none is on the PATH; name one with PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "setup: no venv module (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(BIN)/python tools/native_needs.py
	@echo "setup: installing the locked packages into $(VENV) (one to three minutes the first time)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --requirement requirements.lock
	@echo "setup: compiling the native kernels (one to four minutes the first time)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable .
	@touch $@

quire/v1/gateway_pb2.py: $(wildcard protos/quire/v1/*.proto protos/third_party/*.proto) tools/build_protos.py | $(STAMP)
	@$(BIN)/python tools/build_protos.py

native: $(STAMP) ## compiles what changed of the native kernels
	@$(BIN)/python tools/build_native.py

setup: $(STAMP) quire/v1/gateway_pb2.py native ## makes the environment, the generated code and the native kernels

up: setup ## starts the four services, prints a first answer and where to connect (UP="--model ... " for options)
	@$(BIN)/quire up $(UP)

down: ## stops what `make up` started
	@test -x $(BIN)/quire || { echo "down: nothing was set up here, so nothing runs from here" >&2; exit 1; }
	@$(BIN)/quire down

test: lint system-tools ## sets up, checks style and types, runs the tests (TESTS="paths")
	$(BIN)/python -m pytest -m "not full" --numprocesses $(WORKERS) $(TESTS)

test-full: lint system-tools ## the same in the sizes that the project promises; takes much longer
	$(BIN)/python -m pytest $(TESTS)

test-native: setup ## tests native code with sanitizers, and its AVX-512 kernels on any x86 machine (TESTS="paths")
	$(BIN)/python tools/test_native.py $(TESTS)

lint: setup ## style, types, protos, Dockerfile, file sizes, symbols of native code
	@$(BIN)/python tools/lint.py

format: setup ## formats Python and C++
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $$(git ls-files --cached --others --exclude-standard '*.cpp' '*.h')

system-tools: # docker-compose and redis-server, from the system's packages, where we may install them; else their tests are skipped
	@{ command -v docker-compose && command -v redis-server; } >/dev/null || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker-compose redis-server; } >/dev/null 2>&1 \
		|| echo "docker-compose and redis-server could not be installed; the tests that need them are skipped" >&2

protos: $(STAMP) ## generates quire/v1 from protos/
	$(BIN)/python tools/build_protos.py

bench: setup ## measures the engine (BENCH="serve --concurrency 8" for the whole stack)
	$(BIN)/quire bench $(BENCH)

bench-peers: setup ## measures Quire beside llama.cpp, OpenVINO and vLLM, which it installs first (PEERS="--help" lists options)
	$(BIN)/python -m benchmarks.peers $(PEERS)

gpu-check: ## proves and times the GPU kernels and the cuda backend on this machine's first CUDA device (CHECK="--help" lists options)
	@$(GPU_PYTHON) -m benchmarks.gpu.check $(CHECK)

lock: $(STAMP) ## writes the lock files anew from pyproject.toml (LOCK=--upgrade for new versions)
	$(BIN)/python tools/lock.py $(LOCK)
