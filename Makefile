# Development commands; `make help` lists them.
#
# Each target makes the virtualenv that it needs: .venv to run, .venv-dev with
# the tools too.  Both hold exactly the packages of the lock files, checked by
# hash; nothing is installed anywhere else.

SHELL := /bin/sh
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: packages runners clusters soak takeovers trains reboots plain-runs interpreters test-failed sim sim-planted sim-coverage test-long docs help demo test test-web screenshots check bench figures touches lock clean

export PYTHON
# The tests start hundreds of our processes: without bytecode each compiles 230 modules in half a CPU second.
unexport PYTHONDONTWRITEBYTECODE
# With it Python reads each module that Ansible sends byte by byte, in 170,000 calls.
unexport PYTHONUNBUFFERED
RUN := .venv/bin
DEV := .venv-dev/bin
SOURCES := $(shell find machines rolloutd playbooks tui -type f -not -name '*.pyc')

# make demo DEMO="--fault n3:maintaining"; make test TESTS=tests/machines
DEMO ?=
# Without the tests of the documents, which `make check` runs.
TESTS ?= tests --ignore=tests/docs
# Only files with long tests: to collect all others would cost each worker five CPU seconds.
LONG_TESTS = $(if $(filter file,$(origin TESTS)),$(shell grep -rlE 'mark\.long|"long"' --include='test_*.py' --exclude-dir=docs tests),$(TESTS))
# make sim SEEDS=100000 runs for a night
SEEDS ?= 500
CLUSTER_SEEDS ?= 100
# Tests mostly wait for ssh and Ansible, so more workers than there are cores.
WORKERS ?= $(shell expr $$(nproc) + 3)
LONG_WORKERS ?= $(WORKERS)

help:
	@echo "make demo         run the demo: a small fleet and a real daemon in a temporary directory"
	@echo "                  (DEMO='--fault n3:maintaining' breaks a node; DEMO=--help lists the options)"
	@echo "make check        style, types, import contracts, documents"
	@echo "make test         all other tests but the long ones (TESTS=tests/machines: only those)"
	@echo "make test-long    acceptance tests over many nodes; a daemon killed KILLS=50 times"
	@echo "make soak         three days of the daemon's life in SOAK_S=7200 seconds, with kills, drift and full disks"
	@echo "make test-failed  the tests that failed in the last run, one at a time"
	@echo "make test-web     the console in a headless Chromium"
	@echo "make sim          simulate the daemon under faults: known seeds and SEEDS=500 new ones"
	@echo "make sim-planted  prove that the simulation finds the known bugs (tests/sim/mutants.py)"
	@echo "make sim-coverage coverage of the loop, the drivers and the store by the simulation"
	@echo "make takeovers    two daemons of one PostgreSQL on 24 nodes, with 30 faults"
	@echo "make runners      200 runs by each runner elsewhere, with 20 kills of the daemon"
	@echo "make clusters     a module over 60 clusters, with 20 kills of the daemon"
	@echo "make trains       three changes on 24 nodes in one outage of each, with 20 kills of the daemon"
	@echo "make reboots      200 machines that reboot themselves beside a rollout and a hold, with 20 kills"
	@echo "make plain-runs   the tests that run Ansible, without what relies on its private parts"
	@echo "make interpreters prove rolloutd on the other Pythons of this machine; names those that it lacks"
	@echo "make bench        all measurements (SUITE='scale --json': only that one)"
	@echo "make figures      size of the code: lines, files, functions, comments"
	@echo "make touches      which files an isolator, an event, a front end and other new parts touch"
	@echo "make docs         rewrite the tables in docs/ from the types and the routes"
	@echo "make packages     build the Debian package, the OCI image, wheel, sdist, SBOM and checksums in dist/"
	@echo "                  (PACKAGES=deb: without the image)"
	@echo "make screenshots  redraw docs/console/ (some pictures drive the demo in tmux)"
	@echo "make lock         rewrite requirements.lock and requirements-dev.lock"
	@echo "make clean        remove what make has made"

demo: .venv/installed
	@$(RUN)/rolloutctl demo $(DEMO)

test: .venv-dev/installed
	@.ci/packages --try sshd haproxy prometheus postgresql systemd faketime lua5.1 tmux
	$(DEV)/python -m pytest -n $(WORKERS) --dist worksteal --durations=15 -m "not long" $(TESTS)

# Acceptance tests over many nodes, a daemon that is killed fifty times, and many random inputs for each parser.
KILLS ?= 50
INPUTS ?= 10000
# Playbooks are killed after each task; by STRIDE=3 after each third.
STRIDE ?= 1
test-long: .venv-dev/installed
	@.ci/packages --try sshd haproxy prometheus postgresql systemd faketime lua5.1 tmux mmdebstrap umoci crun seccomp
	ROLLOUTD_TEST_KILLS=$(KILLS) ROLLOUTD_TEST_FUZZ_INPUTS=$(INPUTS) ROLLOUTD_TEST_KILL_STRIDE=$(STRIDE) \
	$(DEV)/python -m pytest -n $(LONG_WORKERS) --dist worksteal --durations=15 -rP -m long $(LONG_TESTS)

plain-runs: .venv-dev/installed
	@.ci/packages --try sshd haproxy postgresql faketime
	ROLLOUTD_TEST_WARM=off $(DEV)/python -m pytest -n $(LONG_WORKERS) --dist worksteal tests/acceptance \
		tests/contracts/test_runner.py tests/contracts/test_playbook_steps.py tests/rolloutd/adapters/ansible

interpreters: .venv-dev/installed
	@.ci/interpreters

# Three days of the daemon's life at 36 times the speed; SOAK_S=600 lasts ten minutes.
SOAK_S ?= 7200
soak: .venv-dev/installed
	@.ci/packages sshd faketime
	ROLLOUTD_TEST_SOAK_S=$(SOAK_S) $(DEV)/python -m pytest -n 0 -rP tests/acceptance/test_soak.py

# Three changes on 24 nodes in one outage of each, with a daemon that is killed twenty times.
trains: .venv-dev/installed
	@.ci/packages sshd haproxy
	ROLLOUTD_TEST_TRAIN_NODES=24 ROLLOUTD_TEST_TRAIN_KILLS=20 $(DEV)/python -m pytest -n 0 -rP tests/acceptance/test_trains.py

# 200 runs by each runner that is not on the daemon's machine, with a daemon that is killed twenty times.
runners: .venv-dev/installed
	@.ci/packages sshd
	ROLLOUTD_TEST_RUNNER_RUNS=200 ROLLOUTD_TEST_RUNNER_KILLS=20 $(DEV)/python -m pytest -n 0 -rP tests/acceptance/test_awx_runs.py tests/acceptance/test_kubernetes_runs.py

# A module over 60 clusters, with a bad revision, pins and joins, while the daemon is killed 20 times.
clusters: .venv-dev/installed
	ROLLOUTD_TEST_CLUSTERS=60 ROLLOUTD_TEST_CLUSTER_KILLS=20 $(DEV)/python -m pytest -n 0 -rP tests/acceptance/test_clusters.py

# Two daemons of one PostgreSQL on 24 nodes, with thirty faults and the default lease.
LEASE_S ?= 15
takeovers: .venv-dev/installed
	@.ci/packages sshd postgresql
	ROLLOUTD_TEST_NODES=24 ROLLOUTD_TEST_TAKEOVERS=30 ROLLOUTD_TEST_LEASE_S=$(LEASE_S) $(DEV)/python -m pytest -n 0 -rP tests/acceptance/test_takeover.py

# 200 machines that ask all at once to reboot themselves, beside a rollout and a hold, with 1,000 malformed requests
# and a daemon that is killed twenty times.
reboots: .venv-dev/installed
	@.ci/packages sshd
	ROLLOUTD_TEST_REBOOT_MACHINES=200 ROLLOUTD_TEST_REBOOT_KILLS=20 ROLLOUTD_TEST_REBOOT_MALFORMED=1000 \
	$(DEV)/python -m pytest -n 0 -rP tests/acceptance/test_fleetlock.py

# Only the tests that failed in the last run, one at a time; without one it fails too.
test-failed: .venv-dev/installed
	$(DEV)/python -m pytest -n 0 --last-failed --last-failed-no-failures none tests

test-web: .venv-dev/installed
	@.ci/packages chromium
	$(DEV)/python -m pytest -q tests/tui/browser.py

screenshots: .venv-dev/installed
	@.ci/packages tmux
	$(DEV)/python -m tests.tui.screenshots
	$(DEV)/python -m tests.tui.walkthrough docs/console/demo

check: .venv-dev/installed
	$(DEV)/ruff check .
	$(DEV)/ruff format --check .
	@# Beside mypy, which uses one core: else each worker of `make test` compiles all tests in a new clone.
	@$(DEV)/python -m pytest -q --collect-only tests >/dev/null 2>&1 & $(DEV)/mypy; code=$$?; wait; exit $$code
	$(DEV)/lint-imports
	$(DEV)/python -m pytest -q tests/docs

sim: .venv-dev/installed
	@$(DEV)/python -m tests.sim --marks --seeds $(SEEDS) --clusters $(CLUSTER_SEEDS)

sim-planted: .venv-dev/installed
	@$(DEV)/python -m tests.sim.mutants

# The loop, the drivers and the store: the simulation alone must reach 90 % of them.
REACHED = rolloutd/engine/daemon.py,rolloutd/engine/drivers/driver.py,rolloutd/engine/tasks.py,rolloutd/engine/drivers/isolation.py,rolloutd/engine/drivers/step_journal.py,rolloutd/engine/drivers/traffic_probes.py,rolloutd/engine/drivers/run_execution.py,rolloutd/engine/drivers/node_session.py,rolloutd/store/*,rolloutd/store/sqlite/commit_mark.py,rolloutd/store/sqlite/database.py,rolloutd/store/sqlite/engine.py,rolloutd/store/sqlite/lock.py
sim-coverage: .venv-dev/installed
	@$(DEV)/python -m coverage run --branch --data-file=.coverage-sim --include='$(REACHED)' \
		-m tests.sim --jobs 1 --first 0 --seeds 100 --small some
	@$(DEV)/python -m coverage report --data-file=.coverage-sim --show-missing --fail-under=90

bench: .venv-dev/installed
	@.ci/packages --try sshd systemd faketime
	@$(DEV)/python -m bench $(SUITE)

figures: .venv-dev/installed
	@$(DEV)/python -m tests.docs.figures

touches: .venv-dev/installed
	@$(DEV)/python -m tests.docs.touches

docs: .venv-dev/installed
	$(DEV)/python -m tests.docs.references
	$(DEV)/python -m tests.docs.example_previews

# uv is itself in the lock; the files name packages, versions and hashes, but no server.
COMPILE = $(DEV)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

# Nothing is fetched but what the lock names, and for the image Debian's packages from apt's sources.
PACKAGES ?= deb image
packages: .venv-dev/installed
	@.ci/packages $(if $(findstring image,$(PACKAGES)),mmdebstrap umoci)
	@$(DEV)/python -m deploy.packages --out dist $(PACKAGES)

lock: .venv-dev/installed
	$(COMPILE) --group build pyproject.toml --output-file requirements.lock
	$(COMPILE) --group dev pyproject.toml --output-file requirements-dev.lock

clean:
	rm -rf .venv .venv-dev .venv-3.* build dist rolloutd.egg-info

# -- the virtualenvs; each is complete when its marker file exists --

.venv/made: requirements.lock .ci/venv
	@.ci/packages venv ssh
	@.ci/venv .venv requirements.lock
	@touch $@

# Installed as a wheel, as for users; without build/, because setuptools would take deleted files from it.
.venv/installed: .venv/made pyproject.toml $(SOURCES)
	@rm -rf build
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	@rm -rf build
	@touch $@

.venv-dev/made: requirements-dev.lock .ci/venv
	@.ci/packages venv ssh
	@.ci/venv .venv-dev requirements-dev.lock
	@touch $@

# Editable: tools and tests see the checkout.  A path in a .pth file halves the start of each Python: setuptools'
# own finder imports pathlib and re.
.venv-dev/installed: .venv-dev/made pyproject.toml
	@$(DEV)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--config-settings editable_mode=compat --editable .
	@touch $@
