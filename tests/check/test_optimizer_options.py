"""The keys of ``optim_conf`` and of ``hyper_parameters.optimizer``: names, places, and what only building them shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.errors import ConfigError
from pipeline.optim.schedules import Constant

MAIN = "phase.line.optim_schedulers.main.args"
OPTIMIZER = "hyper_parameters.optimizer"


def scheduler(arguments: str) -> list[str]:
    """Return overrides for a phase with one OptimScheduler."""
    value = f"{{main: {{class: noam, args: {{{arguments}, warmup_steps: 4}}}}}}"
    return [f"phase.line.optim_schedulers={value}", "hyper_parameters={}"]


def weights(config: Path, overrides: list[str]) -> list[torch.Tensor]:
    context = GeneralTrainer(config, overrides).run()
    return [parameter.detach() for parameter in context["model"]["line"]["model"].parameters()]


def test_learning_rate_in_optim_conf_is_lr(linear: Path) -> None:
    found = weights(linear, scheduler("optim_type: SGD, optim_conf: {learning_rate: 0.1}"))
    assert torch.equal(found[0], weights(linear, scheduler("optim_type: SGD, optim_conf: {lr: 0.1}"))[0])


def test_learning_rate_by_hand_is_lr() -> None:
    assert Constant("SGD", {"learning_rate": 0.25}, torch.nn.Linear(1, 1)).base_lr == 0.25
    with pytest.raises(ConfigError, match="optim_conf: 'lr' means the same as 'learning_rate'"):
        Constant("SGD", {"learning_rate": 0.25, "lr": 0.1}, torch.nn.Linear(1, 1))


class Own(torch.optim.SGD):
    """An optimizer whose argument is ``learning_rate``."""

    def __init__(self, params: Any, learning_rate: float) -> None:
        super().__init__(params, lr=learning_rate)


class Keywords(torch.optim.SGD):
    """An optimizer that reads ``learning_rate`` from its keyword arguments."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, lr=options["learning_rate"])


@pytest.mark.parametrize("optimizer", [Own, Keywords])
def test_learning_rate_that_an_optimizer_takes_keeps_its_name(optimizer: type) -> None:
    assert Constant(optimizer, {"learning_rate": 0.25}, torch.nn.Linear(1, 1)).base_lr == 0.25


def test_learning_rate_that_an_optimizer_takes_passes_the_check(linear: Path) -> None:
    text = "import torch\nclass Own(torch.optim.SGD):\n    def __init__(self, params, learning_rate):\n"
    (linear.parent / "own.py").write_text(
        f"{text}        super().__init__(params, lr=learning_rate)\n", encoding="utf-8"
    )
    own = "optim_type: '{workspace}/own.py:Own', optim_conf: {learning_rate: 0.1}"
    found = weights(linear, scheduler(own))
    assert torch.equal(found[0], weights(linear, scheduler("optim_type: SGD, optim_conf: {lr: 0.1}"))[0])


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ("null", "optim_conf"),
        ("[0.1]", "optim_conf"),
        ("{class: SGD, lr: 0.1}", "optim_conf.class"),
        ("{lr: 0.1, groups: []}", "optim_conf.groups"),
        ("{lr: 0.1, lazy_mode: true}", "optim_conf.lazy_mode"),
        ("{lr: 0.1, remove_vector_weight_decay: true}", "optim_conf.remove_vector_weight_decay"),
        ("{lr: 0.1, params: 3}", "optim_conf.params"),
    ],
)
def test_optim_conf_with_a_wrong_key_is_a_fault(linear: Path, options: str, address: str) -> None:
    (fault,) = check(linear, scheduler(f"optim_type: SGD, optim_conf: {options}"))
    assert fault.address == f"{MAIN}.{address}"


def test_params_of_the_optimizer_is_a_fault_of_that_key(linear: Path) -> None:
    (fault,) = check(linear, [f"{OPTIMIZER}.params=3"])
    assert (fault.address, "'params'" in fault.message) == (f"{OPTIMIZER}.params", True)


# The source of check does not tell the parameters of a decorated function.
OWN = """\
import torch

def same(function):
    return function

@same
def make(parameters, lr):
    return torch.optim.SGD(parameters, lr)
"""


@pytest.mark.parametrize(
    ("overrides", "address", "text"),
    [
        (scheduler("optim_type: '{workspace}/own.py:make', optim_conf: {lr: 0.1, nu: 1}"), f"{MAIN}.optim_conf", "nu"),
        (scheduler("optim_type: Adam, optim_conf: {lr: 0.1, betas: [0.9]}"), f"{MAIN}.optim_conf", "betas: [0.9]"),
        ([f"{OPTIMIZER}={{class: SGD, lr: 0.1, momentum: -1}}"], OPTIMIZER, "momentum: -1"),
    ],
)
def test_option_that_an_optimizer_refuses_is_found_by_build(
    linear: Path, pipeline: Callable[..., Result], overrides: list[str], address: str, text: str
) -> None:
    (linear.parent / "own.py").write_text(OWN, encoding="utf-8")
    assert check(linear, overrides) == []
    output = pipeline("check", linear, *overrides, "--build")
    assert output.exit_code == 2
    assert f"{address}: " in output.output.replace("\n", " ")
    with pytest.raises(ConfigError, match=r"optim_conf|optimizer") as raised:
        GeneralTrainer(linear, overrides).run()
    assert text in str(raised.value)


OF_THE_USER = """\
import torch

class Mine(torch.optim.SGD):
    def __init__(self, params, learning_rate, groups=1, **options):
        super().__init__(params, learning_rate, **options)
"""


def test_options_that_an_optimizer_of_the_user_takes_are_right(linear: Path) -> None:
    """Its parameters may have names that mean something else for an optimizer of torch."""
    (linear.parent / "own.py").write_text(OF_THE_USER, encoding="utf-8")
    options = "learning_rate: 0.1, groups: 2, weight_decay: 0.5"
    found = weights(linear, scheduler(f"optim_type: '{{workspace}}/own.py:Mine', optim_conf: {{{options}}}"))
    expected = weights(linear, scheduler("optim_type: SGD, optim_conf: {lr: 0.1, weight_decay: 0.5}"))
    assert torch.equal(found[0], expected[0])
