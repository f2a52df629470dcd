"""What the doctor says of one thing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing; `text` says how it is, or what is wrong and what to do."""

    subject: str
    ok: bool
    text: str

    def content(self) -> dict[str, str | bool]:
        """Return it as JSON."""
        return {"subject": self.subject, "ok": self.ok, "text": self.text}
