"""The core of rolloutd: values in, values out; no clock, no I/O, no randomness."""
