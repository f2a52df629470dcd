"""The API's client against a daemon that is slow to answer."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer

import pytest

from rolloutd.control import client
from rolloutd.control.client import Client


def test_silence_is_told_and_the_answer_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, sentences = threading.Event(), list[str]()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.wait()
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n{}")

        def log_message(self, *_: object) -> None:
            pass

    def report(sentence: str) -> None:
        sentences.append(sentence)
        told.set()

    monkeypatch.setattr(client, "SILENCE_S", 0.01)
    with UnixStreamServer(str(tmp_path / "s"), Answer) as server:
        threading.Thread(target=server.handle_request).start()
        assert Client(tmp_path / "s", on_silence=report).get("/v1/health") == {}
    assert sentences == [f"the daemon at {tmp_path}/s has not answered for 0.01s; still waiting"]
