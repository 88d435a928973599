# Every target does its own set-up: a virtual environment in .venv, filled once and again when the pins change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CPU_TORCH := https://download.pytorch.org/whl/cpu/torch/

.PHONY: help demo picture findings doctor docs soak memory test test-kernels test-slow test-browser fuzz audit check clean
.DEFAULT_GOAL := help

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1#\2/p' Makefile | column -t -s '#'

demo: $(STAMP) ## four mixers through all six evaluations on this machine's CPU, no download, and a report (5 to 11 minutes on two cores)
	$(BIN)/attnbench demo

picture: $(STAMP) ## the README's picture, from the report of make demo, by a headless Chromium
	$(BIN)/python tools/picture.py

findings: $(STAMP) ## two published claims that a CPU decides, ten seeds each, and a page (minutes)
	$(BIN)/attnbench findings conv_recall nope_copy device=cpu plan.num_workers=2

doctor: $(STAMP) ## what this machine can run, and whether each kernel runs it right (a minute or two)
	$(BIN)/attnbench doctor

docs: $(STAMP) ## the documentation as a site in site/, with the settings, the API and a card for each mixer, no network
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/mkdocs build --quiet
	@echo "Open site/index.html; $(BIN)/mkdocs serve shows it with its search."

test: $(STAMP) ## run the tests (CPU, no network)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow' --ignore=tests/kernels --ignore=tests/browser

test-kernels: $(STAMP) ## run the tests of our Triton kernels: on the GPU or, without one, in Triton's interpreter
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow' tests/kernels

test-slow: $(STAMP) ## run the tests that take longest: runs stopped again and again, sweeps in new processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m slow

test-browser: $(STAMP) ## look at the report in a headless Chromium, where there is one
	$(BIN)/python -m pytest -q -rs tests/browser

fuzz: $(STAMP) ## feed 5,000 broken inputs of each kind to what reads files and command lines (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz.py --inputs 5000

# PyPI does not know the local part of a version (2.13.0+cpu). Strict: what could not be asked about is a failure.
audit: $(STAMP) ## ask pip-audit's database, over the network, for known holes in what is installed
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > $(VENV)/installed.txt
	$(PIP) pip-audit
	$(BIN)/python -m pip_audit --strict --disable-pip --no-deps --requirement $(VENV)/installed.txt

soak: $(STAMP) ## kill runs 200 times, at random moments and inside writes, and compare what is left (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tools/soak.py

memory: $(STAMP) ## what a large corpus takes of the host's memory, and what a hundred cells leave (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tools/host_memory.py

check: $(STAMP) ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean: ## remove the virtual environment and caches; outputs/ and data/ stay
	rm -rf $(VENV) site *.egg-info .pytest_cache .ruff_cache .hypothesis

# Without a GPU the CPU build of torch comes first and alone: PyTorch's own page has it, and where that page cannot be
# reached pip takes what it finds. With a GPU, PyPI's torch is the CUDA build and brings the triton it is pinned to.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
		f"attnbench needs Python 3.11 to 3.13, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (a minute or two, once)"
	@if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then \
		$(PIP) torch && $(PIP) --editable '.[dev,docs,gpu]'; \
	else \
		$(PIP) --no-deps --retries 1 --find-links $(CPU_TORCH) torch && $(PIP) --editable '.[dev,docs]'; \
	fi
	@touch $(STAMP)
