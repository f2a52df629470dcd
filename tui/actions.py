"""The one registry of what can be done here: keys, key line, palette and help are made from it.

A *move* only changes what is seen; the screen it belongs to carries it out.  A
*deed* changes the world: deeds.py says what it asks and sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tui import deeds
from tui.question import Deed


@dataclass(frozen=True, slots=True)
class Action:
    """Something that can be done by a key; `places` are the screens whose key line shows it."""

    name: str
    key: str
    title: str
    help: str
    group: str
    places: frozenset[str] = field(default_factory=frozenset)
    deed: Deed | None = None

    @property
    def shown_key(self) -> str:
        """The key as people write it."""
        first = self.key.split(",")[0]
        return _KEYS.get(first, first)


_KEYS = {
    "question_mark": "?",
    "slash": "/",
    "escape": "esc",
    "enter": "↵",
    "tab": "tab",
    "colon": ":",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "ctrl+p": "^p",
    "space": "space",
}

EVERYWHERE = frozenset({"fleet", "rollout", "nodes", "node", "gates", "locks", "audit", "teams"})
OF_ROLLOUT = frozenset({"fleet", "rollout"})
OF_NODE = frozenset({"node", "nodes"})

ACTIONS: tuple[Action, ...] = (
    Action(
        "open",
        "enter",
        "open",
        "open what the cursor is on",
        "move",
        frozenset({"fleet", "rollout", "nodes", "gates", "audit", "locks"}),
    ),
    Action("back", "escape,backspace", "back", "back to where you came from", "move", EVERYWHERE - {"fleet"}),
    Action("fleet", "1", "fleet", "all rollouts", "move"),
    Action("gates", "2", "gates", "what waits for a decision", "move"),
    Action("locks", "3", "locks", "slots, holds and freezes", "move"),
    Action("audit", "4", "audit", "who did what", "move"),
    Action("teams", "5", "teams", "teams, members and limits", "move"),
    Action("nodes", "n", "nodes", "all nodes of the rollout, with why they wait", "move", OF_ROLLOUT),
    Action(
        "find",
        "slash",
        "find",
        "show only what contains a text; empty shows all",
        "move",
        frozenset({"nodes", "node", "audit", "locks"}),
    ),
    Action("sort", "o", "sort", "sort the nodes in another way", "move", frozenset({"nodes"})),
    Action(
        "whole",
        "l",
        "whole",
        "read the whole of a line that is longer than the screen",
        "move",
        frozenset({"nodes", "node", "audit", "gates", "locks"}),
    ),
    Action(
        "next_pane",
        "tab",
        "other pane",
        "go to the other half of the screen",
        "move",
        frozenset({"rollout", "node", "gates"}),
    ),
    Action("follow", "f", "follow", "follow the log's end, or stop following", "move", frozenset({"node"})),
    Action(
        "attempt",
        "left_square_bracket",
        "attempt",
        "show the log of the attempt before",
        "move",
        frozenset({"node"}),
    ),
    Action("attempt_later", "right_square_bracket", "later", "show the log of the attempt after", "move"),
    Action(
        "copy", "y", "copy", "copy what is shown to the terminal's clipboard", "move", frozenset({"node"})
    ),
    Action("verify", "v", "verify", "check that nobody has altered the audit", "move", frozenset({"audit"})),
    Action(
        "approve",
        "a",
        "approve",
        "say yes at the gate, with a reason",
        "decide",
        frozenset({"gates", "rollout", "fleet"}),
        deeds.APPROVE,
    ),
    Action(
        "reject",
        "x",
        "reject",
        "say no at the gate, with a reason",
        "decide",
        frozenset({"gates", "rollout"}),
        deeds.REJECT,
    ),
    Action(
        "withdraw",
        "w",
        "withdraw",
        "take your votes at the gate back",
        "decide",
        frozenset({"gates"}),
        deeds.WITHDRAW,
    ),
    Action(
        "pause",
        "p",
        "pause",
        "start no node of the rollout",
        "decide",
        OF_ROLLOUT,
        deeds.PAUSE,
    ),
    Action(
        "resume",
        "u",
        "resume",
        "lift a person's pause",
        "decide",
        OF_ROLLOUT,
        deeds.RESUME,
    ),
    Action(
        "cancel",
        "C",
        "cancel",
        "start nothing of it any more",
        "decide",
        OF_ROLLOUT,
        deeds.CANCEL,
    ),
    Action(
        "retry",
        "r",
        "retry",
        "let a failed node start anew when its turn comes",
        "decide",
        OF_NODE,
        deeds.RETRY,
    ),
    Action(
        "skip",
        "s",
        "skip",
        "leave a pending or failed node out",
        "decide",
        OF_NODE,
        deeds.SKIP,
    ),
    Action(
        "rollback",
        "b",
        "roll back",
        "bring a failed node back with the plan's rollback playbook",
        "decide",
        OF_NODE,
        deeds.ROLL_BACK,
    ),
    Action(
        "return",
        "e",
        "return",
        "put a node back in service that was left isolated",
        "decide",
        frozenset({"node"}),
        deeds.RETURN,
    ),
    Action("hold", "h", "hold", "take a node's slots for something else", "decide", OF_NODE, deeds.HOLD),
    Action(
        "release", "H", "release", "give a hold's slots back", "decide", frozenset({"locks"}), deeds.RELEASE
    ),
    Action(
        "freeze",
        "F",
        "freeze",
        "let nothing start",
        "decide",
        EVERYWHERE,
        deeds.FREEZE,
    ),
    Action("unfreeze", "U", "unfreeze", "lift a freeze", "decide", frozenset({"locks"}), deeds.UNFREEZE),
    Action("help", "question_mark", "keys", "all keys", "app", EVERYWHERE),
    Action("palette", "colon,ctrl+p", "commands", "find an action, a rollout or a node by name", "app"),
    Action("theme", "T", "theme", "dark or light", "app"),
    Action("quit", "q", "quit", "leave; nothing stops because of it", "app", frozenset({"fleet"})),
)
"""Everything, in the order of the key line."""

BY_NAME: Mapping[str, Action] = {action.name: action for action in ACTIONS}
