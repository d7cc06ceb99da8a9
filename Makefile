# The environments under .venv/ are made from the package index on first use, and again whenever
# their requirements change. PYTHON chooses the interpreter. Frameworks that agree on their
# dependencies share an environment; the others have one of their own.

PYTHON ?= python3
# Sets FRAMEWORKS, and for each its ENVIRONMENT and its RUNS.
$(foreach line,$(shell $(PYTHON) -I src/gradscaler/_frameworks.py),$(eval $(line)))
$(if $(FRAMEWORKS),,$(error $(PYTHON) cannot list the frameworks))
ENVIRONMENTS := $(sort $(foreach framework,$(FRAMEWORKS),$($(framework)_ENVIRONMENT)))
keras_NO_DEPS := 'tf-keras==2.21.*' # it depends on TensorFlow for GPUs; that for CPUs is there
torch_NO_DEPS := deepspeed==0.19.8 # the tests need one of its modules, which needs torch alone
lowest-tensorflow_NO_DEPS := 'tf-keras==2.18.*'
integrations_NO_DEPS := fastai==2.8.12 mmengine==0.10.7 # requirements/integrations.txt says why
venv = .venv/$($(1)_ENVIRONMENT)

CORE := $(filter-out src/gradscaler/__main__.py,$(wildcard src/gradscaler/*.py)) \
	src/gradscaler/policies src/gradscaler/_formats src/gradscaler/_eager src/gradscaler/checkpoint
SOURCES = $(wildcard src/gradscaler/_$(name)_like src/gradscaler/_on_$(name)) src/gradscaler/$(name)
torch_SOURCES := src/gradscaler/diagnose src/gradscaler/demo src/gradscaler/__main__.py
torch_TESTS := $(CORE) $(wildcard tests/*.py) tests/policies tests/checkpoint tests/diagnose
TRAINERS := lightning accelerate transformers
EVERYWHERE := $(wildcard tests/diagnose/*/test_frameworks.py)
keras_TESTS := $(EVERYWHERE) tests/keras_like
tf-keras_TESTS := $(keras_TESTS)

.SECONDEXPANSION:
.NOTPARALLEL: # what is timed is to be alone, and the tests take all cores themselves
.PHONY: demo pictures test test-integrations test-package test-lowest docs lint conformance mutants bench bench-gpu clean $(foreach framework,$(FRAMEWORKS),test-$(framework) bench-$(framework))

demo: .venv/torch/.ready
	.venv/torch/bin/python -m gradscaler demo

# The pictures of docs/, which a test compares with what the code would draw.
pictures: .venv/torch/.ready
	.venv/torch/bin/python docs/pictures.py
	rm -rf .pictures
	.venv/torch/bin/python examples/torch_stuck.py parameter --runs .pictures
	.venv/torch/bin/python -m gradscaler report .pictures/parameter.jsonl -o docs/stuck.png
	.venv/torch/bin/python -m gradscaler demo --output .pictures/demo.png
	mv .pictures/demo.png docs/demo.png
	rm -r .pictures

test: lint $(addprefix test-,$(FRAMEWORKS)) test-integrations test-package docs

lint: .venv/torch/.ready
	.venv/torch/bin/ruff check .
	.venv/torch/bin/ruff format --check .

# Strict types, doctests and tests, every warning an error. The core's run with PyTorch's, but for
# those that read each framework's arrays and scalers. Keras is one backend a process.
$(addprefix test-,$(FRAMEWORKS)): test-%: $$(call venv,$$*)/.ready
	$(call venv,$*)/bin/mypy $(CORE) $(SOURCES) $($*_SOURCES) examples/$(name)_*.py benchmarks/$(name)_*.py
	set -e; for run in $(or $($*_RUNS),''); do env $$run TF_CPP_MIN_LOG_LEVEL=2 \
		GRADSCALER_FRAMEWORK=$(name) $(call venv,$*)/bin/python -m pytest -n auto \
		$(or $($*_TESTS),$(EVERYWHERE)) $(SOURCES) $($*_SOURCES) tests/$(name) tests/examples \
		$(if $(wildcard tests/eager/libraries/on_$(name).py),tests/eager) tests/conformance tests/documents; done

# The wheel and the sdist, the wheel alone in an empty environment, and the core without a framework.
test-package: .venv/package/.ready
	.venv/package/bin/python -m pytest tests/package tests/policies tests/checkpoint/test_formats.py \
		src/gradscaler/policies src/gradscaler/_formats src/gradscaler/checkpoint

# The lowest versions that pyproject.toml allows of JAX, Keras and TensorFlow, on the lowest Python.
# -k leaves out tests that need newer versions than the package does, and those of two devices, where
# TensorFlow 2.18 crashes at random.
LOWEST_PYTHON ?= python3.10
LOWEST = .venv/lowest-$(1)/bin/python -m pytest -n auto -W 'ignore:non-integer arguments to randrange'
LOWEST_KERAS := -k 'not ScheduleFreeAdamW and not another_inner_optimizer and not sparse_gradients_pass \
	and not replica and not strategy and not two_devices' \
	tests/keras tests/keras_like tests/documents src/gradscaler/keras/optimizer.py
test-lowest: export TF_CPP_MIN_LOG_LEVEL = 2
test-lowest: .venv/lowest-jax/.ready .venv/lowest-tensorflow/.ready
	GRADSCALER_FRAMEWORK=jax $(call LOWEST,jax) -k 'not nnx and not x32 and not x64 and not float64' \
		tests/jax tests/policies tests/documents src/gradscaler/jax src/gradscaler/policies
	GRADSCALER_FRAMEWORK=keras KERAS_BACKEND=jax $(call LOWEST,jax) $(LOWEST_KERAS)
	GRADSCALER_FRAMEWORK=keras KERAS_BACKEND=tensorflow $(call LOWEST,tensorflow) $(LOWEST_KERAS)
	GRADSCALER_FRAMEWORK=tf_keras $(call LOWEST,tensorflow) \
		tests/tf_keras tests/keras_like tests/documents src/gradscaler/tf_keras

# The site, from nothing, in site/. A warning, such as a broken link, is an error.
docs: .venv/docs/.ready
	rm -rf site
	.venv/docs/bin/sphinx-build -q -W --keep-going -b html docs site
	.venv/docs/bin/python -m pytest tests/site

# Trainers and other packages that use PyTorch's scaler, in an environment of their own.
test-integrations: .venv/integrations/.ready
	.venv/integrations/bin/mypy $(TRAINERS:%=examples/%_*.py)
	.venv/integrations/bin/python -m pytest -n auto tests/integrations

# Every scaler, ours and the frameworks' own, on the same recorded traces: one table.
conformance: $(ENVIRONMENTS:%=.venv/%/.ready)
	rm -f .venv/conformance.jsonl
	$(foreach framework,$(FRAMEWORKS),set -e; for run in $(or $($(framework)_RUNS),''); do \
		env $$run TF_CPP_MIN_LOG_LEVEL=2 $(call venv,$(framework))/bin/python \
		tests/conformance/replay.py $(subst -,_,$(framework)) >>.venv/conformance.jsonl \
		2>.venv/conformance.log || { cat .venv/conformance.log; exit 1; }; done;)
	.venv/torch/bin/python tests/conformance/table.py <.venv/conformance.jsonl

# Changes the rule and the engine in a thousand small ways; lists what no test notices. An hour.
mutants: .venv/mutants/.ready
	OMP_NUM_THREADS=1 .venv/mutants/bin/mutmut run # it forks, and OpenMP's threads do not
	.venv/mutants/bin/mutmut results

# Every framework beside its own scaler: JSON, one page of tables, and a chart. QUICK=1 for a glance.
NOT_IN_BENCH := torch_gpu jax_compiled # the first has bench-gpu, and the second prints a table
torch_large_OPTIONS := --large # in 6 GB
bench: $(addprefix bench-,$(FRAMEWORKS))
	.venv/torch/bin/python benchmarks/report.py

$(addprefix bench-,$(FRAMEWORKS)): bench-%: $$(call venv,$$*)/.ready
	mkdir -p benchmarks/results
	set -e; $(foreach benchmark,$(filter-out $(NOT_IN_BENCH),$(basename $(notdir $(wildcard benchmarks/$(name)_*.py)))), \
		$(call venv,$*)/bin/python benchmarks/$(benchmark).py $(if $(QUICK),--quick,$($(benchmark)_OPTIONS)) \
		--json benchmarks/results/$(benchmark).json;)
	$(call venv,$*)/bin/python benchmarks/imports.py $(name) $(if $(QUICK),--quick) \
		--json benchmarks/results/imports_$(name).json

# What a GPU changes: no waiting for it, CUDA graphs, kernel launches, time. Says so where there is none.
bench-gpu: .venv/torch/.ready
	mkdir -p benchmarks/results
	.venv/torch/bin/python benchmarks/torch_gpu.py $(if $(QUICK),--quick) \
		--json benchmarks/results/torch_gpu.json
	.venv/torch/bin/python benchmarks/report.py

name = $(subst -,_,$*)

.venv/lowest-%/.ready: PYTHON = $(LOWEST_PYTHON)

.venv/%/.ready: requirements/%.txt requirements/test.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv/$*
	.venv/$*/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/$*.txt
	$(if $($*_NO_DEPS),.venv/$*/bin/python -m pip install --quiet --no-deps $($*_NO_DEPS))
	touch $@

clean:
	rm -rf .venv mutants site docs/reference
