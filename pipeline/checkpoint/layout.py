"""What the files of a checkpoint are called; beside them there is the manifest."""

from __future__ import annotations

STATE = "state.json"
"""The counters and numbers."""
TRAINING = "training.safetensors"
"""What a run needs to go on, beside the weights."""
SUFFIX = ".safetensors"
"""What the files of weights end with, after the name of their phase."""
MAX_STATE = 16 * 2**20
"""Bytes of a ``state.json``."""
