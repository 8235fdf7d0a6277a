# Every target sets itself up: .venv is made once, and again only when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# of the packages' many thousand modules the few that are imported are compiled, once and when they first are
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test bench docs notebooks cards faults fuzz lint format clean

$(READY): pyproject.toml
	@echo 'Setting up .venv: a few minutes and about 6 GB, once'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[dev]'
	touch $(READY)

demo: $(READY)  ## the whole job on the embedded small world, offline
	$(BIN)/hf-bico demo demo-output

test: lint  ## linters, types, then every test, one thread each so that the workers do not fight over the cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

bench: $(READY)  ## what a port costs on this machine, beside the obvious implementation and the floor; minutes
	$(BIN)/python benchmarks/speed.py

docs: $(READY)  ## every transcript of README and docs/, the command reference and the pictures, from real runs
	OMP_NUM_THREADS=1 $(BIN)/python tests/pages.py
	$(BIN)/python docs/pictures/how_it_works.py

notebooks: $(READY)  ## the outputs that the notebooks store, from runs on the small world
	OMP_NUM_THREADS=1 $(BIN)/python tests/notebooks.py

cards: $(READY)  ## the gallery of model cards, from real ports between repos of a loopback Hub
	OMP_NUM_THREADS=1 $(BIN)/python tests/gallery.py

faults: $(READY)  ## every fault of the Hub at every request of a port and its push, as a table; about twenty minutes
	OMP_NUM_THREADS=1 $(BIN)/python tests/fault_matrix.py --processes 2

READERS := adapter card config data index record results tokenizer weights
fuzz: $(READY)  ## ten minutes of broken files for each reader; what is found is kept in tests/corpus
	for reader in $(READERS); do OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py $$reader --minutes 10 || exit 1; done

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hf_bico

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache demo-output
