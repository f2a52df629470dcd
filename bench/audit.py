"""How long the audit's chain takes to be verified, from the file and while a daemon writes to it.

The peer is sha256 over the same texts in memory, in a plain loop: what no
verification can be faster than.  Both are timed in turns in the same run.

    python bench/audit.py [--entries 100000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

from machines.model.events import RequestDenied
from machines.model.rollout import DAEMON
from rolloutd.audit import audit_chain
from rolloutd.store import SqliteBackend, open_store
from rolloutd.store.sqlite import database

WITHIN_S = 1.0
"""What is promised for 100,000 entries."""


def write_chain(path: Path, entries: int) -> list[str]:
    """Write a chain of entries as long as those of moves; return their texts."""
    texts = []
    with closing(database.open_writer(path)) as connection:
        connection.execute("BEGIN")
        previous = audit_chain.GENESIS_HASH
        for seq in range(1, entries + 1):
            body = {
                "actor": {"kind": "daemon", "name": "rolloutd", "uid": None},
                "at": 1_800_000_000.0 + seq / 7,
                "cause": "decided",
                "digest": "d" * 64,
                "event": "PhaseMoved",
                "fields": {
                    "at": seq / 7,
                    "attempt": 1,
                    "source": "pending",
                    "target": "isolating",
                    "text": "",
                },
                "node": f"node-{seq % 10_000}",
                "rollout": "sysctl-k7xq2",
                "seq": seq,
            }
            text = audit_chain.canonical_json(body)
            texts.append(text)
            previous = audit_chain.hash_entry(previous, text)
            connection.execute("INSERT INTO audit (seq, entry, hash) VALUES (?, ?, ?)", (seq, text, previous))
        connection.execute("COMMIT")
    return texts


def hashed(texts: list[str]) -> float:
    """Return how long the bare hashing of the texts takes, seconds."""
    began = time.perf_counter()
    previous = audit_chain.GENESIS_HASH
    for text in texts:
        previous = hashlib.sha256((previous + text).encode()).hexdigest()
    return time.perf_counter() - began


def from_file(path: Path) -> float:
    """Return how long verifying the file takes, seconds."""
    began = time.perf_counter()
    assert SqliteBackend(path).verify_chain().ok
    return time.perf_counter() - began


async def beside_writes(directory: Path) -> tuple[float, float]:
    """Return how long verifying takes while a store writes, and the longest a write had to wait."""
    store = await open_store(directory, compile_plan=lambda _: None)  # type: ignore[arg-type, return-value]
    over, longest = asyncio.Event(), 0.0

    async def write() -> None:
        nonlocal longest
        while not over.is_set():
            began = time.perf_counter()
            event = RequestDenied(DAEMON, "GET /v1/status", "a measurement", began)
            await store.commit([event], actor=DAEMON, cause="bench", at=began)
            longest = max(longest, time.perf_counter() - began)

    writing = asyncio.create_task(write())
    try:
        began = time.perf_counter()
        assert (await store.verify_audit()).ok
        return time.perf_counter() - began, longest
    finally:
        over.set()
        await writing
        await store.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path = directory / database.FILE_NAME
        texts = write_chain(path, args.entries)
        bare, file, live, waited = [], [], [], 0.0
        for _ in range(args.rounds):
            bare.append(hashed(texts))
            file.append(from_file(path))
            took, longest = asyncio.run(beside_writes(directory))
            live.append(took)
            waited = max(waited, longest)
    least, alone, beside = (statistics.median(each) for each in (bare, file, live))
    print(f"{args.entries} entries; medians of {args.rounds} rounds")
    print(f"bare sha256 in memory      {least:.3f} s")
    print(f"verify from the file       {alone:.3f} s, {alone / least:.2f} times the bare hashing")
    print(
        f"verify beside a writer     {beside:.3f} s, {beside / least:.2f} times; "
        f"no write waited over {waited:.3f} s"
    )
    met = max(alone, beside) * 100_000 / args.entries <= WITHIN_S
    print(f"100,000 entries within {WITHIN_S:.0f} s: {'yes' if met else 'NO'}")


if __name__ == "__main__":
    main()
