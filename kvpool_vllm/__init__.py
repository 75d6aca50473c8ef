"""kvpool inside vLLM: the connector, and all that knows vLLM's types."""
