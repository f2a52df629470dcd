"""The shapes of the API's JSON, as types, by subject; `wire.Rollout` is all that a reader needs.

Instants are RFC 3339 UTC strings, percent is a number from 0 to 100, absent is
null.  Nothing but the standard library is imported here: the console reads these
shapes and must start quickly; the command line reads them in its types alone.
The OpenAPI document is generated from these same types by the server.
"""

from rolloutd.control.wire.audit import Audit, AuditEntry, EventLine, Head, InFlightOf, Verdict
from rolloutd.control.wire.gates import Gate, GateState, Need, Needs, TeamNeed, Vote
from rolloutd.control.wire.inventory import Inventory, InventoryNode, Refreshing, Source
from rolloutd.control.wire.locks import Freeze, Hold, Holder, Lock, Locks, Released
from rolloutd.control.wire.nodes import Failure, LogLine, Node, NodeDetail, Nodes, Step, Why
from rolloutd.control.wire.people import PoolKeyShown, SettingsShown, Team, TeamShown, WhoAmI
from rolloutd.control.wire.plans import (
    Answerers,
    Hashes,
    Mistake,
    PlanContent,
    Preview,
    PreviewGate,
    PreviewNeeds,
    PreviewPool,
    PreviewTarget,
    PreviewWave,
    Submission,
    Upload,
    Validation,
)
from rolloutd.control.wire.rollouts import (
    Deleted,
    InFlight,
    Pool,
    Reason,
    Rollout,
    RolloutLine,
    Rollouts,
    RolloutState,
    Status,
)
from rolloutd.control.wire.service import Error, Health

__all__ = [
    "Answerers",
    "Audit",
    "AuditEntry",
    "Deleted",
    "Error",
    "EventLine",
    "Failure",
    "Freeze",
    "Gate",
    "GateState",
    "Hashes",
    "Head",
    "Health",
    "Hold",
    "Holder",
    "InFlight",
    "InFlightOf",
    "Inventory",
    "InventoryNode",
    "Lock",
    "Locks",
    "LogLine",
    "Mistake",
    "Need",
    "Needs",
    "Node",
    "NodeDetail",
    "Nodes",
    "PlanContent",
    "Pool",
    "PoolKeyShown",
    "Preview",
    "PreviewGate",
    "PreviewNeeds",
    "PreviewPool",
    "PreviewTarget",
    "PreviewWave",
    "Reason",
    "Refreshing",
    "Released",
    "Rollout",
    "RolloutLine",
    "RolloutState",
    "Rollouts",
    "SettingsShown",
    "Source",
    "Status",
    "Step",
    "Submission",
    "Team",
    "TeamNeed",
    "TeamShown",
    "Upload",
    "Validation",
    "Verdict",
    "Vote",
    "WhoAmI",
    "Why",
]
