"""Serializers of digests and verdicts."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from machines.model.plan import Digest
from machines.model.rollout import Verdict
from rolloutd.control.formats import fill
from rolloutd.control.plans import wire_plans


def hashes(digest: Digest) -> wire_plans.Hashes:
    return cast("wire_plans.Hashes", asdict(digest))


def verdict(found: Verdict) -> wire_plans.Verdict:
    host_class = ",".join(f"{key}={value}" for key, value in found.host_class.items()) or "all"
    return fill(wire_plans.Verdict, found, **{"class": host_class})
