"""The whole pool in one thread: its real processes' code over a simulated kernel, clock, drives and deaths."""
