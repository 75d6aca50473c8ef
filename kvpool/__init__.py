"""kvpool: a KV-cache tier for vLLM on local NVMe. This package imports neither vllm nor torch."""

__version__ = "0.1.0"
