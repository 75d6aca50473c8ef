"""Decisions: plain data in, plain data out. No clock, file, socket, process or environment in this room."""
