"""What the daemon asks of the world: one Protocol per kind of outside thing.

The daemon and the driver know these and never an adapter; adapters know these
and never the daemon.  Each port has an in-memory twin beside its adapters'
contract suite (tests/contracts), and the twin and every real adapter pass the
same suite.  All instants are epoch seconds, all durations seconds.
"""

from rolloutd.ports.clocks import Alarm, Clock
from rolloutd.ports.nodes import (
    GROUPS,
    PROVIDER_ID,
    Examined,
    Found,
    Host,
    Inventory,
    Observer,
    Shell,
    ShellResult,
    Watch,
)
from rolloutd.ports.runs import RunEvent, Runner, RunRequest, RunState
from rolloutd.ports.shelves import Kept, Shelf
from rolloutd.ports.sources import Notifier, Pinned, Sources, TrafficProbe
from rolloutd.ports.steps import (
    Busy,
    Check,
    Failed,
    Isolator,
    Keeping,
    Look,
    Ok,
    Rehearsal,
    StepContext,
    StepResult,
    Unknown,
)
from rolloutd.ports.store import ClosedRollout, Entry, Remembered, Store
from rolloutd.ports.values import JSON

__all__ = [
    "GROUPS",
    "JSON",
    "PROVIDER_ID",
    "Alarm",
    "Busy",
    "Check",
    "Clock",
    "ClosedRollout",
    "Entry",
    "Examined",
    "Failed",
    "Found",
    "Host",
    "Inventory",
    "Isolator",
    "Keeping",
    "Kept",
    "Look",
    "Notifier",
    "Observer",
    "Ok",
    "Pinned",
    "Rehearsal",
    "Remembered",
    "RunEvent",
    "RunRequest",
    "RunState",
    "Runner",
    "Shelf",
    "Shell",
    "ShellResult",
    "Sources",
    "StepContext",
    "StepResult",
    "Store",
    "TrafficProbe",
    "Unknown",
    "Watch",
]
