"""The tests of rolloutd."""
