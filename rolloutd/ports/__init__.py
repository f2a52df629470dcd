"""Ports: one Protocol per external system of the daemon.

The daemon and the drivers import ports and no adapter; adapters import ports and never the daemon.  A port's
fake and its real adapters pass the same contract suite.  Instants are epoch seconds, durations seconds.
"""

from rolloutd.ports.artifacts import Artifact, ArtifactStore
from rolloutd.ports.clocks import Clock, Scheduler
from rolloutd.ports.context import AdapterContext, InventorySnapshot
from rolloutd.ports.nodes import (
    GROUPS,
    PROVIDER_ID,
    WITHHELD,
    ConnectionDefaults,
    DiscoveredNode,
    Host,
    Inventory,
    Observer,
    Shell,
    ShellResult,
    SupportsPreflight,
    Watch,
)
from rolloutd.ports.runs import RunEvent, Runner, RunRequest, RunState
from rolloutd.ports.sources import Anchor, Notifier, PinnedSource, SourceStore, TrafficProbe
from rolloutd.ports.steps import (
    Busy,
    Check,
    Failed,
    IsolationStatus,
    Isolator,
    Ok,
    ProgressKind,
    ProgressReport,
    StepContext,
    StepResult,
    SupportsBlockerWatch,
    SupportsDryRun,
    SupportsHoldRelease,
    SupportsProgressReports,
    Unknown,
)
from rolloutd.ports.store import (
    AuditEntry,
    AuditReport,
    ClosedRollout,
    RolloutRecord,
    RowMismatch,
    Store,
)
from rolloutd.ports.types import JSON

__all__ = [
    "GROUPS",
    "JSON",
    "PROVIDER_ID",
    "WITHHELD",
    "AdapterContext",
    "Anchor",
    "Artifact",
    "ArtifactStore",
    "AuditEntry",
    "AuditReport",
    "Busy",
    "Check",
    "Clock",
    "ClosedRollout",
    "ConnectionDefaults",
    "DiscoveredNode",
    "Failed",
    "Host",
    "Inventory",
    "InventorySnapshot",
    "IsolationStatus",
    "Isolator",
    "Notifier",
    "Observer",
    "Ok",
    "PinnedSource",
    "ProgressKind",
    "ProgressReport",
    "RolloutRecord",
    "RowMismatch",
    "RunEvent",
    "RunRequest",
    "RunState",
    "Runner",
    "Scheduler",
    "Shell",
    "ShellResult",
    "SourceStore",
    "StepContext",
    "StepResult",
    "Store",
    "SupportsBlockerWatch",
    "SupportsDryRun",
    "SupportsHoldRelease",
    "SupportsPreflight",
    "SupportsProgressReports",
    "TrafficProbe",
    "Unknown",
    "Watch",
]
