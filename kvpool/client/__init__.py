"""What lives inside vLLM's processes: turns every failure into a miss or a dropped store, never blocks, never raises."""
