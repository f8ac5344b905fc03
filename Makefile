# Every target sets up what it needs on a bare machine with Python 3.11 and pip; a second call installs nothing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo demo-flower demo-nvflare test test-long explore lint docs bench paper-smoke clean

demo: $(READY)
	@$(BIN)/fedmerit demo
	@$(BIN)/fedmerit rewards runs/demo --budget 10000.00

# A SuperLink and five SuperNodes on 127.0.0.1: TLS, node authentication, one of them killed on the way.
demo-flower: $(READY)
	@$(BIN)/python examples/flower-hospitals/demo.py

# NVFlare's server and five sites: mutual TLS, no code from jobs; one job killed on the way, the next goes on.
demo-nvflare: $(READY)
	@$(BIN)/python examples/nvflare-hospitals/demo.py

# What is compiled is kept, whatever the shell says: each worker would rewrite the asserts of all tests at every run.
export PYTHONDONTWRITEBYTECODE =

# The page is looked at in a browser: Debian's, installed where that is possible; else those tests say why they skip.
test: $(READY) lint
	@command -v chromium >/dev/null || (apt-get update -q && apt-get install -y -q chromium) >/dev/null 2>&1 || true
	$(BIN)/pytest -q -n 2 --dist worksteal -m "not alone and not long"

# What is slow by nature: kills, toy experiments, every field of every record, real deployments.
test-long: $(READY)
	$(BIN)/pytest -q -n 2 --dist worksteal -m "long and not alone"
	$(BIN)/pytest -q -n 2 --dist worksteal -m alone

# The properties with examples that no run has tried before.
explore: $(READY)
	$(BIN)/pytest -q -n 2 --dist worksteal -m "hypothesis and not alone" --hypothesis-profile=explore

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Into build/site, where every page opens from a disk; warnings are errors.
docs: $(READY)
	$(BIN)/python -m zensical build --strict --clean

paper-smoke: $(READY)
	@rm -rf runs/paper-smoke
	$(BIN)/python experiments/run.py --toy --out runs/paper-smoke
	$(BIN)/python experiments/tables.py --toy --results runs/paper-smoke --into runs/paper-smoke
	$(BIN)/python experiments/figures.py --into runs/paper-smoke/figures

bench: $(READY)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv

# torch first: the lock pins a build without CUDA; an unpinned torch would pull gigabytes.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and \"fedmerit needs Python 3.11 or newer: make PYTHON=...\")"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY)
