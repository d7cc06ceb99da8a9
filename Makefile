# Each framework has an environment of its own under .venv/, made from the package index on first
# use and again whenever its requirements change. PYTHON chooses the interpreter.

PYTHON ?= python3
FRAMEWORKS := torch tensorplay paddle

CORE := $(wildcard src/gradscaler/*.py) src/gradscaler/policies
torch_SOURCES := src/gradscaler/torch_like src/gradscaler/torch src/gradscaler/demo
tensorplay_SOURCES := src/gradscaler/torch_like src/gradscaler/tensorplay
paddle_SOURCES := src/gradscaler/paddle
torch_TESTS := $(CORE) $(wildcard tests/*.py) tests/policies

.PHONY: demo test lint bench clean $(addprefix test-,$(FRAMEWORKS))

demo: .venv/torch/.ready
	.venv/torch/bin/python -m gradscaler demo

test: lint $(addprefix test-,$(FRAMEWORKS))

lint: .venv/torch/.ready
	.venv/torch/bin/ruff check .
	.venv/torch/bin/ruff format --check .

# Strict types, doctests and tests, every warning an error. The core's run with PyTorch's.
$(addprefix test-,$(FRAMEWORKS)): test-%: .venv/%/.ready
	.venv/$*/bin/mypy $(CORE) $($*_SOURCES) examples/$*_digits.py benchmarks/$*_scaler.py
	.venv/$*/bin/python -m pytest -n auto $($*_TESTS) $($*_SOURCES) tests/$*

bench: $(patsubst %,.venv/%/.ready,$(FRAMEWORKS))
	for framework in $(FRAMEWORKS); do \
		.venv/$$framework/bin/python benchmarks/$${framework}_scaler.py || exit 1; \
	done

.venv/%/.ready: requirements/%.txt requirements/test.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv/$*
	.venv/$*/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/$*.txt
	touch $@

clean:
	rm -rf .venv
