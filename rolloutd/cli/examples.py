"""Examples at the end of each command's help, as people use it at night."""

from __future__ import annotations

EXAMPLES = {
    "approve": (
        'approve web start --reason "read it, CHG-4711"',
        'approve web proceed --node n7 --reason "known bad disk"',
    ),
    "audit": ("audit web --since 1h", "audit --node n7 -n 20", "audit -f"),
    "freeze": ('freeze --reason "outage"', 'freeze --scope team/payments --until 8h --reason "sale"'),
    "hold": ('hold n7 --as ops --until 2h --reason "new disk"',),
    "logs": ("logs web n7 -f", "logs web n7 --attempt 1", "logs web --failed --tail 20"),
    "nodes": (
        "nodes web -l team=payments,rack!=r1 --phase failed",
        "nodes web --jq '.[] | select(.outcome == \"changed\") | .node'",
    ),
    "pause": ('pause web --reason "latency is up"', 'pause web --now --reason "it breaks nodes"'),
    "retry": (
        'retry web n7 n9 --reason "the mirror is back"',
        'retry web --failed --reason "the mirror is back"',
    ),
    "rollback": ('rollback web n7 --reason "it breaks logins"', 'rollback web --all --reason "bad release"'),
    "skip": (
        'skip web n7 --return --reason "serves as it is"',
        'skip web n7 --leave --reason "bad disk, keep it out"',
    ),
    "status": ("status", "status web -w", "status -o json"),
    "wait": ("wait web --for gate=continue --timeout 4h", "wait web --for node/n7=done"),
    "why": ("why web", "why web n7"),
}
"""Lines of each command; `web` is a plan."""


def format_examples(command: str) -> str | None:
    """Return the end of a command's help; None if it has no examples."""
    lines = [f"  rolloutctl {line}" for line in EXAMPLES.get(command, ())]
    return "\n".join(("examples:", *lines)) if lines else None
