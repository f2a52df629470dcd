"""Fuzz inputs of preparation: what nodes answer about facts and snapshots."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from machines.model.node_snapshot import differences
from rolloutd.adapters.ssh.checkpoints import FORMAT, _digest, format_fact, parse_fact
from rolloutd.adapters.ssh.snapshot import _unpack, parse_snapshot
from rolloutd.ports import Checkpoint, StagedArtifact
from tests.rolloutd.adapters.ssh.test_snapshot import NODE_WITHOUT_TOOLS, SYSTEMD_NODE

DIGEST = "ab" * 32

_DONE = Checkpoint("app", "stage", "c", "d", "r1", 1.5, {"app": StagedArtifact("1", DIGEST, "/var/a")})
FACTS = (format_fact({("app", "stage"): _DONE}).encode(),)

SNAPSHOTS = (
    SYSTEMD_NODE.encode(),
    NODE_WITHOUT_TOOLS.encode(),
    b"gzip\nH4sIAAAAAAAAA3NIzUvhAgC/8WzYBQAAAA==\n",
)


def read_fact(data: bytes, _: Path) -> None:
    known = parse_fact(data.decode(errors="replace")) or {}
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        stages = json.loads(data)["stages"]  # its digest would hide it, so it gets one that fits
        known |= parse_fact(json.dumps({"format": FORMAT, "digest": _digest(stages), "stages": stages})) or {}
    assert parse_fact(format_fact(known)) == known


def read_snapshot(data: bytes, _: Path) -> None:
    text = data.decode(errors="replace")
    snapshot = parse_snapshot(_unpack(text) or text)
    assert differences(snapshot, snapshot) == ()
    differences(snapshot, {}, ["unit/*"])
