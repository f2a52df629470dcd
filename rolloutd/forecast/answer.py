"""Forecasts as JSON, and the sentences of what they assume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from machines.facts.index import Index
from machines.forecast.model import Assumption, AssumptionCode, NodeForecast, RolloutForecast, Spread
from machines.model.timefmt import format_duration, format_rfc3339
from rolloutd.texts.formats import pluralize

JSON = dict[str, Any]


def forecast_answer(
    index: Index, found: RolloutForecast, seed: int, deadline: tuple[float, float] | None = None
) -> JSON:
    """Return a forecast as the API answers it (wire_forecasts.Forecast).

    `deadline`: until when a vote costs nothing (epoch seconds), and what one costs after that.
    """
    return {
        "rollout": found.rollout,
        "made_at": format_rfc3339(found.made_at),
        "draws": found.draws,
        "seed": seed,
        "assumptions": [
            {"code": each.code.value, "text": describe_assumption(each)} for each in found.assumptions
        ],
        "ends_at": _instants(found.ends_at),
        "work_s": _seconds(found.work_s),
        "stays_open": found.stays_open,
        "nodes": [_node(index, found.rollout, each) for each in found.nodes],
        "pools": _groups(found.nodes, lambda node: _pools(index, found.rollout, node)),
        "teams": _groups(found.nodes, lambda node: _team(index, found.rollout, node)),
        "waves": _groups(found.nodes, lambda node: (index.target(found.rollout, node).wave,)),
        "gates": [
            {"gate": each.gate.value, "wave": each.wave or None, "asked_at": _instants(each.asked_at)}
            for each in found.gates
        ],
        "waits": _waits(found.waits),
        "bottleneck": None
        if found.bottleneck is None
        else {
            "kind": found.bottleneck.kind.value,
            "name": found.bottleneck.name,
            "saves_s": round(found.bottleneck.saves_s, 1),
        },
        "train": None
        if found.train is None
        else {
            "name": found.train.train,
            "outages_saved": found.train.outages_saved,
            "downtime_saved_s": round(found.train.downtime_saved_s, 1),
        },
        "vote_deadline": None
        if deadline is None
        else {"yes_by": format_rfc3339(deadline[0]), "costs_s": round(deadline[1], 1)},
    }


def difference(ends: tuple[Spread, Spread]) -> JSON:
    """Return how much later the second forecast ends, negative for earlier; null where one never does."""
    first, second = ends
    return {
        "ends_at_s": {
            "p50": _minus(second.p50, first.p50),
            "p90": _minus(second.p90, first.p90),
        }
    }


def _minus(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else round(later - earlier, 1)


def _node(index: Index, rollout: str, found: NodeForecast) -> JSON:
    return {
        "node": found.node,
        "team": index.target(rollout, found.node).team,
        "starts_at": _instants(found.starts_at),
        "ends_at": _instants(found.ends_at),
        "waits": _waits(found.waits),
    }


def _pools(index: Index, rollout: str, node: str) -> Iterable[str]:
    return index.target(rollout, node).pools


def _team(index: Index, rollout: str, node: str) -> Iterable[str]:
    team = index.target(rollout, node).team
    return () if team is None else (team,)


def _groups(nodes: Iterable[NodeForecast], names_of: Any) -> list[JSON]:
    """Return when the first node of each group starts and the last one is back."""
    groups: dict[str, list[NodeForecast]] = {}
    for node in nodes:
        for name in names_of(node.node):
            groups.setdefault(name, []).append(node)
    return [
        {
            "name": name,
            "nodes": len(members),
            "starts_at": _instants(_extreme(min, [each.starts_at for each in members])),
            "ends_at": _instants(_extreme(max, [each.ends_at for each in members])),
        }
        for name, members in sorted(groups.items())
    ]


def _extreme(choose: Any, spreads: list[Spread]) -> Spread:
    """Return the first start or the last end of the nodes; None for the end if one never ends."""
    sides = []
    for values in ([each.p50 for each in spreads], [each.p90 for each in spreads]):
        known = [value for value in values if value is not None]
        is_open = len(known) < len(values) and choose is max
        sides.append(None if is_open or not known else choose(known))
    return Spread(*sides)


def _instants(found: Spread) -> JSON:
    return {"p50": _instant(found.p50), "p90": _instant(found.p90)}


def _instant(at: float | None) -> str | None:
    return None if at is None else format_rfc3339(at)


def _seconds(found: Spread) -> JSON:
    return {
        name: None if value is None else round(value, 1)
        for name, value in zip(("p50", "p90"), (found.p50, found.p90), strict=True)
    }


def _waits(waits: Mapping[Any, float]) -> JSON:
    ordered = sorted(waits.items(), key=lambda item: (-item[1], item[0].value))
    return {code.value: round(seconds, 1) for code, seconds in ordered if round(seconds, 1)}


_TEXTS = {
    AssumptionCode.TRAFFIC_IDLE: "nodes with traffic probes are idle when their turn comes",
    AssumptionCode.TRAFFIC_HISTORY: "traffic keeps each node waiting as long as one of {nodes} nodes before",
    AssumptionCode.ORDER_OF_ONE_WALK: "all draws start nodes in the order of one walk with median durations",
    AssumptionCode.FEWER_DRAWS: "{draws} draws show the spread, because {nodes} nodes are ahead",
    AssumptionCode.NO_BOTTLENECK: "no bottleneck is searched, because {nodes} nodes are ahead",
}


def describe_assumption(found: Assumption) -> str:
    """Return an assumption as a sentence without its period."""
    params = found.params
    match found.code:
        case AssumptionCode.APPROVE_AFTER:
            after = params["after_s"]
            if after is None:
                return "no gate gets its votes"
            return f"each gate gets its votes {format_duration(float(str(after)))} after it is asked"
        case AssumptionCode.FAILURE_RATE:
            rate = 100.0 * float(str(params["rate"]))
            return f"{rate:.3g} % of the attempts fail, and each failed node is tried again after the votes"
        case AssumptionCode.NODES_HEALTHY:
            nodes = int(str(params["nodes"]))
            return f"{pluralize(nodes, 'node')} not known to be up {'is' if nodes == 1 else 'are'} up"
        case AssumptionCode.PARALLEL_RUNS:
            runs, longer = int(str(params["runs"])), 100.0 * float(str(params["longer"]))
            delay = f", and so many take {longer:.0f} % longer than one alone" if longer >= 1.0 else ""
            return f"at most {pluralize(runs, 'run')} at once{delay}"
        case AssumptionCode.COMMON_DEVIATION:
            share = 100.0 * float(str(params["share"]))
            return f"all steps together take {share:.2g} % longer or less than those before"
        case AssumptionCode.HORIZON:
            return f"nothing is forecast after {format_rfc3339(float(str(params['until'])))}"
        case _:
            return _TEXTS[found.code].format(**params)
