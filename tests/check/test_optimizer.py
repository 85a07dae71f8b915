"""``optim_schedulers`` and ``accum_grad`` in a config: what they do, and what is told before anything runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline import GeneralTrainer
from pipeline.check.checker import check
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
    ("{main: {class: naom, args: {}}}", f"{ADDRESS}.main.class: 'naom': pipeline.optim.schedules has no 'naom'; did you mean 'Noam'?"),
    ("{main: {clas: noam}}", f"{ADDRESS}.main.clas: unknown key; did you mean 'class'?"),
    ("{main: {}}", f"{ADDRESS}.main: has no class; write {{class: noam, args: {{optim_type: Adam, …}}}}"),
    ("{main: {class: noam, args: {optim_conf: {lr: 0.1}}}}", f"{ADDRESS}.main.args: Noam needs the argument optim_type; add it"),
    ("{main: {class: noam, args: {optim_type: SGD, optim_conf: {lr: 0.1}, warmup: 4}}}",
     f"{ADDRESS}.main.args.warmup: Noam has no argument 'warmup'; did you mean 'warmup_steps'?"),
    ("{main: {class: noam, args: {optim_type: SGD, optim_conf: {lr: 0.1}, warmup_steps: four}}}",
     f"{ADDRESS}.main.args.warmup_steps: Noam's argument warmup_steps is 'four', a string; write a number"),
    ("{main: {class: noam, args: {optim_type: SGD, optim_conf: {lr: 0.1}, warmup_steps: 4.0}}}",
     f"{ADDRESS}.main.args.warmup_steps: is 4.0; write a whole number of steps, or a share of them, of 0 or more and below 1"),
    ("{main: {class: noam, args: {optim_type: SDG, optim_conf: {lr: 0.1}}}}",
     f"{ADDRESS}.main.args.optim_conf.class: 'SDG': torch.optim has no 'SDG'; did you mean 'SGD'?"),
    ("{main: {class: noam, args: {optim_type: SGD, optim_conf: {lr: 0.1, momentm: 0.9}}}}",
     f"{ADDRESS}.main.args.optim_conf.momentm: SGD has no argument 'momentm'; did you mean 'momentum'?"),
    ("{main: {class: warmup_linear, args: {optim_type: SGD, optim_conf: {lr: 0.1}, total_steps: 9, warmup_steps: 9}}}",
     f"{ADDRESS}.main.args.warmup_steps: is 9, and the schedule has 9 steps; the rise must end before the total"),
    ("{main: {class: torch.nn.Linear, args: {}}}",
     f"{ADDRESS}.main.class: 'torch.nn.Linear': Linear does not derive from pipeline.optim.optim_scheduler:OptimScheduler"),
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


def one_cycle(more: str, own: str = "") -> list[str]:
    given = f"schedule: OneCycleLR, {own}args: {{max_lr: 0.1, cycle_momentum: false, {more}}}"
    return [
        f"{ADDRESS}={{main: {{class: torch_schedule, args: {{optim_type: SGD, optim_conf: {{lr: 0.1}}, {given}}}}}}}",
        NO_OPTIMIZER,
    ]


TOO_SHORT = f"{ADDRESS}.main.args.args: OneCycleLR has {{}} steps, and the training has {{}} {{}}; write total_steps: {{}} or more, or leave it out"
STEPS = ["runner.train_runner.epochs=null", "runner.train_runner.max_steps=20"]


@pytest.mark.parametrize(("overrides", "told"), [
    ([*one_cycle("total_steps: 19"), *STEPS], (19, 20, "windows of accumulation", 20)),
    ([*one_cycle("epochs: 3, steps_per_epoch: 6"), *STEPS], (18, 20, "windows of accumulation", 20)),
    ([*one_cycle("total_steps: 6", "accum_grad: 3, "), *STEPS], (6, 7, "windows of accumulation", 7)),
    ([*one_cycle("total_steps: 1", "per: epoch, ")], (1, 2, "epochs", 2)),
])  # fmt: skip
def test_a_cycle_that_is_over_before_the_training_is_told_where_the_config_says_both(
    linear: Path, overrides: list[str], told: tuple[object, ...]
) -> None:
    (fault,) = check(linear, overrides)
    assert f"{fault.address}: {fault.message}" == TOO_SHORT.format(*told)


def test_a_rise_that_is_no_shorter_than_the_training_is_told_where_the_config_says_both(linear: Path) -> None:
    schedule = "{class: warmup_linear, args: {optim_type: SGD, optim_conf: {lr: 0.1}, accum_grad: 3, warmup_steps: 7}}"
    (fault,) = check(linear, [f"{ADDRESS}={{main: {schedule}}}", NO_OPTIMIZER, *STEPS])
    assert fault.message == "is 7, and the schedule has 7 steps; the rise must end before the total"


@pytest.mark.parametrize(("overrides", "needed"), [
    (one_cycle("total_steps: 11"), 12),  # two epochs of six batches
    ([*one_cycle("total_steps: 6"), "runner.train_runner.max_steps=7"], 7),
    ([*one_cycle("total_steps: 3", "accum_grad: 4, ")], 4),
])  # fmt: skip
def test_a_cycle_that_is_over_before_the_data_are_is_told_before_the_first_step(
    linear: Path, overrides: list[str], needed: int
) -> None:
    trainer = GeneralTrainer(linear, overrides)
    with pytest.raises(
        ConfigError, match=rf"{ADDRESS}.main: OneCycleLR has {needed - 1} steps, and the training has {needed} windows"
    ):
        trainer.run()
    (run,) = Path("runs/workspace").glob("2*")
    assert json.loads((run / "status.json").read_text(encoding="utf-8"))["iteration"] == 0


@pytest.mark.parametrize(("given", "message"), [
    ("schedule: StepRL, args: {step_size: 2}", "schedule: 'StepRL': torch.optim.lr_scheduler has no 'StepRL'; did you mean 'StepLR'?"),
    ("schedule: {class: StepLR}", "schedule: is {'class': 'StepLR'}; write the name of a class in torch.optim.lr_scheduler, or a class path"),
    ("schedule: torch.nn.Linear", "schedule: 'torch.nn.Linear': Linear does not derive from torch.optim.lr_scheduler:LRScheduler"),
    ("schedule: StepLR", "args: StepLR needs the argument step_size; add it"),
    ("schedule: StepLR, args: {stepsize: 2, step_size: 3}", "args.stepsize: StepLR has no argument 'stepsize'; did you mean 'step_size'?"),
    ("schedule: StepLR, args: {step_size: two}", "args.step_size: StepLR's argument step_size is 'two', a string; write an integer"),
])  # fmt: skip
def test_a_wrong_schedule_of_torchs_is_told_before_anything_runs(linear: Path, given: str, message: str) -> None:
    main = f"{{class: torch_schedule, args: {{optim_type: SGD, optim_conf: {{lr: 0.1}}, {given}}}}}"
    (fault,) = check(linear, [f"{ADDRESS}={{main: {main}}}", NO_OPTIMIZER])
    assert f"{fault.address}: {fault.message}".startswith(f"{ADDRESS}.main.args.{message}")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("overrides", [
    one_cycle("total_steps: 12"), one_cycle("total_steps: 2", "per: epoch, "), [*one_cycle(""), *STEPS],
    *(pytest.param(overrides, marks=pytest.mark.slow) for overrides in (
        [*one_cycle("total_steps: 20"), *STEPS], one_cycle("total_steps: 4", "accum_grad: 4, "), one_cycle(""),
    )),
    [f"{ADDRESS}={{main: {{class: warmup_cosine, args: {{optim_type: SGD, optim_conf: {{lr: 0.1}}, warmup_steps: 0.1}}}}}}", NO_OPTIMIZER],
    [f"{ADDRESS}={{main: {{class: torch_schedule, args: {{optim_type: SGD, optim_conf: {{lr: 0.1}}, schedule: CosineAnnealingLR}}}}}}", NO_OPTIMIZER],
])  # fmt: skip
def test_a_schedule_as_long_as_the_training_is_no_fault(linear: Path, overrides: list[str]) -> None:
    assert check(linear, overrides) == []
    GeneralTrainer(linear, overrides).run()


LBFGS = "{main: {class: constant, args: {optim_type: LBFGS, optim_conf: {lr: 0.1}}}}"
NEEDS = "LBFGS.step needs a closure, and nobody gives it one; write an updater or a Runner of your own, or name another optimizer"


@pytest.mark.parametrize(("overrides", "address"), [
    (["hyper_parameters.optimizer.class=LBFGS"], "hyper_parameters.optimizer.class"),
    (["hyper_parameters.optimizer.class=lbfgs"], "hyper_parameters.optimizer.class"),
    (["hyper_parameters.optimizer.class=torch.optim.LBFGS"], "hyper_parameters.optimizer.class"),
    (["hyper_parameters.optimizer.class=torch.optim.lbfgs:LBFGS"], "hyper_parameters.optimizer.class"),
    (["hyper_parameters.optimizer.class=LBFGS", "hyper_parameters.optimizer.groups=[{params: bias, lr: 0.1x}]"],
     "hyper_parameters.optimizer.class"),
    ([f"{ADDRESS}={LBFGS}", NO_OPTIMIZER], f"{ADDRESS}.main.args.optim_conf.class"),
    ([f"{ADDRESS}={LBFGS.replace('LBFGS', 'torch.optim.lbfgs:LBFGS')}", NO_OPTIMIZER], f"{ADDRESS}.main.args.optim_conf.class"),
    ([f"{ADDRESS}={LBFGS.replace('optim_conf', 'groups: [{params: bias, lr: 0.1x}], optim_conf')}", NO_OPTIMIZER],
     f"{ADDRESS}.main.args.optim_conf.class"),
])  # fmt: skip
def test_an_optimizer_whose_step_needs_a_closure_is_a_fault(linear: Path, overrides: list[str], address: str) -> None:
    (fault,) = check(linear, overrides)
    assert (fault.address, fault.message) == (address, NEEDS)


OPTIMIZER = "hyper_parameters.optimizer"
GROUPS = f"{OPTIMIZER}.groups"


@pytest.mark.parametrize(("override", "message"), [
    (f"{GROUPS}=bias", f"{GROUPS}: is 'bias', a string; write a list: [{{params: '*.bias', weight_decay: 0}}]"),
    (f"{GROUPS}=[bias]", f"{GROUPS}.0.params: is null; write names of parameters or patterns: {{params: '*.bias'"),
    (f"{GROUPS}=[{{lr: 1}}]", f"{GROUPS}.0.params: is null; write names of parameters or patterns: {{params: '*.bias'"),
    (f"{GROUPS}=[{{params: []}}]", f"{GROUPS}.0.params: is [], a list; write names of parameters or patterns"),
    (f"{GROUPS}=[{{params: [bias, 3]}}]", f"{GROUPS}.0.params: is ['bias', 3], a list; write names"),
    (f"{GROUPS}=[{{params: bias, momentm: 1}}]", f"{GROUPS}.0.momentm: SGD has no argument 'momentm'; did you mean 'momentum'?"),
    (f"{GROUPS}=[{{params: bias, momentum: x}}]", f"{GROUPS}.0.momentum: SGD's argument momentum is 'x', a string; write a number"),
    (f"{GROUPS}=[{{params: weight}}, {{params: bias, lr: 0.1y}}]",
     f"{GROUPS}.1.lr: is '0.1y', a string; write a number of at least 0, such as 0.001, or 0.1x for a multiple of the base rate"),
    (f"{GROUPS}=[{{params: bias, learning_rate: -1}}]", f"{GROUPS}.0.learning_rate: is -1, an integer; write a number of at least 0"),
    (f"{GROUPS}=[{{params: bias, lr: 1, learning_rate: 2}}]", f"{GROUPS}.0.lr: means the same as 'learning_rate', which is set too; keep one"),
    (f"{GROUPS}=[{{params: bias, fused: auto}}]", f"{GROUPS}.0.fused: SGD's argument fused is 'auto', a string; write true or false"),
    (f"{OPTIMIZER}.fused=always", f"{OPTIMIZER}.fused: SGD's argument fused is 'always', a string; write true or false"),
    (f"{OPTIMIZER}.learning_rate=0.1x", f"{OPTIMIZER}.learning_rate: is '0.1x', a string; write a number of at least 0"),
    (f"{OPTIMIZER}.remove_vector_weight_decay=1e3", f"{OPTIMIZER}.remove_vector_weight_decay: is 1000.0, a number; write true or false"),
    (f"{OPTIMIZER}={{class: Rprop, learning_rate: 0.1, remove_vector_weight_decay: true}}",
     f"{OPTIMIZER}.remove_vector_weight_decay: would be ignored: Rprop has no weight_decay; remove it"),
    (f"{OPTIMIZER}.lazy_mode=1e3", f"{OPTIMIZER}.lazy_mode: is 1000.0, a number; write true or false"),
    (f"{OPTIMIZER}={{class: SparseAdam, lr: 0.1, lazy_mode: true}}",
     f"{OPTIMIZER}.lazy_mode: SparseAdam cannot step single rows; leave it out, or use Adadelta, Adagrad, Adam, AdamW, Adamax"),
    (f"{GROUPS}=[{{params: bias, lazy_mode: true}}]", f"{GROUPS}.0.lazy_mode: SGD has no argument 'lazy_mode'"),
])  # fmt: skip
def test_wrong_parameter_groups_are_told_at_their_place(linear: Path, override: str, message: str) -> None:
    (fault,) = check(linear, [override])
    assert f"{fault.address}: {fault.message}".startswith(message)


@pytest.mark.parametrize("override", [
    f"{OPTIMIZER}.fused=auto", f"{OPTIMIZER}={{class: RMSprop, lr: 0.1, fused: auto}}",
    f"{GROUPS}=[{{params: ['*.bias', weight], lr: 0.1x, momentum: 0.9}}, {{params: bias, learning_rate: 2e-3x}}]",
    f"{OPTIMIZER}.remove_vector_weight_decay=true", f"{OPTIMIZER}={{class: AdamW, lr: 0.1, lazy_mode: true}}",
])  # fmt: skip
def test_right_groups_and_options_are_no_fault(linear: Path, override: str) -> None:
    assert check(linear, [override]) == []


def test_groups_of_a_scheduler_are_checked_likewise(linear: Path) -> None:
    main = NOAM.replace("warmup_steps", "groups: [{params: bias, momentm: 1}], warmup_steps")
    (fault,) = check(linear, [f"{ADDRESS}={{main: {main}}}", NO_OPTIMIZER])
    assert fault.address == f"{ADDRESS}.main.args.groups.0.momentm"
    assert fault.message == "SGD has no argument 'momentm'; did you mean 'momentum'?"


BRAIN = "from pipeline import Brain, UpdaterBase\nfrom pipeline.stages.runner import Runner\nclass Model(Brain):\n"
COMPUTED = "    def compute_forward(self, batch, stage): ...\n    def compute_objectives(self, predictions, batch, stage): {}\n"
OWN = ["phase.line.model={workspace}/own.py", "phase.line.model_args={}", "phase.line.loss=null"]


@pytest.mark.parametrize(("text", "overrides"), [
    (f"{BRAIN}    def fit_batch(self, batch): ...\n    def evaluate_batch(self, batch, stage): ...\n", OWN),
    (f"{BRAIN}    pass\nclass Updater(UpdaterBase):\n    def update(self, batch): ...\n", ['phase.line.updater={class_path: "{workspace}/own.py"}']),
    (f"{BRAIN}    pass\nclass Mine(Runner): ...\n", ["runner.train_runner.runner_class_path={workspace}/own.py:Mine"]),
])  # fmt: skip
def test_who_steps_an_optimizer_himself_may_give_it_a_closure(linear: Path, text: str, overrides: list[str]) -> None:
    (linear.parent / "own.py").write_text(text, encoding="utf-8")
    assert check(linear, ["hyper_parameters.optimizer.class=LBFGS", *overrides]) == []


def losses(config: Path, optim_loss: str, *overrides: str) -> list[str]:
    scheduler = f"{{main: {{class: constant, args: {{optim_type: SGD, optim_conf: {{lr: 0.1}}{optim_loss}}}}}}}"
    return [
        f"{each.address}: {each.message}"
        for each in check(config, [f"{ADDRESS}={scheduler}", NO_OPTIMIZER, *overrides])
    ]


def test_a_loss_that_the_source_of_a_brain_does_not_name_is_a_fault(linear: Path) -> None:
    (linear.parent / "own.py").write_text(BRAIN + COMPUTED.format("return {'a': 1, 'b': 2}"), encoding="utf-8")
    place = f"{ADDRESS}.main.args.optim_loss: there is no loss"
    assert losses(linear, ", optim_loss: c", *OWN) == [f"{place} 'c' to descend; known: a, b"]
    assert losses(linear, "", *OWN) == [f"{place} 'loss' to descend; known: a, b"]
    assert losses(linear, ", optim_loss: a", *OWN) == []


def test_a_plain_module_has_one_loss(linear: Path) -> None:
    assert losses(linear, ", optim_loss: generator") == [
        f"{ADDRESS}.main.args.optim_loss: there is no loss 'generator' to descend; known: loss"
    ]
    assert losses(linear, ", optim_loss: loss") == []


@pytest.mark.parametrize(
    "objectives", ["return self.losses(batch)", "return {**self.losses(batch), 'a': 1}", "return {batch: 1}"]
)
def test_losses_that_the_source_does_not_tell_are_left_to_the_run(linear: Path, objectives: str) -> None:
    (linear.parent / "own.py").write_text(BRAIN + COMPUTED.format(objectives), encoding="utf-8")
    assert losses(linear, ", optim_loss: c", *OWN) == []


def watching(config: Path, metric: str, *overrides: str) -> list[str]:
    plateau = f"{{main: {{class: plateau, args: {{optim_type: SGD, optim_conf: {{lr: 0.1}}, metric: {metric}}}}}}}"
    return [
        f"{each.address}: {each.message}" for each in check(config, [f"{ADDRESS}={plateau}", NO_OPTIMIZER, *overrides])
    ]


MAE = "phase.line.metrics={error: {class: MAE}}"


@pytest.mark.parametrize(("metric", "hint"), [
    ("loss", "known: valid_error, valid_loss"), ("valid_eror", "did you mean 'valid_error'?"), ("auc", "known: valid_error, valid_loss"),
])  # fmt: skip
def test_a_plateau_on_a_number_that_nobody_reports_is_a_fault(linear: Path, metric: str, hint: str) -> None:
    assert watching(linear, metric, MAE) == [f"{ADDRESS}.main.args.metric: nothing reports '{metric}'; {hint}"]


@pytest.mark.parametrize(("metric", "overrides"), [
    ("valid_loss", []), ("valid_error", [MAE]), ("valid_mine", OWN),
    ("valid_part", ["phase.line.loss={workspace}/own.py:Losses"]), ("valid_plugged", ['plugins=["{workspace}/own.py:Hooks"]']),
])  # fmt: skip
def test_a_plateau_on_a_number_that_somebody_may_report_is_none(
    linear: Path, metric: str, overrides: list[str]
) -> None:
    own = "\ndef Losses(predictions, target): ...\nfrom pipeline import hookimpl\nclass Hooks:\n    @hookimpl\n    def after_validation(self, metrics): ...\n"
    (linear.parent / "own.py").write_text(BRAIN + COMPUTED.format("...") + own, encoding="utf-8")
    assert watching(linear, metric, *overrides) == []


def test_arguments_that_are_left_blank_are_none(linear: Path) -> None:
    args = "{schedule: StepLR, args: null, optim_type: SGD, optim_conf: {lr: 0.1}}"
    schedulers = f"phase.line.optim_schedulers={{main: {{class: torch_schedule, args: {args}}}}}"
    (fault,) = check(linear, [schedulers, "hyper_parameters={}"])
    assert fault.message == "StepLR needs the argument step_size; add it"
