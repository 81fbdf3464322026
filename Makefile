# make demo | test | lint | types | venv | clean
#
# Everything runs from .venv, which the first target makes. Versions come from constraints-cpu.txt; with a CUDA device,
# let pip choose them by an empty `make CONSTRAINTS= ...`. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
CONSTRAINTS ?= constraints-cpu.txt
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := venv
.PHONY: demo test lint types venv clean

demo: $(STAMP)
	@$(BIN)/opd train quickstart --out runs/quickstart --overwrite

test: $(STAMP)
	@$(BIN)/python -m pytest -n auto

lint: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --no-logo

types: $(STAMP)
	@$(BIN)/pyright --pythonpath $(BIN)/python

venv: $(STAMP)

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "opd needs Python 3.11 or newer: install it, or name it by 'make PYTHON=...'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian: python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

# The stamp is younger than what it was installed from, so that an edited requirement is installed by the next target.
$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	@echo "Installing opd into .venv (the first time takes a minute or more)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check \
		--editable '.[dev,lora,report,tensorboard]' $(addprefix --constraint ,$(CONSTRAINTS))
	@touch $@

# Keeps .venv and runs/: both take long to make again.
clean:
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
