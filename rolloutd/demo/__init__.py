"""The demo: a rollout on an embedded fleet."""
