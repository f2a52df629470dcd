"""How long a list of 10,000 pods holds the event loop, beside a parse of the whole list.

    python -m bench pods [--pods N] [--rounds N]

The list is one answer, as of a server that ignores `limit`: a page has 500 objects at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable

from rolloutd.adapters.kubernetes.answer_slices import parse_answer
from rolloutd.adapters.kubernetes.pods import parse_pod
from tests.rolloutd.adapters.kubernetes.test_answer_slices import pod_list

AIM_MS = 20.0


async def main() -> None:
    """Print the longest pause of the loop, ours and the peer's."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    asked.add_argument("--pods", type=int, default=10_000)
    asked.add_argument("--rounds", type=int, default=5)
    options = asked.parse_args()
    body = json.dumps(pod_list(options.pods)).encode()
    sliced, whole = [], []
    for _ in range(options.rounds):
        sliced.append(await _longest_pause_ms(_in_slices(body)))
        whole.append(await _longest_pause_ms(_at_once(body)))
    print(
        f"pods: {options.pods} in {len(body) / 2**20:.0f} MiB: the loop pauses "
        f"{statistics.median(sliced):.1f} ms at most in the median of {options.rounds} rounds, "
        f"{max(sliced):.1f} ms in the worst (aim: {AIM_MS:g}); at once {statistics.median(whole):.0f} ms"
    )


async def _in_slices(body: bytes) -> None:
    await parse_answer(body, parse_pod)


async def _at_once(body: bytes) -> None:
    for each in json.loads(body)["items"]:
        parse_pod(each)


async def _longest_pause_ms(work: Awaitable[None]) -> float:
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest_s, before = max(longest_s, now - before), now

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await work
    await asyncio.sleep(0)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    return longest_s * 1000


if __name__ == "__main__":
    asyncio.run(main())
