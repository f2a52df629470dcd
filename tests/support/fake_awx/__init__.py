"""A fake AWX on loopback whose jobs are real processes of ansible-playbook."""

from tests.support.fake_awx.server import FakeAwx

__all__ = ["FakeAwx"]
