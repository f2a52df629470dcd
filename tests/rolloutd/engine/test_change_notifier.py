"""The latest entries that the notifier keeps for streams, and what only the store has."""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.engine.change_notifier import MAX_RECENT_CHARS, MAX_RECENT_ENTRIES, ChangeNotifier
from rolloutd.ports import AuditEntry


def entries(*numbers: int, text: str = "{}") -> list[AuditEntry]:
    return [AuditEntry(number, text, "") for number in numbers]


def numbers(found: Sequence[AuditEntry] | None) -> list[int] | None:
    return None if found is None else [each.seq for each in found]


def test_recent_entries_are_in_memory() -> None:
    notifier = ChangeNotifier(4)
    notifier.notify_committed(entries(5, 6))
    notifier.notify_committed(entries(7))
    assert [numbers(notifier.recent_after(seq, 2)) for seq in (3, 4, 5, 6, 7, 99)] == [
        None,
        [5, 6],
        [6, 7],
        [7],
        [],
        [],
    ]


def test_old_entries_are_only_in_the_store() -> None:
    notifier = ChangeNotifier()
    notifier.notify_committed(entries(*range(1, MAX_RECENT_ENTRIES + 3)))
    assert notifier.recent_after(1, 1) is None
    assert numbers(notifier.recent_after(2, 1)) == [3]


def test_gap_and_long_entry_leave_nothing_in_memory() -> None:
    notifier = ChangeNotifier(1)
    notifier.notify_committed(entries(2))
    notifier.notify_committed(entries(9))
    assert notifier.recent_after(1, 9) is None
    assert notifier.recent_after(8, 9) is None
    notifier.notify_committed(entries(10))
    assert numbers(notifier.recent_after(9, 9)) == [10]
    notifier.notify_committed(entries(11, text="x" * (MAX_RECENT_CHARS + 1)))
    assert notifier.recent_after(9, 9) is None
