"""Which parameters are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import ConfigError
from pipeline.optim.parameter_groups import trainable_parameters, without_decay
from tests.training.conftest import in_turn


class Net(nn.Module):
    """A body of two layers, and a head that is known under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 1)
        self.top = self.head


def compiled_inside(net: nn.Module) -> nn.Module:
    net.body.compile(backend="eager")
    return net


def wrapped_inside(net: nn.Module) -> nn.Module:
    net.body = torch.compile(net.body, backend="eager")
    return net


COMPILED: list[Callable[[nn.Module], Any]] = [
    lambda net: net,
    lambda net: torch.compile(net, backend="eager"),
    compiled_inside,
    wrapped_inside,
]
PARTS: list[tuple[Any, list[str]]] = [
    (None, ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"]),
    ("body", ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"]),
    ("body.1", ["body.1.weight", "body.1.bias"]),
    (["head", "body.0"], ["head.weight", "head.bias", "body.0.weight", "body.0.bias"]),
    (("body.0", "body"), ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"]),
    ("top", ["top.weight", "top.bias"]),
    (["head", "top"], ["head.weight", "head.bias"]),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, when its compiler is imported
@in_turn("compiled", COMPILED)
@in_turn(("parts", "names"), PARTS)
def test_parameters_of_the_named_parts_are_found_once_under_their_names_also_when_compiled(
    compiled: Callable[[nn.Module], Any], parts: Any, names: list[str]
) -> None:
    net = Net()
    own = dict(net.named_parameters(remove_duplicate=False))
    found = trainable_parameters(compiled(net), parts)
    assert list(found) == names
    assert all(found[name] is own[name] for name in names)


def test_a_tied_parameter_is_found_once() -> None:
    net = Net()
    net.body[1].weight = net.body[0].weight = nn.Parameter(torch.zeros(3, 3))
    assert list(trainable_parameters(net, "body")) == ["body.0.weight", "body.0.bias", "body.1.bias"]


def test_frozen_parameters_are_left_out() -> None:
    net = Net()
    net.body[0].requires_grad_(False)
    assert list(trainable_parameters(net, "body")) == ["body.1.weight", "body.1.bias"]


WRONG: list[tuple[Any, str]] = [
    ("bodi", "updated_modules: Net has no part 'bodi'; did you mean 'body'?"),
    ("body.2", "updated_modules: Net has no part 'body.2'; known: 0, 1"),
    ("head.weight", "updated_modules: Net has no part 'head.weight'; there are none"),
    (["body", "hed"], "updated_modules: Net has no part 'hed'; did you mean 'head'?"),
    ([], "updated_modules: is empty; name parts of the model, or leave it out for all of it"),
]


@pytest.mark.parametrize(("parts", "message"), WRONG)
def test_a_part_that_is_not_there_is_refused_with_those_that_are(parts: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trainable_parameters(Net(), parts)
    assert str(caught.value) == message


def test_a_part_without_a_trained_parameter_is_refused_by_its_name() -> None:
    net = Net()
    net.body.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"Net \(body\) has no parameter that is trained; set requires_grad on some"):
        trainable_parameters(net, "body")


def test_vectors_are_spared_the_weight_decay() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    vectors, others = without_decay(net.parameters())
    assert vectors["weight_decay"] == 0.0
    assert [id(each) for each in vectors["params"]] == [id(each) for each in (net[0].bias, *net[1].parameters())]
    assert [id(each) for each in others["params"]] == [id(net[0].weight)]
    assert "weight_decay" not in others
