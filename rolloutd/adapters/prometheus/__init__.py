"""Adapters of Prometheus: a traffic probe, an observer, and the queries behind them."""
