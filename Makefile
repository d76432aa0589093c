# Each target sets up what it needs, in a virtual environment of its own (.venv).
#   make demo                       run the study of the figure, draw its pictures
#   make serve                      serve runs/ on http://localhost:8000
#   make test  check  bench         tests; lint and types; benchmarks
#   make chaos                      the long chaos test
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the small CPU build of torch.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
STORAGE ?= runs
PORT ?= 8000
SERVICES ?= auto
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: demo serve test check bench chaos test-compose services clean

demo: $(VENV)/.installed
	$(BIN)/python study/run.py --storage $(STORAGE)
	@$(BIN)/python -m service.draw latest --storage $(STORAGE)
	@echo "to look at it in a browser: make serve, then http://localhost:$(PORT)"

serve: $(VENV)/.installed
	GRADNORM_STORAGE=$(STORAGE) $(BIN)/uvicorn --factory service.app:create_app --port $(PORT)

# Tests that start servers and processes meet a busy machine's clocks: what fails is tried once more, and
# the summary says so.
test: $(VENV)/.installed-dev services
	$(BIN)/python -m pytest -x -q -rR --reruns 1 -n 2 -m "not ray and not browser and not alone"
	$(BIN)/python -m pytest -x -q -rR --reruns 1 -m "ray or browser or alone"

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	for file in tests/bench/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

chaos: $(VENV)/.installed-dev
	GRADNORM_CHAOS=long $(BIN)/python -m pytest -x -q -rR --reruns 1 tests/test_chaos.py

test-compose:
	bash tests/compose.sh

# Chromium for the browser tests and a PostgreSQL server for the database tests, from Debian's packages.
services:
	@sh tests/services.sh $(SERVICES)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && \
	  apt-get install -y -q python3-venv && $(PYTHON) -m venv $(VENV); } || \
	  { echo "no virtual environment can be made; run: sudo apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(if $(TORCH_INDEX),$(PIP) torch --index-url $(TORCH_INDEX))
	$(PIP) -e '.[study,service]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[study,service,data,dev]'
	@touch $@
