"""Forecasts of rollouts and of plans."""
