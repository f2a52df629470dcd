"""The figures of a forecast as texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from machines.model.timefmt import format_duration
from rolloutd.cli.output import AGE_UNITS, format_local, sanitize
from rolloutd.texts.formats import pluralize

if TYPE_CHECKING:
    from rolloutd.control.rollouts.wire import Instants, Seconds, TrainForecast


def format_instants(found: Instants) -> str:
    """Return `14:10:00 (p90 15:02:11)`, or that it does not happen."""
    if found["p50"] is None:
        return "never, as it is"
    p90 = "never" if found["p90"] is None else format_local(found["p90"])
    return f"{format_local(found['p50'])} (p90 {p90})"


def format_train(found: TrainForecast) -> str:
    """Return `train kernel-week saves 12 outages and 2h of downtime from now on`."""
    outages, saved_s = pluralize(found["outages_saved"], "outage"), found["downtime_saved_s"]
    downtime = format_duration(abs(saved_s), AGE_UNITS)
    time = f"and {downtime} of downtime" if saved_s >= 0 else f"but costs {downtime} of downtime more"
    return f"train {sanitize(found['name'])} saves {outages} {time} from now on"


def format_range(found: Seconds) -> str:
    """Return `2h to 3h`, the median and the 90th percentile of a duration."""
    p50, p90 = found["p50"], found["p90"]
    if p50 is None:
        return "for ever, as it is"
    longest = "ever" if p90 is None else format_duration(p90, AGE_UNITS)
    return f"{format_duration(p50, AGE_UNITS)} to {longest}"
