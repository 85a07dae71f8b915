"""Losses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.errors import DataError
from pipeline.training.batch_brain import losses_by_name

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


def test_a_tensor_alone_is_the_loss_and_several_keep_their_names() -> None:
    assert losses_by_name(ONE, "here") == {"loss": ONE}
    assert losses_by_name({"a": ONE, "b": TWO}, "here") == {"a": ONE, "b": TWO}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            None,
            "Mine.update returned a NoneType; return a scalar tensor, or a dict of them with the names that the Optim",
        ),
        (1.5, "Mine.update returned a float; return a scalar tensor"),
        ((ONE, TWO), "Mine.update returned a tuple of 2; return a scalar tensor"),
        ({}, "Mine.update returned a dict of 0; return a scalar tensor"),
        ({"a": ONE, "b": 2.0}, "Mine.update returned a dict of 2; return a scalar tensor"),
        (torch.ones(3), r"Mine.update: the loss 'loss' has shape \(3,\); return a scalar, e.g. its mean\(\)"),
        ({"a": ONE, "b": torch.ones(1)}, r"Mine.update: the loss 'b' has shape \(1,\); return a scalar"),
    ],
)
def test_anything_else_is_refused_with_the_method_that_returned_it(returned: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        losses_by_name(returned, "Mine.update")
