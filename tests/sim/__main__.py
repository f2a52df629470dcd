"""Simulations from the command line: `python -m tests.sim`.

    python -m tests.sim                        the corpus, every small plan's every effect, 500 new seeds
    python -m tests.sim --seeds 100000         for the night
    python -m tests.sim --replay 'seed 42'     one simulation again, with its trace
    python -m tests.sim --nodes 100000         one rollout over a large fleet, without faults

A simulation that fails is told with the command that replays it; a seed that
found something belongs into corpus.txt.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from rolloutd.concurrency import garbage
from tests.sim import exhaustive, large_fleet, required_coverage
from tests.sim.fault_plan import EffectOutcome
from tests.sim.random_streams import Coverage
from tests.sim.scenario import SimResult
from tests.sim.seeds import run_clusters, run_seed
from tests.sim.workspace import collected_state_dirs
from tests.support.note_change import note_installed

CORPUS = Path(__file__).with_name("corpus.txt")

SEED_LIMIT = 1_000_000_000
"""New seeds are drawn below this, so that they stay easy to type."""

MAX_FAILURES_SHOWN = 5
"""Failures that are told whole; the rest is counted."""

SMALL_STRIDES = {"none": 0, "few": 75, "some": 25, "all": 1}
"""Of the runs of small plans with an effect that goes otherwise, every so many-th."""

TRACE_LINES_SHOWN = 40
"""Lines of a trace that lead to an accusation, when it is not replayed."""

SIMULATIONS_PER_COLLECTION = 50
"""Simulations of a process between two collections of what their daemons froze: some 3 MB of cycles each."""

SIMULATIONS_PER_LINE = 1_000
"""Simulations between two lines that tell how far a long run is."""


def main() -> int:
    """Run what was asked for; return 1 when anything was found."""
    options = _options()
    if options.nodes:
        return _run_large(options.nodes)
    if options.replay:
        return _replay(options.replay)
    began = time.perf_counter()
    first = options.first if options.first is not None else secrets.randbelow(SEED_LIMIT)
    known = [] if options.no_corpus else corpus()
    names = [*known, *small_names(options.small, options.small_first)]
    names += [f"seed {first + n}" for n in range(options.seeds)]
    names += [f"train {first + n}" for n in range(options.trains)]
    names += [f"clusters {first + n}" for n in range(options.clusters)]
    coverage = Coverage()
    failed: list[SimResult] = []
    for number, verdict in enumerate(run_many(names, options.jobs), 1):
        if not number % SIMULATIONS_PER_LINE:
            print(f"{number} of {len(names)} simulations, {len(failed)} failed", file=sys.stderr, flush=True)
        coverage.merge(verdict.coverage)
        if verdict.violations:
            failed.append(verdict)
            if len(failed) <= MAX_FAILURES_SHOWN:
                _print_result(verdict)
            if options.stop:
                break
    if options.trains:
        print(f"{coverage.counts.get('train:joined', 0)} attempts have joined the outage of another")
    took_s = time.perf_counter() - began
    missing = [] if failed or not options.marks else required_coverage.missing_coverage(coverage)
    for name in missing:
        print(f"never happened in all of this: {name}")
    print(f"{len(names)} simulations, {len(failed)} failed, {took_s:.0f} s; seeds {first} and on")
    return 1 if failed or missing else 0


def corpus() -> list[str]:
    """Return the names of the simulations that once found something, or that show what is rare."""
    lines = (line.partition("#")[0].strip() for line in CORPUS.read_text().splitlines())
    return [line for line in lines if line]


def run_one(name: str) -> SimResult:
    """Run one simulation by its name: `seed 42`, or `small one 3:cut-after`."""
    kind, _, rest = name.partition(" ")
    if kind in ("seed", "train"):
        return run_seed(int(rest), is_train=kind == "train")
    if kind == "clusters":
        return run_clusters(int(rest))
    plan, _, listed = rest.rpartition(" ")
    outcomes = dict(each.split(":") for each in listed.split(",")) if ":" in listed else {}
    return exhaustive.run_scripted(
        exhaustive.by_name(plan), {int(n): EffectOutcome(way) for n, way in outcomes.items()}
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Simulate the daemon.")
    parser.add_argument("--seeds", type=int, default=500, help="new seeds to run (default: 500)")
    parser.add_argument("--trains", type=int, default=0, help="new seeds with trains to run (default: 0)")
    parser.add_argument("--clusters", type=int, default=0, help="new seeds with clusters (default: 0)")
    parser.add_argument("--first", type=int, help="first of the new seeds (default: drawn)")
    parser.add_argument("--no-corpus", action="store_true", help="leave the corpus out")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="simulations at once")
    parser.add_argument(
        "--small", choices=tuple(SMALL_STRIDES), default="all", help="how many of the small plans' runs"
    )
    parser.add_argument(
        "--small-first", type=int, default=0, metavar="N", help="first of the small plans' runs (default: 0)"
    )
    parser.add_argument("--marks", action="store_true", help="fail when some fault or edge never occurred")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--nodes", type=int, help="run one rollout over so many nodes, without faults")
    parser.add_argument("--replay", metavar="NAME", help="run one simulation again, and print its trace")
    return parser.parse_args()


def small_names(which: str, first: int = 0) -> Iterator[str]:
    """Yield the names of every so many-th simulation of the small plans; from 0, all quiet ones too."""
    stride = SMALL_STRIDES[which]
    if not stride:
        return
    quiet = (*exhaustive.SMALL, exhaustive.PREPARED_TOGETHER, exhaustive.TWO_NODES)
    if not first:
        yield from (exhaustive.name_of(small, {}) for small in quiet)
    cases = [*exhaustive.single_faults(), *exhaustive.fault_pairs()]
    for small, ways in cases[first::stride]:
        yield exhaustive.name_of(small, ways)


def run_many(names: Iterable[str], jobs: int = os.cpu_count() or 1) -> Iterator[SimResult]:
    """Run simulations in `jobs` processes; yield each result when it is ready."""
    # What is loaded by now stays, and a simulation leaves little: to collect often costs more than it frees.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    if jobs <= 1:
        for name in names:
            yield run_one(name)
            _collect_at_times()
        return
    # One at a time: with chunks of four a core could be idle at the end for seconds.
    with collected_state_dirs(), multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run_briefly, names)


def _run_briefly(name: str) -> SimResult:
    """Run one simulation in a worker; unread details of a passed one do not go through the pipe."""
    result = run_one(name)
    _collect_at_times()
    return result if result.violations else SimResult(name, [], result.coverage, [], result.steps)


_ended = itertools.count(1)


def _collect_at_times() -> None:
    if not next(_ended) % SIMULATIONS_PER_COLLECTION:
        garbage.collect_all()


def _run_large(nodes: int) -> int:
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    run = large_fleet.run_large_fleet(nodes)
    for text in run.result.violations:
        print(f"!! {text}")
    print(f"{run.done} of {nodes} nodes changed, {run.result.steps} steps, {run.seconds:.0f} s of CPU time")
    return 1 if run.result.violations or run.done != nodes else 0


def _replay(name: str) -> int:
    verdict = run_one(name)
    print("\n".join(verdict.trace))
    _print_result(verdict, shown=0)
    return 1 if verdict.violations else 0


def _print_result(result: SimResult, shown: int = TRACE_LINES_SHOWN) -> None:
    print(f"== {result.name}")
    for line in result.trace[-shown:] if shown else ():
        print(f"   {line}")
    for text in result.violations:
        print(f"!! {text}")
    print(f"replay: {sys.executable} -m tests.sim --replay {result.name!r}", flush=True)


if __name__ == "__main__":
    with note_installed():  # once: to register a kind builds the models of plans again
        sys.exit(main())
