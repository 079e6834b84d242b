# make lab    set up, open the lessons in JupyterLab
# make demo   set up, run the main job under every launcher, without a browser
# make test   set up, run every test and every notebook
# make faults set up, run the long trials (half an hour), of which make test has a sample
#
# Each target sets up .venv when it is missing or older than pyproject.toml, and only then.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Open MPI refuses to start as root unless both are set: containers and CI run as root.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# A lesson types mpirun: the one of .venv comes first.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: lab demo test test-fast faults lint format notebooks setup

lab: $(READY)
	$(BIN)/python -m jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(if $(OMPI_ALLOW_RUN_AS_ROOT),--allow-root)

demo: $(READY)
	$(BIN)/python -m ddp_helpers demo

test: $(READY)
	$(BIN)/python -m pytest --nbval tests notebooks

# No launcher, no engine, no notebook: under a minute.
test-fast: $(READY)
	$(BIN)/python -m pytest -m "not launcher and not cuda" tests

# Failing ranks under every launcher, the doctor fifty times, more restarts.
faults: $(READY)
	$(BIN)/python -m pytest -m long -s tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Re-execute the lessons and write their outputs.
notebooks: $(READY)
	$(BIN)/python notebooks/execute.py

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than 3.10: make PYTHON=python3.11 ..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[course,test]'
	@touch $@
