"""System calls, one family to a file; no decisions."""
