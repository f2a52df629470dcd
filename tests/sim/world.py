"""The world as it really is: nodes, what isolates them, playbook runs and their log.

It outlives every daemon and believes none.  Whatever happens here is told to
the court at once, in the order of its happening.  A node is out of service when
something isolates it; each kind of isolator is one bit, as a flag in a load
balancer is, and only the world knows who set it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from rolloutd.ports import Failed, Ok, RunRequest, Unknown
from tests.sim.court import Court
from tests.sim.faults import Fate, Mischief, Peace, Way
from tests.sim.loop import Process, SimLoop
from tests.sim.seeds import Chances, Marks

START = 1_800_000_000.0
"""Some instant: 2027-01-15 08:00 UTC, a Friday."""

KEPT_KIND = "kubernetes"
"""The isolation that is left standing for whoever holds the node."""

FOREIGN_KIND = "command"
"""The kind of isolation that other people use too."""

SLOW_S = 55.0
"""How long a slow answer takes: just within what is waited for."""

UNDOING_S = 120.0
"""So long after an undo it may be repeated, because its answer was lost."""

UNAWARE_S = 60.0
"""So long after somebody undid an isolation a run may begin that was on its way."""

T = TypeVar("T")


@dataclass(slots=True)
class Bit:
    """One way of being out of service: `foreign` when somebody else said so first.

    While it is only `gentle` new work stays away and nothing was driven off.
    `lost_at` is when somebody last undid what we had done, by the monotonic clock;
    `kept` says that we have left it set for whoever held the node.
    """

    is_set: bool = False
    gentle: bool = False
    foreign: bool = False
    ours: str = ""
    lost_at: float = -math.inf
    kept: bool = False


@dataclass(slots=True)
class Run:
    """One run: its wrapper on the daemon's machine and its work on the node."""

    handle: str
    request: RunRequest
    claimed_by: str = ""
    wrapper: bool = True
    result: Ok | Failed | Unknown | None = None
    percent: float = 0.0


@dataclass(slots=True)
class Machine:
    """A node: `red` keeps its checks from passing, `stuck` keeps its isolation from ending.

    `traffic` is what its clients do there; while it is `blind` nobody can say.
    """

    name: str
    labels: dict[str, str]
    up: bool = True
    red: bool = False
    stuck: bool = False
    traffic: bool = False
    blind: bool = False
    listed: bool = True
    version: str = "old"
    bits: dict[str, Bit] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    looked: bool = False
    undone_at: float = -UNDOING_S

    def bit(self, kind: str) -> Bit:
        """Return one kind of isolation."""
        return self.bits.setdefault(kind, Bit())

    @property
    def foreign(self) -> bool:
        """Whether it is out of service, and not for a rollout of ours."""
        return any(bit.foreign or bit.kept for bit in self.bits.values())

    @property
    def kept(self) -> str:
        """The kind of isolation that was left standing for whoever held the node."""
        return next((kind for kind, bit in self.bits.items() if bit.kept), "")

    @property
    def ours(self) -> set[str]:
        """The rollouts whose isolation stands."""
        return {bit.ours for bit in self.bits.values() if bit.ours}


class World:
    """Everything outside the daemon, at one instant of virtual time."""

    def __init__(self, loop: SimLoop, chances: Chances, mischief: Mischief, marks: Marks) -> None:
        self.loop = loop
        self.chances = chances
        self.mischief = mischief
        self.marks = marks
        self.machines: dict[str, Machine] = {}
        self.runs: dict[str, Run] = {}
        self.isolators: dict[str, tuple[str, ...]] = {}
        self.skew_s = 0.0
        self.epoch = 0
        self.taken_over_at = 0.0
        self.source_fails = False
        self.over = False
        self.trace: list[str] = []
        self.upon: dict[str, Callable[[], object]] = {}
        self.court = Court(self.now, loop.time)

    # -- time and luck

    def now(self) -> float:
        """Return the wall clock, epoch seconds."""
        return START + self.loop.time() + self.skew_s

    async def latency(self, mean_s: float) -> None:
        """Take a while."""
        await asyncio.sleep(self.chances.latency.expovariate(1.0 / mean_s))

    def make_peace(self) -> None:
        """Let nothing go wrong any more, and mend what is broken."""
        self.mischief = Peace()
        self.source_fails = False
        for machine in self.machines.values():
            machine.up, machine.red, machine.stuck, machine.listed = True, False, False, True
            machine.traffic = machine.blind = False
            self.uncordon(machine)

    def note(self, what: str) -> None:
        """Write a line of the trace, and let happen what waits for it."""
        self.trace.append(f"{self.loop.time():.3f} {what}")
        if what in self.upon:
            self.upon[what]()

    async def cut(self, process: Process) -> NoReturn:
        """End a process here and now, as a power cut does: nothing after this line is ever run."""
        self.note(f"cut {process.name}")
        process.alive = False
        await self.loop.create_future()
        raise AssertionError("a dead process went on")

    async def effect(self, by: Process, label: str, act: Callable[[], T], *, refused: Callable[[], T]) -> T:
        """Let a daemon change something: well, or as the mischief will have it."""
        if self.over:
            return refused()
        way = self.mischief.way(label)
        await self.latency(0.5)
        if self.over:  # whoever was on their way when all ended is only being buried
            return refused()
        if way is Way.CUT_BEFORE:
            await self.cut(by)
        if way is Way.FAILS:
            self.note(f"refused {label}")
            return refused()
        self.note(label)
        result = act()
        if way is Way.TWICE:
            result = act()
        if way is Way.CUT_AFTER:
            await self.cut(by)
        # What is slow is the answer.  An act that lands long after its daemon was deposed, as slow ones
        # would, nothing but a fence on the node could refuse; there is one for runs.
        await asyncio.sleep(SLOW_S if way is Way.SLOW else 0.0)
        await self.latency(0.2)
        if way is Way.LOST:
            raise TimeoutError(f"no answer to {label}")
        return result

    # -- in and out of service

    def isolate(self, node: str, kind: str, rollout: str, *, gentle: bool) -> None:
        """Set one bit for a rollout."""
        bit = self.machines[node].bit(kind)
        bit.gentle = gentle and (bit.gentle or not bit.is_set)
        bit.is_set, bit.ours = True, rollout
        self.court.tell("isolated", rollout=rollout, node=node)

    def restore(self, node: str, kind: str, rollout: str, prior: Any, held: str = "") -> None:
        """Make one bit what it was before, or leave a cordon standing for whoever holds the node."""
        machine = self.machines[node]
        bit = machine.bit(kind)
        was_set = prior is not None and prior["isolated"]
        if bit.foreign and not was_set:
            self.court.accuse(f"{rollout} undid a foreign cordon of {node}")
            bit.foreign = False
        bit.kept = kind == KEPT_KIND and bool(held) and bool(bit.kept or bit.ours) and not was_set
        bit.is_set, bit.foreign = was_set or bit.kept, was_set
        bit.gentle = False
        machine.undone_at = self.loop.time()
        had, bit.ours = bit.ours, ""
        if machine.ours:
            return
        machine.looked = False
        if had:
            self.court.tell("back", rollout=rollout, node=node)

    def let_go(self, node: str) -> None:
        """Put a node in service that was left out of it for whoever held it."""
        for bit in self.machines[node].bits.values():
            if bit.kept:
                bit.is_set = bit.kept = False
                self.marks.hit("fault:held-during-its-attempt")

    def undo_ours(self, machine: Machine) -> bool:
        """Let somebody put a node in service that we isolated; say whether there was anything to undo."""
        standing = [bit for bit in machine.bits.values() if bit.ours and bit.is_set and not bit.foreign]
        for bit in standing:
            bit.is_set, bit.lost_at = False, self.loop.time()
        if standing:
            self.note(f"somebody puts {machine.name} in service")
        return bool(standing)

    def put_in_service(self, machine: Machine) -> None:
        """Let somebody put a node in service by hand that nothing but a hold says to be isolated."""
        for bit in machine.bits.values():
            rollout, bit.ours = bit.ours, ""
            bit.is_set = bit.foreign
            if rollout and not machine.ours:
                self.court.tell("back", rollout=rollout, node=machine.name)
        machine.looked = False

    def cordon(self, machine: Machine) -> bool:
        """Let somebody else take a node out of service, unless we are at it; say whether they did.

        A bit has no owner: what is set while an undo may still be repeated cannot be told from ours.
        """
        repeated = self.loop.time() < machine.undone_at + UNDOING_S or self.court.is_perhaps_out(machine.name)
        if machine.looked or machine.ours or repeated:
            return False
        bit = machine.bit(FOREIGN_KIND)
        bit.is_set = bit.foreign = True
        self.note(f"foreign cordon {machine.name}")
        return True

    def uncordon(self, machine: Machine) -> None:
        """Let somebody else put back what they took out."""
        bit = machine.bit(FOREIGN_KIND)
        if bit.foreign and not bit.ours:
            bit.is_set = bit.foreign = machine.looked = False

    # -- runs

    def spawn(self, handle: str, request: RunRequest) -> None:
        """Start a run's wrapper; it claims its run a moment later."""
        if handle not in self.runs:
            self.runs[handle] = Run(handle, request)
        run = self.runs[handle]
        self.loop.apart(self.chances.latency.expovariate(1.0 / 0.1), lambda: self._claim(run))

    def _claim(self, run: Run) -> None:
        if run.claimed_by or not run.wrapper:
            return
        run.claimed_by = "wrapper"
        self.loop.apart(self.chances.latency.expovariate(1.0 / 1.0), lambda: self._begin(run))

    def _begin(self, run: Run) -> None:
        machine = self.machines[run.request.node]
        if not run.wrapper:
            return
        if not machine.up:
            run.result = Failed(f"{machine.name} was unreachable")
            return
        self.court.runs(run.handle, machine.name, rollout_of(run.handle), machine.ours, self._lacking(run))
        machine.runs[run.handle] = run
        run.percent = 10.0
        self.note(f"begin {run.handle}")
        fate = self.mischief.fate()
        length_s = 20.0 + self.chances.latency.random() * 60.0
        if fate in (Fate.KILLED, Fate.ORPHANED):
            orphan = fate is Fate.ORPHANED
            self.loop.apart(length_s * self.chances.latency.random(), lambda: self.kill(run, orphan=orphan))
        if fate is Fate.HANGS:
            length_s = run.request.timeout_s
        result = Ok("changed") if fate is not Fate.FAILS else Failed("a task failed: no such package")
        result = Failed("its time limit passed") if fate is Fate.HANGS else result
        self.loop.apart(length_s, lambda: self._end(run, result))

    def _lacking(self, run: Run) -> list[str]:
        """Return the isolators of the run's rollout that do not stand on its node, since longer than now."""
        machine = self.machines[run.request.node]
        kinds = self.isolators.get(rollout_of(run.handle), ())
        gone = [kind for kind in kinds if not machine.bit(kind).is_set]
        return [kind for kind in gone if machine.bit(kind).lost_at < self.loop.time() - UNAWARE_S]

    def _end(self, run: Run, result: Ok | Failed) -> None:
        machine = self.machines[run.request.node]
        if machine.runs.pop(run.handle, None) is None:
            return
        if isinstance(result, Ok):
            machine.version = str(run.request.variables.get("version", "?"))
        self.note(f"end {run.handle}")
        self.court.ran(machine.name, rollout_of(run.handle))
        if run.wrapper and run.result is None:
            run.result, run.percent = result, 100.0

    def kill(self, run: Run, *, orphan: bool) -> None:
        """End a run's wrapper without a word; its work on the node goes on if it is orphaned."""
        if run.result is not None or not run.wrapper:
            return
        run.wrapper = False
        self.note(f"kill {run.handle}")
        if not orphan:
            self._leave(run)

    def cancel(self, run: Run) -> None:
        """End a run, its wrapper and its work."""
        self._leave(run)
        run.wrapper, run.result = False, run.result or Failed("cancelled")

    def _leave(self, run: Run) -> None:
        if self.machines[run.request.node].runs.pop(run.handle, None):
            self.court.ran(run.request.node, rollout_of(run.handle))

    def sweep(self, node: str, keep: str | None, why: str) -> None:
        """End the processes of all runs on a node but one's."""
        for run in list(self.machines[node].runs.values()):
            if run.handle == keep:
                continue
            self._leave(run)
            if run.wrapper and run.result is None:
                run.result = Failed(why)

    def lose_power(self) -> None:
        """End every wrapper: the daemon's whole machine went down."""
        self.marks.hit("fault:machine-down")
        for run in self.runs.values():
            self.kill(run, orphan=self.chances.faults.random() < 0.5)

    # -- the inventory

    def labels(self) -> Mapping[str, Mapping[str, str]]:
        """Return the labels of all nodes that the inventory has."""
        return {m.name: m.labels for m in self.machines.values() if m.listed}

    def listed(self) -> Sequence[Machine]:
        """Return the nodes that the inventory has."""
        return [machine for machine in self.machines.values() if machine.listed]


def rollout_of(handle: str) -> str:
    """Return the rollout of a run, by its handle."""
    return handle.partition(".")[0]
