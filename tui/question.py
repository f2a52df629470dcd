"""What a person is asked before something is done, and what is sent when they have said yes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolloutd.control import wire
from tui.glance import Waiting
from tui.model import Model
from tui.rights import Verdict
from tui.values import NodeState, RolloutState

TYPED_OF_DIGEST = 4
"""Characters of the digest that are typed before something that cannot be taken back."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the cursor is on; `shown` are the failures that were on the screen."""

    rollout: RolloutState | None = None
    node: NodeState | None = None
    node_name: str = ""
    gate: Waiting | None = None
    hold: wire.Hold | None = None
    freeze: wire.Freeze | None = None
    shown: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """Something that is asked before a deed; with `choices` one of them, with `must_be` exactly that."""

    name: str
    label: str
    initial: str = ""
    optional: bool = False
    choices: tuple[str, ...] = ()
    must_be: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent to the daemon, and the sentence that tells of it afterwards."""

    method: str
    path: str
    body: Mapping[str, Any]
    done: str


@dataclass(frozen=True, slots=True)
class Question:
    """What a person is asked before a deed; `grave` where it cannot be taken back."""

    title: str
    text: tuple[str, ...]
    fields: tuple[Field, ...]
    yes: str
    grave: bool = False


Answers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Deed:
    """What makes an action a deed.

    `lacks` says why it does not apply to a subject; empty when it does.
    """

    lacks: Callable[[Subject], str]
    may: Callable[[Model, Subject], Verdict]
    question: Callable[[Subject], Question]
    request: Callable[[Subject, Answers], Request]


REASON = Field("reason", "reason (kept in the audit)")
