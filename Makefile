# Three commands: `make quickstart`, `make demo` and `make test`. Each sets itself up in .venv and needs only Python 3.11 or newer.
# uv is used where it is installed, plain pip elsewhere. PIP_FIND_LINKS is honoured by both.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
UV = $(shell command -v uv 2>/dev/null)
LINKS = $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)")

unexport PYTHONDONTWRITEBYTECODE
export OMP_WAIT_POLICY = passive

.PHONY: quickstart demo test lint types tests slow lock clean

quickstart: $(VENV)/.run
	$(BIN)/truestep run recipes/quickstart.toml

demo: $(VENV)/.run
	$(BIN)/python demo/demo.py

test: lint types tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/basedpyright --pythonpath $(BIN)/python

tests: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations 15

slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --durations 15

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "truestep needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(if $(UV),$(UV) venv -q --python $(PYTHON) $(VENV),$(PYTHON) -m venv $(VENV))

$(VENV)/.run: requirements/run.txt pyproject.toml | $(VENV)/bin/python
	$(if $(UV),UV_COMPILE_BYTECODE=1 $(UV) pip install -q --python $(BIN)/python $(LINKS) -r requirements/run.txt,$(BIN)/python -m pip install -q -r requirements/run.txt)
	$(if $(UV),$(UV) pip install -q --python $(BIN)/python --no-deps -e .,$(BIN)/python -m pip install -q --no-deps -e .)
	touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.run
	$(if $(UV),UV_COMPILE_BYTECODE=1 $(UV) pip install -q --python $(BIN)/python $(LINKS) -r requirements/dev.txt,$(BIN)/python -m pip install -q -r requirements/dev.txt)
	touch $@

# Pins are compiled without the CUDA packages that torch's own wheel brings along where it needs them.
lock:
	$(UV) pip compile -q --universal --no-header --no-annotate --no-emit-find-links $(LINKS) pyproject.toml -c requirements/torch.txt -o requirements/run.txt
	$(UV) pip compile -q --universal --no-header --no-annotate --no-emit-find-links $(LINKS) pyproject.toml --group dev -c requirements/run.txt -o requirements/dev.txt

clean:
	rm -rf $(VENV) runs
