# Everything that is done with a checkout.  `make help` lists it.
#
# Each target makes the virtualenv that it needs: .venv with what is needed to
# run, .venv-dev with the tools as well.  Both hold exactly what the lock files
# name, checked by hash; nothing is installed anywhere else.

SHELL := /bin/sh
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: sim sim-planted sim-coverage test-long docs help demo test test-web screenshots check bench lock clean

export PYTHON
RUN := .venv/bin
DEV := .venv-dev/bin
SOURCES := $(shell find machines rolloutd playbooks tui -type f -not -name '*.pyc')

# make demo DEMO="--fault n3:maintaining"; make test TESTS=tests/machines
DEMO ?=
TESTS ?= tests
# make sim SEEDS=100000 for a night
SEEDS ?= 500
# Tests wait for ssh and Ansible more than they work, so one more of them than there are cores
WORKERS ?= $(shell expr $$(nproc) + 1)

help:
	@echo "make demo    a small fleet and a real daemon, in a temporary directory: a change walks to done"
	@echo "             (DEMO='--fault n3:maintaining' breaks a node; DEMO=--help shows what else)"
	@echo "make test    all tests (TESTS=tests/machines for some)"
	@echo "make test-long    whole stories over many nodes; a daemon killed KILLS=50 times"
	@echo "make test-web     the console in a headless Chromium"
	@echo "make screenshots  draw the pictures in docs/console/ anew, some of them by driving the demo in tmux"
	@echo "make check   what needs no running: style, types, import contracts, documents"
	@echo "make sim     the daemon under a virtual clock, in a world of faults: known seeds and 500 new ones"
	@echo "             (SEEDS=100000 for a night; sim-planted: bugs that it must find; sim-coverage: what it reaches)"
	@echo "make sim-planted  prove that the simulation catches seven planted bugs"
	@echo "make sim-coverage how much of the loop, the driver and the store the simulation reaches"
	@echo "make bench   all measurements"
	@echo "make docs    write the tables of keys into docs/ anew, from the types"
	@echo "make lock    write requirements.lock and requirements-dev.lock anew"
	@echo "make clean   remove what make has made"

demo: .venv/installed
	@$(RUN)/rolloutctl demo $(DEMO)

test: .venv-dev/installed
	@.ci/packages --try sshd systemd faketime tmux
	$(DEV)/python -m pytest -n $(WORKERS) --dist worksteal --durations=15 -m "not long" $(TESTS)

# Whole stories over many nodes, and a daemon that is killed fifty times.
KILLS ?= 50
test-long: .venv-dev/installed
	@.ci/packages --try sshd systemd faketime tmux
	ROLLOUTD_TEST_KILLS=$(KILLS) $(DEV)/python -m pytest -n auto --dist worksteal --durations=15 -rP -m long $(TESTS)

test-web: .venv-dev/installed
	@.ci/packages chromium
	$(DEV)/python -m pytest -q tests/tui/browser.py

screenshots: .venv-dev/installed
	@.ci/packages tmux
	$(DEV)/python -m tests.tui.scenes
	$(DEV)/python -m tests.tui.drive docs/console/demo

check: .venv-dev/installed
	$(DEV)/ruff check .
	$(DEV)/ruff format --check .
	$(DEV)/mypy
	$(DEV)/lint-imports
	$(DEV)/python -m pytest -q tests/docs

sim: .venv-dev/installed
	@$(DEV)/python -m tests.sim --marks --seeds $(SEEDS)

sim-planted: .venv-dev/installed
	@$(DEV)/python -m tests.sim.planting

# Of the loop, the driver with its parts, and the store, reached by the simulation alone.
REACHED = rolloutd/daemon.py,rolloutd/driving/driver.py,rolloutd/driving/interruption.py,rolloutd/driving/isolation.py,rolloutd/driving/logbook.py,rolloutd/driving/probing.py,rolloutd/driving/running.py,rolloutd/driving/turn.py,rolloutd/store/*
sim-coverage: .venv-dev/installed
	@$(DEV)/python -m coverage run --branch --data-file=.coverage-sim --include='$(REACHED)' \
		-m tests.sim --jobs 1 --first 0 --seeds 100 --small some
	@$(DEV)/python -m coverage report --data-file=.coverage-sim --show-missing --fail-under=90

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
