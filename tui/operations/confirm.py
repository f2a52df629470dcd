"""Operations as values: when they apply, who may run them, what they ask and what they send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolloutd.control.fleet import wire_fleet
from rolloutd.control.plans import wire_plans
from tui.state.model import Model
from tui.state.permissions import Permission
from tui.state.values import NodeState, RolloutState
from tui.widgets.summaries import PendingGate

CONFIRM_DIGEST_LENGTH = 4
"""Characters of the digest that a user types before an irreversible operation."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What an operation applies to.

    `shown_failures` are the failures that were on the screen, `review` what the daemon says of the gate,
    `shell` the command that opens a shell on the node.
    """

    rollout: RolloutState | None = None
    node: NodeState | None = None
    node_name: str = ""
    gate: PendingGate | None = None
    hold: wire_fleet.Hold | None = None
    freeze: wire_fleet.Freeze | None = None
    shown_failures: tuple[str, ...] | None = None
    review: wire_plans.Review | None = None
    shell: wire_fleet.ShellCommand | None = None


@dataclass(frozen=True, slots=True)
class InputField:
    """A field of a dialog; `choices`, `required_value` and `is_time` limit what it accepts."""

    name: str
    label: str
    initial: str = ""
    is_optional: bool = False
    choices: tuple[str, ...] = ()
    required_value: str = ""
    is_time: bool = False


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """A request to the daemon, the message after its success, and the command that then runs here."""

    method: str
    path: str
    body: Mapping[str, Any]
    success_message: str
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Confirmation:
    title: str
    text: tuple[str, ...]
    fields: tuple[InputField, ...]
    confirm_label: str
    is_irreversible: bool = False


FieldValues = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Operation:
    """An action that changes the fleet; `unavailable_reason` is empty where it applies."""

    unavailable_reason: Callable[[Selection], str]
    permission: Callable[[Model, Selection], Permission]
    confirmation: Callable[[Selection], Confirmation]
    request: Callable[[Selection, FieldValues], OperationRequest]


REASON_FIELD = InputField("reason", "reason (kept in the audit)")
