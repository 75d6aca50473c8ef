"""What kvpool's own modules log inside vLLM's processes goes where vLLM's log goes, in its format."""

import logging


def share_vllm_log() -> None:
    """Give the `kvpool` loggers the handlers and level of vLLM's, unless somebody has set them up already."""
    ours, theirs = logging.getLogger("kvpool"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = theirs.propagate
