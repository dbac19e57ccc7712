# `make check` is exactly what CI runs.
.PHONY: check lint typecheck test docs mutants faults browser

export OMP_NUM_THREADS ?= 1

check: lint typecheck test

lint:
	python -m ruff check .
	python -m ruff format --check .

# The root is the package `trilith`, whatever the checkout is called: mypy finds it under that name through a link.
typecheck:
	mkdir -p build/typecheck
	ln -sfn ../.. build/typecheck/trilith
	python -m mypy

# DETAIL has torch compare what each rank calls: also in the processes that tests start as a user would.
test:
	TORCH_DISTRIBUTED_DEBUG=DETAIL pytest

# docs/recipe.md and the tables of docs/training.md, from the help of a recipe's keys; docs/commands.md, from the
# help of the commands.
docs:
	python -m trilith.recipes.reference
	python -m trilith.cli.reference

# Faults seeded one at a time: does the suite see each of them? Some minutes, not part of `check`.
mutants:
	python tests/mutants.py

# Which of the listed bad inputs and kills have a test: their numbers stand in the tests' names.
faults:
	python tests/faults.py

# Reports in a headless Chromium (apt-get install chromium): sizes, light and dark, contrast, nothing fetched.
browser:
	python tests/browser.py
