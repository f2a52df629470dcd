"""Log lines that repeat: merged, counted, and never the reason for a full disk."""

from __future__ import annotations

import logging

from rolloutd.service.logs import MAX_REPEATS, REPEAT_WINDOW_S, RepeatFilter, TextFormatter


def record(message: str, at: float, level: int = logging.ERROR, line: int = 1) -> logging.LogRecord:
    made = logging.LogRecord("asyncio", level, "/x.py", line, message, (), None)
    made.created = at
    return made


def test_repeated_errors_are_merged_and_counted() -> None:
    merging = RepeatFilter()
    lines = [record(f"socket.accept() out of system resource fd={number}", 100.0) for number in range(5000)]
    assert sum(merging.filter(line) for line in lines) == MAX_REPEATS
    later = record("socket.accept() out of system resource fd=7", 100.0 + REPEAT_WINDOW_S)
    assert merging.filter(later)
    assert later.getMessage().endswith(f"({5000 - MAX_REPEATS} more like this before)")


def test_different_lines_and_news_are_all_written() -> None:
    merging = RepeatFilter()
    assert all(merging.filter(record("a", 1.0, line=number)) for number in range(100))
    assert all(merging.filter(record("moved", 1.0, logging.INFO)) for _ in range(100))
    assert all(merging.filter(record("rare", 1000.0 * number)) for number in range(100))


def test_text_of_others_looks_like_no_entry() -> None:
    text = TextFormatter().format(record("node a\nINFO rolloutd: all is well\r\x1b[2J\u202e", 1.0))
    assert (
        text
        == "1970-01-01T00:00:01Z ERROR asyncio: node a\n  INFO rolloutd: all is well\ufffd\ufffd[2J\ufffd"
    )
