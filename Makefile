# make demo and make test need Python, with pip, and nothing else: they put nox, which runs the tasks
# of noxfile.py, into an environment of its own. PYTHON chooses the interpreter. Any other task runs
# with `make NAME`, too; `make` lists them.

PYTHON ?= python3
NOX := .venv/nox/bin/nox
OPTIONS ?= # for the task's own command: make test-torch OPTIONS='tests/torch -k clip'

.PHONY: tasks clean
tasks: $(NOX)
	$(NOX) --list

clean:
	rm -rf .venv site jupyter_execute docs/reference

# Two tasks at a time would wait for one another with one cache of mypy's.
%: export MYPY_CACHE_DIR = $(CURDIR)/.mypy_cache/$@
%: $(NOX) FORCE
	$(NOX) --session $@ -- $(OPTIONS)

.PHONY: FORCE
FORCE:
Makefile requirements/nox.txt: ;

$(NOX): requirements/nox.txt
	$(PYTHON) -m venv --clear .venv/nox
	.venv/nox/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/nox.txt
