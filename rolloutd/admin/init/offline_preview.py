"""Preview of a plan by settings and an inventory alone, before any daemon runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.projection import Projection
from machines.model.rollout import Actor, ActorKind
from rolloutd import planfile
from rolloutd.adapters.sources.tree_store import TREE_KIND
from rolloutd.commands.submit import resolve_by_facts
from rolloutd.control.plans import wire_plans
from rolloutd.control.plans.preview import preview
from rolloutd.engine.background.inventory_merge import merge_inventories
from rolloutd.errors import InvalidFile
from rolloutd.files.source_archive import tree_hash
from rolloutd.planfile.playbooks import playbook_diagnostics
from rolloutd.planfile.prepare_source import NOT_FORCED, resolve_prepare
from rolloutd.ports import DiscoveredNode, PinnedSource
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits

JSON = Any


def preview_offline(
    settings: Settings, reported: Sequence[DiscoveredNode], plan_file: Path, tree: Path, user: str, now: float
) -> wire_plans.Preview:
    """Return what the daemon would show for this plan; raises InvalidFile and Refused."""
    merged = merge_inventories(reported)
    compiler = TeamPlanCompiler(settings.teams)
    facts = Projection.build(
        FactsSnapshot(nodes=tuple(merged.nodes.values())), compile_limits(settings), compiler
    )
    plan = planfile.read(plan_file.read_bytes(), plan_file.name)
    if diagnostics := playbook_diagnostics(plan, tree):
        raise InvalidFile(diagnostics)
    plan = resolve_prepare(plan, tree, NOT_FORCED)
    pinned = PinnedSource(TREE_KIND, tree_hash(tree))
    connections: Mapping[str, Mapping[str, JSON]] = merged.connections
    draft = resolve_by_facts(facts, settings, connections, plan, pinned)
    return preview(settings, draft, Actor(ActorKind.PERSON, user, os.getuid()), now)
