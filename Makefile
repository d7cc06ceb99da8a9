# Each framework has an environment of its own under .venv/, made from the package index on first
# use and again whenever its requirements change. PYTHON chooses the interpreter.

PYTHON ?= python3
FRAMEWORKS := torch

.PHONY: demo test lint bench clean $(addprefix test-,$(FRAMEWORKS))

demo: .venv/torch/.ready
	.venv/torch/bin/python -m gradscaler demo

test: lint $(addprefix test-,$(FRAMEWORKS))

lint: .venv/torch/.ready
	.venv/torch/bin/ruff check .
	.venv/torch/bin/ruff format --check .

# Strict types, doctests and tests of one framework, with the warnings of all as errors.
test-torch: .venv/torch/.ready
	.venv/torch/bin/mypy -p gradscaler
	.venv/torch/bin/python -m pytest -n auto src tests

bench: .venv/torch/.ready
	.venv/torch/bin/python benchmarks/torch_scaler.py

.venv/%/.ready: requirements/%.txt requirements/test.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv/$*
	.venv/$*/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/$*.txt
	touch $@

clean:
	rm -rf .venv
