"""``optim_schedulers`` and ``accum_grad`` in a config: what they do, and what is told before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline import GeneralTrainer
from pipeline.check import check
from pipeline.errors import ConfigError

ADDRESS = "phase.line.optim_schedulers"
NO_OPTIMIZER = "hyper_parameters={}"
NOAM = "{class: noam, args: {optim_type: SGD, optim_conf: {lr: 0.1}, warmup_steps: 4}}"


def trained(config: Path, *overrides: str) -> list[torch.Tensor]:
    context = GeneralTrainer(config, overrides).run()
    return [each.detach() for each in context["model"]["line"]["model"].parameters()]


def by_hand(batch: int, epochs: int, rate: list[float]) -> list[torch.Tensor]:
    """A plain loop over the line: 24 points in batches, a rate for each step."""
    torch.manual_seed(0)
    model, rates = nn.Linear(1, 1), iter(rate)
    x = torch.linspace(-1, 1, 24).unsqueeze(1)
    for part in [part for _ in range(epochs) for part in x.split(batch)]:
        model.zero_grad()
        nn.functional.mse_loss(model(part), 3 * part - 1).backward()
        lr = next(rates)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(lr * parameter.grad)
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("accum", [2, 3, 6])
def test_accumulation_over_batches_of_4_trains_as_on_larger_batches(linear: Path, accum: int) -> None:
    found = trained(linear, f"runner.train_runner.accum_grad={accum}")
    torch.testing.assert_close(found, by_hand(4 * accum, 2, [0.1] * 12), rtol=1e-5, atol=1e-6)


def test_a_window_that_an_epoch_leaves_open_is_closed_with_it(linear: Path) -> None:
    context = GeneralTrainer(linear, ["runner.train_runner.accum_grad=100"]).run()
    assert (context["train_state"]["iteration"], context["train_state"]["update"]) == (12, 2)
    found = [each.detach() for each in context["model"]["line"]["model"].parameters()]
    torch.testing.assert_close(found, by_hand(24, 2, [0.1] * 2), rtol=1e-5, atol=1e-6)


def test_a_schedule_of_the_config_sets_the_rate_of_each_step(linear: Path) -> None:
    found = trained(linear, f"{ADDRESS}={{main: {NOAM}}}", NO_OPTIMIZER)
    rates = [0.2 * min(step**-0.5, step * 4**-1.5) for step in range(1, 13)]
    torch.testing.assert_close(found, by_hand(4, 2, rates), rtol=1e-5, atol=1e-6)


def test_a_scheduler_takes_the_runners_accumulation_unless_it_has_its_own(linear: Path) -> None:
    own = NOAM.replace("warmup_steps", "accum_grad: 3, warmup_steps")
    overrides = [f"{ADDRESS}={{one: {NOAM}}}", NO_OPTIMIZER, "runner.train_runner.accum_grad=2"]
    assert GeneralTrainer(linear, overrides).run()["train_state"]["update"] == 6
    overrides[0] = f"{ADDRESS}={{one: {own}}}"
    assert GeneralTrainer(linear, overrides).run()["train_state"]["update"] == 4


def test_a_plateau_hears_of_each_validation(linear: Path) -> None:
    plateau = "{class: plateau, args: {optim_type: SGD, optim_conf: {lr: 0.1}, mode: max, patience: 1, factor: 0.5}}"
    overrides = [f"{ADDRESS}={{main: {plateau}}}", NO_OPTIMIZER, "runner.train_runner.epochs=6"]
    scheduler = GeneralTrainer(linear, overrides).run()["model"]["line"]["optim_schedulers"]["main"]
    # The loss falls with every pass, which is no improvement where more is better.
    assert (scheduler.scale, scheduler.bad) == (0.25, 1)


WRONG = [
    ("{main: {class: naom, args: {}}}", f"{ADDRESS}.main.class: 'naom': pipeline.training.schedules has no 'naom'; did you mean 'Noam'?"),
    ("{main: {clas: noam}}", f"{ADDRESS}.main.clas: unknown key; did you mean 'class'?"),
    ("{main: {}}", f"{ADDRESS}.main: has no class; write {{class: noam, args: {{optim_type: Adam, …}}}}"),
    ("{main: {class: noam, args: {optim_conf: {lr: 0.1}}}}", f"{ADDRESS}.main.args: Noam needs the argument optim_type; add it"),
    ("{main: {class: noam, args: {optim_type: SGD, optim_conf: {lr: 0.1}, warmup: 4}}}",
     f"{ADDRESS}.main.args.warmup: Noam has no argument 'warmup'; did you mean 'warmup_steps'?"),
    ("{main: {class: noam, args: {optim_type: SGD, optim_conf: {lr: 0.1}, warmup_steps: four}}}",
     f"{ADDRESS}.main.args.warmup_steps: Noam's argument warmup_steps is 'four', a string; write an integer"),
    ("{main: {class: noam, args: {optim_type: SDG, optim_conf: {lr: 0.1}}}}",
     f"{ADDRESS}.main.args.optim_conf.class: 'SDG': torch.optim has no 'SDG'; did you mean 'SGD'?"),
    ("{main: {class: noam, args: {optim_type: SGD, optim_conf: {lr: 0.1, momentm: 0.9}}}}",
     f"{ADDRESS}.main.args.optim_conf.momentm: SGD has no argument 'momentm'; did you mean 'momentum'?"),
    ("{main: {class: warmup_linear, args: {optim_type: SGD, optim_conf: {lr: 0.1}}}}",
     f"{ADDRESS}.main.args: WarmupLinear needs the argument total_steps; add it"),
    ("{main: {class: torch.nn.Linear, args: {}}}",
     f"{ADDRESS}.main.class: 'torch.nn.Linear': Linear does not derive from pipeline.training.optim_scheduler:OptimScheduler"),
]  # fmt: skip


@pytest.mark.parametrize(("schedulers", "message"), WRONG)
def test_a_wrong_scheduler_is_told_before_anything_runs(linear: Path, schedulers: str, message: str) -> None:
    faults = [f"{fault.address}: {fault.message}" for fault in check(linear, [f"{ADDRESS}={schedulers}", NO_OPTIMIZER])]
    assert [fault for fault in faults if fault.startswith(message)], faults
    assert len(faults) == 1


def test_an_optimizer_that_no_phase_would_use_is_refused(linear: Path) -> None:
    (fault,) = check(linear, [f"{ADDRESS}={{main: {NOAM}}}"])
    assert fault.address == "hyper_parameters.optimizer"
    assert fault.message == "would be ignored: every phase of this runner has optim_schedulers; remove one or the other"


def test_a_plateau_without_a_validation_is_refused(linear: Path) -> None:
    plateau = "{main: {class: plateau, args: {optim_type: SGD, optim_conf: {lr: 0.1}}}}"
    (fault,) = check(linear, [f"{ADDRESS}={plateau}", NO_OPTIMIZER, "phase.line.valid_dataset_name=null"])
    assert fault.message.endswith("and there is none; add valid_dataset_name to the phase")


def test_what_only_building_shows_is_told_with_the_line_of_the_config(linear: Path) -> None:
    wrong = NOAM.replace("warmup_steps: 4", "updated_modules: modle")
    expected = f"override .*: {ADDRESS}.main: updated_modules: ModuleDict has no part 'modle'; did you mean 'model'?"
    with pytest.raises(ConfigError, match=expected.replace("?", re.escape("?"))):
        GeneralTrainer(linear, [f"{ADDRESS}={{main: {wrong}}}", NO_OPTIMIZER]).run()
