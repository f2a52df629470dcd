"""Serializers of digests and verdicts."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from machines.model.plan import Digest
from machines.model.rollout import Verdict
from rolloutd.control.formats import format_timestamp
from rolloutd.control.plans import wire_plans


def hashes(digest: Digest) -> wire_plans.Hashes:
    return cast("wire_plans.Hashes", asdict(digest))


def verdict(found: Verdict) -> wire_plans.Verdict:
    return {
        "id": found.id,
        "change": found.change,
        "class": ",".join(f"{key}={value}" for key, value in found.host_class.items()) or "all",
        "rollout": found.rollout,
        "node": found.node,
        "step": found.step,
        "text": found.text,
        "at": format_timestamp(found.at),
    }
