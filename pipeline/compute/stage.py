"""The Brain stage: training, validation or test."""

from __future__ import annotations

from enum import Enum, auto


class Stage(Enum):
    """The Brain stage: whether a batch is computed in training, validation or a test."""

    TRAIN = auto()
    VALID = auto()
    TEST = auto()


# A constant, because each look-up of a member of an enum is a call.
TRAIN = Stage.TRAIN
