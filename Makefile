# All tasks of the project. `make` alone lists them. CI runs the same targets (.ci/run).

PYTHON ?= python3
VENV   := .venv
SERVERS := tests/servers
VLLM   := .venv-vllm
PROMETHEUS := .prometheus
BENCH  := --manifest-path bench/Cargo.toml
INDEX  := --manifest-path bench/index/Cargo.toml
RUN    ?= serve
SEEDS  ?= 0..1000
CONTAINERS ?= docker
CARGO_DENY := 0.20.2

# Without the examples, which clippy checks: each would have to be generated and linked. Python tests run one of them;
# it is built for the whole workspace, so that its dependencies have the features that they have in tests.
TARGETS := --locked --workspace --tests
# cargo-nextest where it is installed; plain `cargo test` runs the same tests.
NEXTEST := $(shell cargo nextest --version >/dev/null 2>&1 && echo yes)
ifeq ($(NEXTEST),yes)
# Processors, or fewer where a container has a quota of processor time.
CORES := $(shell n=$$(getconf _NPROCESSORS_ONLN); q=max; read -r q p 2>/dev/null </sys/fs/cgroup/cpu.max; \
  if [ "$$q" != max ] && [ "$$(( (q + p - 1) / p ))" -lt "$$n" ]; then n=$$(( (q + p - 1) / p )); fi; echo "$$n")
RUST_TESTS := cargo nextest run $(TARGETS) --no-fail-fast \
  --profile make --test-threads $(shell expr 3 '*' "$(CORES)")
else
RUST_TESTS := cargo test $(TARGETS) --no-fail-fast
endif

.DEFAULT_GOAL := help
.PHONY: help run pgo demo-cluster test test-vllm test-image simulate lint fmt doc setup cargo-deny advisories
.PHONY: bench bench-kvbm bench-router bench-ttft bench-routing bench-replay bench-index bench-gateway bench-stream
.PHONY: bench-faults bench-cluster bench-peer bench-remote

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## Build and serve the built-in model on 127.0.0.1:8000 (RUN="serve --model DIR" for another)
	cargo run --locked --release -- $(RUN)

pgo: ## Build target/pgo/blockyard, optimized by profiles of the benchmarks, half an hour (rustup component add llvm-tools)
	bench/pgo.sh

# rustdoc builds the tests of documentation crate by crate, on one core, while the other builds the benchmarks' tests.
# Python tests wait much, for heartbeats and timeouts, so two of their files run at a time. They share no ports.
test: $(VENV)/.ready $(SERVERS)/node_modules/.ready $(PROMETHEUS) ## All tests, in Rust and Python; installs what they need
	cargo test $(TARGETS) --no-run
	cargo build --locked --workspace --example follow_kv_events
	@command -v ip >/dev/null || { [ "$$(id -u)" = 0 ] && \
	  { apt-get -qq install iproute2 || { apt-get -qq update && apt-get -qq install iproute2; }; } >/dev/null; } || \
	  echo "make: SKIPPED the tests with network namespaces: they need root and the package iproute2"
	$(VENV)/bin/python -m pytest -q -rs -n 2 --dist loadfile --no-loadscope-reorder tests/python
	cargo test --locked --quiet $(BENCH) & bench=$$!; cargo test --locked --workspace --doc --quiet; doc=$$?; \
	  wait $$bench && exit $$doc
	$(VENV)/bin/python $(SERVERS)/run.py $(RUST_TESTS)

test-vllm: $(VLLM)/.ready ## The gateway in front of two real vLLM servers on the CPU; installs vLLM (2.5 GB), five minutes
	cargo test $(TARGETS) --no-run
	$(VLLM)/bin/python -m pytest -q tests/vllm || { \
	  echo "make: tests with vLLM failed (above) and are run once more: two servers on two cores starve each other"; \
	  $(VLLM)/bin/python -m pytest -q --last-failed --last-failed-no-failures none tests/vllm; }

test-image: ## Build the container image and start it without rights (CONTAINERS=podman instead of docker)
	$(CONTAINERS) build --file deploy/Dockerfile --tag blockyard .
	$(PYTHON) tests/image.py $(CONTAINERS) blockyard

simulate: ## Router, workers and planes under faults drawn from seeds: SEEDS=0..10000 (ARGS="--trace" for the events)
	cargo run --locked --release -p router --example simulate -- --seeds $(SEEDS) $(ARGS)

# `cargo doc` of an example builds with the features of tests, as clippy does. Without one, most dependencies would be
# checked a second time: those that use tokio, which has one feature less then.
lint: ## Formatting, clippy and rustdoc without warnings, licences and banned crates
	cargo fmt --all --check
	cargo fmt $(BENCH) --check
	cargo fmt $(INDEX) --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked $(BENCH) --all-targets -- -D warnings
	cargo update --locked --workspace --quiet $(INDEX)
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --lib --example tokenize --no-deps \
	  --document-private-items --quiet
	@if cargo deny --version >/dev/null 2>&1; then \
	  set -ex; cargo deny --locked check bans licenses sources; \
	  cargo deny --locked $(BENCH) --config deny.toml check bans licenses sources; \
	else \
	  echo "lint: SKIPPED the check of licences and banned crates: cargo-deny is not installed (make setup installs it)"; \
	fi

fmt: ## Format everything
	cargo fmt --all
	cargo fmt $(BENCH)
	cargo fmt $(INDEX)

doc: ## Build the API documentation into target/doc
	cargo doc --locked --workspace --no-deps --document-private-items

demo-cluster: $(VENV)/.ready ## Two frontends, two prefill and two decode workers, NATS and an S3 server as processes: shows that it works
	cargo build --locked --release
	$(VENV)/bin/python $(SERVERS)/demo_cluster.py target/release/blockyard $(ARGS)

bench: bench-kvbm bench-ttft bench-routing ## The benchmarks without a trace; takes minutes, wants an idle machine

bench-kvbm: ## Benchmarks of the block manager, each figure beside its goal (ARGS="--json" for JSON)
	cargo build --locked --release -p kvbm -p worker --examples
	cargo run --locked --release --quiet $(BENCH) --bin kvbm -- $(ARGS)

bench-faults: $(VENV)/.ready ## Frontends and workers as processes under load, while parts of them fail (ARGS="--json" for JSON)
	cargo build --locked --release
	$(VENV)/bin/python $(SERVERS)/bench_faults.py target/release/blockyard $(ARGS)

bench-cluster: $(VENV)/.ready ## Prompt tokens computed by one process, and by frontends and workers (ARGS="--json" for JSON)
	cargo build --locked --release
	$(VENV)/bin/python $(SERVERS)/bench_cluster.py target/release/blockyard $(ARGS)

bench-peer: $(VENV)/.ready ## A worker's memory read by another one, beside raw TCP; the cost of the split (ARGS="--rounds 1")
	cargo build --locked --release
	cargo run --locked --release --quiet -p worker --example peer_speed
	$(VENV)/bin/python $(SERVERS)/bench_split.py target/release/blockyard $(ARGS)

bench-remote: ## Cost of a request that crosses to a worker in another process, beside its goals (ARGS="--json" for JSON)
	cargo run --locked --release --quiet -p worker --example remote_engine -- $(ARGS)

bench-router: ## Benchmarks of the router, each figure beside its goal, an hour; TRACE=FILE for all (ARGS="--only workloads")
	@test -z "$(TRACE)" || test -r "$(TRACE)" || { echo "make: cannot read the trace $(TRACE)"; exit 1; }
	cargo build --locked --release
	cargo build --locked --release -p router --example decide
	@if [ -n "$(TRACE)" ]; then set -x; cargo build --locked --release $(INDEX); fi
	cargo run --locked --release --quiet $(BENCH) --bin router -- $(if $(TRACE),--trace "$(TRACE)") $(ARGS)

bench-ttft: ## Time to first token: cold, and with the prefix in each tier (ARGS="--json" for JSON)
	cargo build --locked --release
	cargo build --locked --release $(BENCH)
	cargo run --locked --release --quiet $(BENCH) --bin ttft -- $(ARGS)

bench-replay: ## Routing policies over a recorded trace, on simulated workers: TRACE=FILE (ARGS="--json" for JSON)
	@test -n "$(TRACE)" || { echo "make: bench-replay needs a trace: make bench-replay TRACE=FILE; see docs/replay.md"; \
	  exit 1; }
	@test -r "$(TRACE)" || { echo "make: cannot read the trace $(TRACE)"; exit 1; }
	cargo run --locked --release --quiet -- replay "$(TRACE)" --runs 5 $(ARGS)

bench-index: ## The prefix index compared with published ones, 15 minutes: TRACE=FILE (ARGS="--workers 128" for less)
	@test -n "$(TRACE)" || { echo "make: bench-index needs a trace: make bench-index TRACE=FILE; see docs/replay.md"; \
	  exit 1; }
	@test -r "$(TRACE)" || { echo "make: cannot read the trace $(TRACE)"; exit 1; }
	cargo run --locked --release --quiet $(INDEX) -- --trace "$(TRACE)" $(ARGS)

bench-routing: ## Prompt tokens computed under each routing policy, and the lower bound (ARGS="--json" for JSON)
	cargo build --locked --release
	cargo build --locked --release $(BENCH)
	cargo run --locked --release --quiet $(BENCH) --bin routing -- $(ARGS)

bench-stream: ## CPU time per streamed token of the native engine, beside its goal (ARGS="--json" for JSON)
	cargo build --locked --release
	cargo build --locked --release $(BENCH)
	cargo run --locked --release --quiet $(BENCH) --bin stream -- $(ARGS)

bench-gateway: ## Gateways side by side, those that are installed, half an hour (ARGS="--only blockyard" for less)
	cargo build --locked --profile dist
	cargo build --locked --profile dist -p frontend --example tokenize
	cargo build --locked --release $(BENCH)
	cargo run --locked --release --quiet $(BENCH) --bin gateway -- $(ARGS)

setup: $(VENV)/.ready cargo-deny ## Install the Python client and cargo-deny for lint and test (two minutes)

# Its own release profile has fat LTO and one codegen unit, which would take more time than all its runs.
cargo-deny:
	cargo deny --version >/dev/null 2>&1 || CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
	  CARGO_PROFILE_RELEASE_OPT_LEVEL=1 cargo install --locked cargo-deny@$(CARGO_DENY)

advisories: ## Check the dependencies against the RustSec database (needs the network)
	cargo deny --locked check advisories

$(SERVERS)/node_modules/.ready: $(SERVERS)/package.json
	npm install --prefix $(SERVERS) --silent --no-audit --no-fund --no-package-lock || \
	  { echo "make: npm cannot install the Azure server of the tests; on Debian and Ubuntu: apt-get install npm"; exit 1; }
	@touch $@

$(VENV)/.ready: tests/python/requirements.txt $(SERVERS)/requirements.txt
	$(PYTHON) -m venv $(VENV) || \
	  { echo "make: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; \
	  exit 1; }
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(addprefix --requirement ,$^)
	@touch $@

# promtool is only in Debian's package, which is unpacked, not installed. Without it tests are skipped.
$(PROMETHEUS):
	@mkdir -p $@.part && (cd $@.part && \
	  (apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }) && \
	  dpkg -x prometheus_*.deb . && rm prometheus_*.deb) && mv $@.part $@ || \
	  { rm -rf $@.part; echo "make: SKIPPED the tests with promtool: apt-get and dpkg do not give it"; }

$(VLLM)/.ready: $(wildcard tests/vllm/install.py tests/vllm/cuda_stubs.py tests/vllm/requirements.txt)
	$(PYTHON) tests/vllm/install.py $(VLLM) || $(PYTHON) tests/vllm/install.py $(VLLM)
	@touch $@
