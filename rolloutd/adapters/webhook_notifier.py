"""Notifications as signed requests to a service, by the specification Standard Webhooks.

The signature is over the message's id, the instant of the request and the body, so a receiver can refuse
what is forged or old, and knows a repetition by its id.  It repeats nothing itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from machines.model.timefmt import format_rfc3339
from rolloutd.errors import Diagnostic, InvalidFile, NotifyFailed
from rolloutd.ports import Message, Notification, Notifier

BODY_VERSION = 1

MAX_TEXT_CHARS = 2000
"""Of each text: twenty of them make at most some 170 KB, which every receiver takes."""

MIN_KEY_BYTES = 24
MAX_KEY_BYTES = 64
"""What Standard Webhooks allows."""

KEY_PREFIX = "whsec_"


class WebhookNotifier:
    def __init__(self, url: str, key: bytes, now: Callable[[], float] = time.time) -> None:
        self._url, self._key, self._now = url, key, now
        # Paths of web hooks are secrets, so only the host is named.
        self.name = f"webhook {urlsplit(url).hostname}"

    async def send(self, message: Message) -> None:
        """Post one message; raises NotifyFailed unless the answer is 2xx."""
        body = json.dumps(_body(message), ensure_ascii=False, separators=(",", ":")).encode()
        # Of the content, so that a repetition has the same.
        name = f"msg_{hashlib.sha256(body).hexdigest()[:32]}"
        at = str(int(self._now()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "rolloutd",
            "webhook-id": name,
            "webhook-timestamp": at,
            "webhook-signature": sign(self._key, name, at, body),
        }
        try:
            # The dispatcher limits the time.
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                # Not redirected: the signature is for this receiver.
                session.post(self._url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                status = response.status
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Its text may have the URL.
            raise NotifyFailed(
                f"{self.name}: {type(error).__name__}; check the URL and the receiver"
            ) from None
        if not 200 <= status < 300:
            raise NotifyFailed(f"{self.name}: it answered {status}; see the log of the receiver")


def sign(key: bytes, name: str, at: str, body: bytes) -> str:
    """Return the signature of a request, as its header has it."""
    digest = hmac.digest(key, b".".join((name.encode(), at.encode(), body)), "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"


def load_webhook(url: str, key_file: Path) -> Notifier:
    """Return the notifier of a setting; raises InvalidFile, which never has what is in the file."""
    try:
        mode = key_file.stat().st_mode
        text = key_file.read_text("ascii").strip().removeprefix(KEY_PREFIX)
        key = base64.b64decode(text, validate=True)
    except (OSError, UnicodeDecodeError, binascii.Error) as error:
        raise _invalid(key_file, "no key that can be read", f"base64: {type(error).__name__}") from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise _invalid(key_file, f"mode {stat.S_IMODE(mode):o}", "a file that only the daemon's user reads")
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        allowed = f"{MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes in base64, as of openssl rand -base64 32"
        raise _invalid(key_file, f"a key of {len(key)} bytes", allowed)
    return WebhookNotifier(url, key)


def _body(message: Message) -> dict[str, Any]:
    return {
        "version": BODY_VERSION,
        "title": message.title,
        "notifications": [_notification(each) for each in message.notifications],
        "omitted": message.omitted,
    }


def _notification(each: Notification) -> dict[str, Any]:
    texts = {"event": each.event, "at": format_rfc3339(each.at), "title": each.title, "text": each.text}
    subjects = {name: getattr(each, name) or None for name in ("rollout", "node", "gate", "wave", "adapter")}
    return {**{name: text[:MAX_TEXT_CHARS] for name, text in texts.items()}, **subjects}


def _invalid(path: Path, found: str, allowed: str) -> InvalidFile:
    return InvalidFile((Diagnostic(str(path), 1, 1, "notify.webhooks", found, allowed, "it cannot be used"),))
