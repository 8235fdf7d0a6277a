# Every target sets itself up: .venv is made once, and again only when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# of the packages' many thousand modules the few that are imported are compiled, once and when they first are
export PYTHONDONTWRITEBYTECODE :=
# one thread each, so that the workers do not fight over the cores
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
SUPPORT := OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m support

.PHONY: demo check test test-all ready-to-test floors slow bench docs notebooks cards faults fuzz worlds lint format clean

$(READY): pyproject.toml
	@echo 'Setting up .venv: a few minutes and about 6 GB, once'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

demo: $(READY)  ## the whole job on the embedded small world, offline
	$(BIN)/hf-bico demo demo-output

check: lint  ## while you work: linters, types, and the quick tests, three real ports among them; two minutes
	$(PYTEST) -m quick

test: ready-to-test  ## linters, types, then every test; 20 to 25 minutes, the first time about 4 more
	$(PYTEST)

test-all: ready-to-test  ## the same, with the tests of peft and of the loopback Hub although nothing there has changed
	$(PYTEST) --all

FLOORS := .cache/floors
floors: BIN := $(FLOORS)/bin
floors:  ## the quick tests with the oldest releases that pyproject.toml allows, in a venv of 6 GB; about 10 minutes
	mkdir -p $(FLOORS)
	PYTHONPATH=tests $(PYTHON) -m support.floors > $(FLOORS)/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(FLOORS)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
		--requirement $(FLOORS)/requirements.txt --editable .
	$(PYTEST) -m quick

slow: faults fuzz  ## what takes hours: every fault, every fuzzer, and the broad tables of the trained worlds
	$(PYTEST) -m slow

bench: $(READY)  ## what a port costs on this machine, and what it is worth on all trained worlds
	$(BIN)/python benchmarks/speed.py
	$(PYTEST) -m slow tests/experiments

docs: $(READY)  ## every transcript of README and docs/, the command reference and the pictures, from real runs
	$(SUPPORT).pages
	$(BIN)/python docs/pictures/how_it_works.py
	$(BIN)/python docs/pictures/architecture.py

notebooks: $(READY)  ## the outputs that the notebooks store, from runs on the small world
	$(SUPPORT).notebooks

cards: $(READY)  ## the gallery of model cards, from real ports between repos of a loopback Hub
	$(SUPPORT).gallery

faults: $(READY)  ## every fault of the Hub at every request of a port and its push, as a table; about twenty minutes
	$(SUPPORT).fault_matrix --processes 2

READERS := adapter card config data index record results tokenizer weights
fuzz: $(READY)  ## ten minutes of broken files for each reader; what is found is kept in tests/support/corpus
	for reader in $(READERS); do $(SUPPORT).fuzz $$reader --minutes 10 || exit 1; done

ready-to-test: $(READY)
	$(MAKE) --no-print-directory --jobs 2 lint worlds

worlds: $(READY)  ## the trained models of the tests, unless they are kept from an earlier run
	$(SUPPORT).worlds

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hf_bico

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache demo-output
