"""Tests of the adapters of HAProxy."""
