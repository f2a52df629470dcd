"""How many runs a machine may have, by measured runs of a modelled machine."""

from __future__ import annotations

import asyncio

from rolloutd.adapters.ansible.run_slots import UNMEASURED, RunSlots

CORES = 4


def settle(slots: RunSlots, *, cpu_s: float, wait_s: float, cores: int = CORES) -> int:
    """Let as many equal runs as are allowed share the cores, again and again; return their number."""
    for _ in range(200):
        runs = slots.status.parallel
        # Runs that need more than all cores last as long as the cores take for their CPU time.
        duration_s = max(cpu_s + wait_s, runs * cpu_s / cores)
        slots.record_end(cpu_s, duration_s)
    return slots.status.parallel


def test_number_follows_cpu_time_of_runs() -> None:
    assert RunSlots(None, CORES).status.parallel == UNMEASURED
    assert settle(RunSlots(None, CORES), cpu_s=1.0, wait_s=9.0) == 36  # 90 % of four cores
    assert settle(RunSlots(None, 8), cpu_s=1.0, wait_s=9.0, cores=8) == 72


def test_busy_cores_get_few_runs_and_waiting_ones_many() -> None:
    assert settle(RunSlots(None, CORES), cpu_s=1.0, wait_s=0.0) == 2 * CORES
    assert settle(RunSlots(None, CORES), cpu_s=0.1, wait_s=600.0) == 16 * CORES


def test_overloaded_machine_comes_down() -> None:
    slots = RunSlots(None, CORES)
    assert settle(slots, cpu_s=0.1, wait_s=600.0) == 16 * CORES
    assert settle(slots, cpu_s=1.0, wait_s=3.0) <= 16


def test_number_of_settings_stays() -> None:
    assert settle(RunSlots(3, CORES), cpu_s=0.1, wait_s=600.0) == 3


async def test_queue_names_nodes_that_wait() -> None:
    slots = RunSlots(1)
    await slots.acquire("n1")
    assert (slots.status.active, slots.status.waiting) == (1, {})
    waits = asyncio.create_task(slots.acquire("n2"))
    await asyncio.sleep(0)
    assert list(slots.status.waiting) == ["n2"]
    slots.release()
    await waits
    assert (slots.status.active, slots.status.waiting) == (1, {})
    slots.take()  # found again after a restart
    assert slots.status.active == 2
