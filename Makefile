# Everything that is done with a checkout.  `make help` lists it.
#
# Each target makes the virtualenv that it needs: .venv with what is needed to
# run, .venv-dev with the tools as well.  Both hold exactly what the lock files
# name, checked by hash; nothing is installed anywhere else.

SHELL := /bin/sh
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: docs help demo test check bench lock clean

export PYTHON
RUN := .venv/bin
DEV := .venv-dev/bin
SOURCES := $(shell find machines rolloutd playbooks -type f -not -name '*.pyc')

# make demo DEMO="--fault n3:maintaining"; make test TESTS=tests/machines
DEMO ?=
TESTS ?= tests

help:
	@echo "make demo    a small fleet and a real daemon, in a temporary directory: a change walks to done"
	@echo "             (DEMO='--fault n3:maintaining' breaks a node; DEMO=--help shows what else)"
	@echo "make test    all tests (TESTS=tests/machines for some)"
	@echo "make check   what needs no running: style, types, import contracts, documents"
	@echo "make bench   all measurements"
	@echo "make docs    write the tables of keys into docs/ anew, from the types"
	@echo "make lock    write requirements.lock and requirements-dev.lock anew"
	@echo "make clean   remove what make has made"

demo: .venv/installed
	@$(RUN)/rolloutctl demo $(DEMO)

test: .venv-dev/installed
	@.ci/packages --try sshd systemd faketime
	$(DEV)/python -m pytest -n auto --dist worksteal --durations=15 $(TESTS)

check: .venv-dev/installed
	$(DEV)/ruff check .
	$(DEV)/ruff format --check .
	$(DEV)/mypy
	$(DEV)/lint-imports
	$(DEV)/python -m pytest -q tests/docs

bench: .venv-dev/installed
	@.ci/packages --try sshd systemd faketime
	@$(DEV)/python -m bench

docs: .venv-dev/installed
	$(DEV)/python -m tests.docs.references

# uv is itself in the lock; the files name packages, versions and hashes, and nobody's server.
COMPILE = $(DEV)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

lock: .venv-dev/installed
	$(COMPILE) --group build pyproject.toml --output-file requirements.lock
	$(COMPILE) --group dev pyproject.toml --output-file requirements-dev.lock

clean:
	rm -rf .venv .venv-dev build dist rolloutd.egg-info

# -- the virtualenvs; each is finished when its file is there --

.venv/made: requirements.lock .ci/venv
	@.ci/packages venv ssh
	@.ci/venv .venv requirements.lock
	@touch $@

# As a wheel, as users have it; without build/, from which setuptools would take files that are gone.
.venv/installed: .venv/made pyproject.toml $(SOURCES)
	@rm -rf build
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	@rm -rf build
	@touch $@

.venv-dev/made: requirements-dev.lock .ci/venv
	@.ci/packages venv ssh
	@.ci/venv .venv-dev requirements-dev.lock
	@touch $@

# Editable: tools and tests see the checkout as it is.
.venv-dev/installed: .venv-dev/made pyproject.toml
	@$(DEV)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
