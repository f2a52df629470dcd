"""A receiver of rolloutd's webhook: a ticket for each waiting gate, and a vote for each approved ticket.

    python3 receiver.py --listen 127.0.0.1:8099 --webhook-key hook.key --vote-key tickets.key \
        --approve-key approve.key --tickets DIR

POST /rolloutd is the webhook.  POST /tickets/ID/approve, with `Authorization: Bearer KEY`, is what the
ticket system calls when a person has approved; its body is {"person": "a.larsen@example.com"}.
"""

from __future__ import annotations

import argparse
import base64
import hmac
import json
import os
import re
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MAX_BODY_BYTES = 1_000_000
"""Five times the largest message of rolloutd."""

MAX_AGE_S = 300.0
"""As Standard Webhooks proposes: an older request may be a copy of a recorded one."""

TIMEOUT_S = 30.0
"""Of a read, and of rolloutctl: both take less than a second."""

TICKET = re.compile(r"/tickets/([\w.-]{1,200})/approve")


class BadRequest(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Receiver(BaseHTTPRequestHandler):
    """Handles one request; `options` are those of the command line."""

    options: argparse.Namespace
    timeout = TIMEOUT_S

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length") or 0)
            if length > MAX_BODY_BYTES:
                raise BadRequest(413, "the body is too long")
            body = self.rfile.read(length)
            if self.path == "/rolloutd":
                self.receive(body)
            elif ticket := TICKET.fullmatch(self.path):
                self.approve(ticket[1], body)
            else:
                raise BadRequest(404, "there is nothing here")
            self.answer(200, "taken")
        except BadRequest as error:
            self.answer(error.status, str(error))
        except (ValueError, KeyError, TypeError) as error:
            self.answer(400, f"the body is malformed: {type(error).__name__}")

    def receive(self, body: bytes) -> None:
        """Open a ticket for each gate that waits; a repeated message changes nothing."""
        self.check_signature(body)
        for each in json.loads(body)["notifications"]:
            if each["event"] == "gate-waits":
                name = "-".join(filter(None, (each["rollout"], each["gate"], each["wave"])))
                ticket = {key: each[key] for key in ("rollout", "gate", "wave", "title", "text")}
                try:
                    with (self.options.tickets / f"{name}.json").open("x") as file:
                        json.dump({**ticket, "state": "open"}, file)
                except FileExistsError:
                    continue

    def check_signature(self, body: bytes) -> None:
        """Refuse a request that is forged or old."""
        name, at = self.headers.get("webhook-id", ""), self.headers.get("webhook-timestamp", "")
        key = base64.b64decode(self.options.webhook_key.read_text().strip().removeprefix("whsec_"))
        digest = hmac.digest(key, f"{name}.{at}.".encode() + body, "sha256")
        expected = f"v1,{base64.b64encode(digest).decode()}"
        given = self.headers.get("webhook-signature", "").split(" ")
        if not any(hmac.compare_digest(expected.encode(), each.encode()) for each in given):
            raise BadRequest(401, "the signature is wrong")
        if abs(time.time() - int(at)) > MAX_AGE_S:
            raise BadRequest(401, "the request is old; check both clocks")

    def approve(self, name: str, body: bytes) -> None:
        """Vote for the person who approved the ticket; rolloutd decides whether the person may."""
        expected = f"Bearer {self.options.approve_key.read_text().strip()}"
        if not hmac.compare_digest(expected.encode(), self.headers.get("Authorization", "").encode()):
            raise BadRequest(401, "the key is wrong")
        file = self.options.tickets / f"{name}.json"
        if not file.exists():
            raise BadRequest(404, f"there is no ticket {name}")
        ticket, person = json.loads(file.read_text()), str(json.loads(body)["person"])
        wave = ["--wave", ticket["wave"]] if ticket["wave"] else []
        signed = ["--service", "tickets", "--key-file", str(self.options.vote_key), "--for", person]
        words = [ticket["rollout"], ticket["gate"], *wave, *signed, "--reason", f"ticket {name}"]
        token = rolloutctl("token", "sign", *words)
        # On stdin, because other users see arguments.
        rolloutctl("token", "use", ticket["rollout"], stdin=token)
        new = file.with_suffix(".new")
        new.write_text(json.dumps({**ticket, "state": "approved", "person": person}))
        new.replace(file)

    def answer(self, status: int, text: str) -> None:
        content = json.dumps({"result": text}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def rolloutctl(*words: str, stdin: str = "") -> str:
    """Run rolloutctl and return its output."""
    command = [os.environ.get("ROLLOUTCTL", "rolloutctl"), *words]
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise BadRequest(409, f"rolloutctl: {done.stderr.strip()[:500]}")
    return done.stdout


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--listen", default="127.0.0.1:8099", metavar="HOST:PORT")
    for name in ("webhook-key", "vote-key", "approve-key", "tickets"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    Receiver.options = parser.parse_args()
    Receiver.options.tickets.mkdir(exist_ok=True)
    host, _, port = Receiver.options.listen.rpartition(":")
    with ThreadingHTTPServer((host, int(port)), Receiver) as server:
        sys.stderr.write(f"listening on {host}:{server.server_address[1]}\n")
        server.serve_forever()


if __name__ == "__main__":
    main()
