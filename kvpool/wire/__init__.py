"""The wire: every message, framing, sessions. Pure: no socket, no clock."""
