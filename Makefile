# `make check` is exactly what CI runs.
.PHONY: check lint typecheck pages test quick changed seconds nightly docs site models any-model mutants oldest versions faults browser bench wheel \
	stranger release

check: lint typecheck pages test

lint:
	python -m ruff check .
	python -m ruff format --check .

# The root is the package `trilith`, whatever the checkout is called: mypy finds it under that name through a link.
typecheck:
	mkdir -p build/typecheck
	ln -sfn ../.. build/typecheck/trilith
	python -m mypy

# The generated pages are what the code says.
pages:
	rm -rf build/docs && mkdir -p build && cp -r docs build/docs
	$(MAKE) docs
	diff -r build/docs docs

# All tests but the slow ones, in lanes (tests/support/lanes.py).
test:
	python -m pytest

# For the inner loop: every test that starts no process and takes less than half a second; fewer examples of hypothesis.
quick:
	python -m pytest -q -n 2 --quick

# The tests that a change can reach, and why: of the work tree, or against BASE, such as BASE=main.
changed:
	PYTHONPATH=tests python -m support.changed $(BASE)

# Writes tests/seconds.txt anew from a run of all tests; on an idle machine.
seconds:
	python -m pytest -q --seconds

# Everything, hours; DETAIL has torch compare what each rank calls, also in processes that tests start as a user would.
nightly:
	TORCH_DISTRIBUTED_DEBUG=DETAIL python -m pytest -q -m "slow or not slow"

# The tables of docs/recipe.md and docs/training.md, from the help of a recipe's keys; docs/commands.md, from the
# help of the commands; docs/published_runs.md, from tools/published_runs.toml and the planner; docs/python, from the
# docstrings.
docs:
	python tools/recipe_page.py
	python tools/commands_page.py
	python tools/published_runs.py
	python tools/python_reference.py

# build/site, which works from a folder without a network; then its links and what it would fetch are checked, and it
# is looked at in Chromium where there is one. Needs pip install -e '.[docs]'.
site:
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --quiet
	python tests/built_site.py

# docs/models.md: the largest difference that the tests of each family measure; FAMILY=gemma2 measures one of them anew.
models:
	mkdir -p build
	python -m pytest -q -n 3 -m "slow or not slow" --measured build/measured.json tests/models/test_families.py \
		tests/layouts/test_families.py $(if $(FAMILY),-k $(FAMILY))
	PYTHONPATH=tests python -m support.models_page build/measured.json

# docs/any_model.md and models/from_transformers/proved.toml, from every causal type of transformers; with
# TYPES="arcee helium" these alone are tried, and the others keep their rows.
any-model:
	mkdir -p build
	rm -f build/any_model.json
	cd tests && python -m support.any_model ../build/any_model.json $(TYPES)
	cd tests && python -m support.any_table ../build/any_model.json

# Faults seeded one at a time: does the suite see each of them? Not part of `check`; PART=2/4 is the second of four.
mutants:
	python tests/mutants.py --part $(or $(PART),1/1)

# All tests but the slow ones, with the oldest torch and transformers that pyproject.toml allows, in build/oldest.
# Not part of `check`; FILES=tests/pipeline runs a part.
OLDEST = $(shell sed -nE 's/^ *"(torch|transformers)>=([0-9.]+),.*/\1==\2.*/p' pyproject.toml)
oldest:
	python -m venv build/oldest
	build/oldest/bin/python -m pip install -q -e '.[test]' $(OLDEST)
	build/oldest/bin/python -m pytest $(FILES)

# The lowest or the newest versions that pyproject.toml admits, in build/VERSIONS: quick tests, quickstart, a comparison.
VERSIONS = newest
versions:
	python -m venv build/$(VERSIONS)
	build/$(VERSIONS)/bin/python -m pip install -q -e '.[test]' $(if $(filter lowest,$(VERSIONS)),$(OLDEST),--upgrade)
	build/$(VERSIONS)/bin/python -m pytest -q -n 2 --quick
	rm -rf build/$(VERSIONS)-quickstart
	build/$(VERSIONS)/bin/trilith quickstart --out build/$(VERSIONS)-quickstart
	build/$(VERSIONS)/bin/trilith parity build/$(VERSIONS)-quickstart/hf --tensor 2 --pipeline 2

# Wheel and sdist in build/dist, their contents compared with the folders, the README as an index shows it.
wheel:
	python tests/wheel.py build

# What somebody does who has never seen the tree: the wheel in an empty environment, from own text to an export
# that transformers loads. A quarter of an hour on two cores.
stranger: wheel
	python tests/stranger.py build/dist/*.whl

# What would be uploaded. Uploading is the owner's: nothing here does it.
release: wheel
	python tests/wheel.py list

# Which of the listed bad inputs and kills have a test: their numbers stand in the tests' names.
faults:
	python tests/faults.py

# Reports in a headless Chromium (apt-get install chromium): sizes, light and dark, contrast, nothing fetched.
browser:
	python tests/browser.py

# Speed and memory beside torch's own ways and transformers, on an idle machine: hours; NAME=training runs one of them.
bench:
	python benchmarks/run.py $(NAME)
