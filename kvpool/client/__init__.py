"""What lives inside vLLM's processes: failures become misses or dropped stores; nothing blocks, nothing raises."""
