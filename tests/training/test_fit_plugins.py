"""Plugins of a Brain that trains alone."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from pipeline import Brain, Checkpointer, Stage, hookimpl
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.compute.trainable import trainable_of
from pipeline.context import Context
from pipeline.errors import ConfigError, ContextError, PluginError


class Line(Brain):
    """A linear model of one input, whose targets are 1."""

    def __init__(self, rate: float = 0.1, **keywords: Any) -> None:
        torch.manual_seed(0)
        super().__init__({"net": nn.Linear(1, 1)}, opt_class=lambda parameters: SGD(parameters, rate), **keywords)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.mse_loss(predictions, torch.ones_like(batch))


BATCHES = [torch.full((2, 1), float(number)) for number in range(3)]
DATA = DataLoader(BATCHES, batch_size=None)  # type: ignore[arg-type]


class Telling:
    """Notes the hooks of two batches and a validation."""

    every_rank = True
    plugin_name = ""

    def __init__(self, events: list[Any] | None = None) -> None:
        self.events: list[Any] = [] if events is None else events

    @hookimpl
    def before_pipeline(self, context: Context) -> None:
        self.events.append("before_pipeline")

    @hookimpl
    def before_stage(self, name: str) -> None:
        self.events.append(("before_stage", name))

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        self.events.append(("before_epoch", context["current_epoch"]))

    @hookimpl
    def before_pass(self, phase: str) -> None:
        self.events.append(("before_pass", phase))

    @hookimpl
    def before_batch(self, batch: Any) -> None:
        self.events.append(("before_batch", batch[0].item()))

    @hookimpl
    def after_batch(self, predictions: Any, losses: dict[str, Any]) -> None:
        self.events.append(("after_batch", predictions.shape[0], [*losses]))

    @hookimpl
    def after_update(self, name: str) -> None:
        self.events.append(("after_update", name))

    @hookimpl
    def after_pass(self, metrics: dict[str, float]) -> None:
        self.events.append(("after_pass", [*metrics]))

    @hookimpl
    def after_validation(self, metrics: dict[str, float]) -> None:
        self.events.append(("after_validation", [*metrics]))

    @hookimpl
    def after_epoch(self, context: Context) -> None:
        self.events.append(("after_epoch", [*context["metrics"]["brain"]]))

    @hookimpl
    def after_stage(self, name: str) -> None:
        self.events.append(("after_stage", name))

    @hookimpl
    def after_pipeline(self) -> None:
        self.events.append("after_pipeline")


def test_plugins_get_the_hooks_of_a_training() -> None:
    plugin = Telling()
    Line().fit(
        [7], DataLoader(BATCHES[:2], batch_size=None), DataLoader(BATCHES[:1], batch_size=None), plugins=[plugin]
    )
    assert plugin.events == [
        "before_pipeline",
        ("before_stage", "runner"),
        ("before_epoch", 7),
        ("before_pass", "brain"),
        ("before_batch", 0.0),
        ("after_update", "0"),
        ("after_batch", 2, ["loss"]),
        ("before_batch", 1.0),
        ("after_update", "0"),
        ("after_batch", 2, ["loss"]),
        ("after_pass", ["loss"]),
        ("after_validation", ["loss"]),
        ("after_epoch", ["loss", "valid_loss"]),
        ("after_stage", "runner"),
        "after_pipeline",
    ]


class Once:
    """Counts its batches for all objects of its class."""

    every_rank = True
    batches: ClassVar[int] = 0

    def __init__(self, step: int = 1) -> None:
        self.step = step

    @hookimpl
    def after_batch(self) -> None:
        Once.batches += self.step


@pytest.mark.parametrize(
    ("plugin", "batches"),
    [
        (Once, 3),
        (Once(step=2), 6),
        ({"class_path": Once, "name": "once", "args": {"step": 4}}, 12),
        (f"{__name__}:Once", 3),
        ({f"{__name__}:Once": {"step": 3}}, 9),
    ],
)
def test_a_plugin_is_an_object_or_what_a_config_may_have(
    plugin: Any, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Once, "batches", 0)
    Line().fit(range(1), DATA, plugins=[plugin])
    assert Once.batches == batches


def test_an_installed_plugin_is_named() -> None:
    # Without a step the loss of the validation never improves.
    brain = Line(rate=0.0)
    brain.fit(range(9), DATA, DATA, plugins=[{"early_stopping": {"patience": 2}}])
    assert trainable_of(brain).counters["epoch"] == 3


def test_what_plugins_write_goes_to_the_output_folder(tmp_path: Path) -> None:
    plugin = Telling()
    Line(hparams={"output_folder": str(tmp_path / "out")}).fit(range(2), DATA, plugins=["metric_log", plugin])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if line["event"] == "epoch"] == [3, 6]


def test_a_tracker_has_the_hyperparameters(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    hparams = {"output_folder": str(tmp_path), "width": 3, "made": nn.Linear(1, 1)}
    Line(hparams=hparams).fit(range(1), DATA, plugins=["tensorboard"])
    [file] = (tmp_path / "tensorboard").iterdir()
    text = file.read_bytes()
    assert b"hyper_parameters.width" in text
    assert b"hyper_parameters.made" not in text


def test_without_an_output_folder_such_a_plugin_is_refused() -> None:
    with pytest.raises(
        ContextError, match=r"where plugins write, and the Brain has no hyperparameter output_folder; add it"
    ):
        Line().fit(range(1), DATA, plugins=["metric_log"])


@pytest.mark.parametrize(
    ("plugins", "message"),
    [
        (["early_stoping"], "^fit: plugins: there is no plugin 'early_stoping'; did you mean 'early_stopping'"),
        ([{"early_stopping": {"patienc": 1}}], "unexpected keyword argument 'patienc'; its arguments are"),
        ([SGD], "SGD has no hook; mark a method"),
        ([object()], "object has no hook; mark a method"),
    ],
)
def test_what_is_no_plugin_is_refused_before_the_first_step(plugins: list[Any], message: str) -> None:
    brain = Line()
    with pytest.raises(PluginError, match=message):
        brain.fit(range(1), DATA, plugins=plugins)
    assert trainable_of(brain).counters["iteration"] == 0


@pytest.mark.parametrize("plugins", ["early_stopping", {"early_stopping": {}}, Telling()])
def test_a_single_plugin_is_refused(plugins: Any) -> None:
    with pytest.raises(PluginError, match=r"fit: plugins is .*; write a list of plugins"):
        Line().fit(range(1), DATA, plugins=plugins)


def test_plugins_may_come_from_a_generator() -> None:
    events: list[Any] = []
    Line().fit(range(1), DATA, plugins=(Telling(events) for _ in range(1)))
    assert events.count(("after_pass", ["loss"])) == 1


def test_the_bar_may_be_named_too() -> None:
    Line().fit(range(1), DATA, progressbar=True, plugins=["progress_bar"])


def test_without_plugins_the_output_folder_is_not_made(tmp_path: Path) -> None:
    Line(hparams={"output_folder": str(tmp_path / "out")}).fit(range(1), DATA)
    assert not (tmp_path / "out").exists()


class FailingLater:
    """Raises in the hooks that follow an error."""

    @hookimpl
    def on_stage_error(self) -> None:
        raise ZeroDivisionError

    @hookimpl
    def after_pipeline(self) -> None:
        raise ZeroDivisionError


def test_an_error_of_the_training_is_not_hidden_by_one_of_a_plugin(log_lines: list[str]) -> None:
    class Failing(Line):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            raise OverflowError

    with pytest.raises(OverflowError):
        Failing().fit(range(1), DATA, plugins=[FailingLater()])
    failed = [line.strip().splitlines()[0] for line in log_lines if "failed as well" in line]
    assert [line.split(":")[0] for line in failed] == [
        "ERROR on_stage_error failed as well",
        "ERROR after_pipeline failed as well",
    ]


def test_two_plugins_of_one_name_are_refused_unless_one_has_another() -> None:
    first, second = Telling(), Telling()
    with pytest.raises(PluginError, match=r"fit: two plugins have the name 'Telling'; give one of the objects another"):
        Line().fit(range(1), DATA, plugins=[first, second])
    second.plugin_name = "second"
    Line().fit(range(1), DATA, plugins=[first, second])
    assert first.events == second.events != []


def test_a_path_is_relative_to_where_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = """
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def after_epoch(self, context):
            context["hyper_parameters"]["seen"].append(context["current_epoch"])
    """
    Path("counts.py").write_text(dedent(code), encoding="utf-8")
    seen: list[int] = []
    for name in ("./counts.py", "{workspace}/counts.py"):
        Line(hparams={"seen": seen}).fit(range(2), DATA, plugins=[name])
    assert seen == [0, 1, 0, 1]


class Swapping:
    """Changes the weights for each checkpoint, and changes them back."""

    every_rank = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    @hookimpl
    def before_checkpoint_saved(self, context: Context) -> None:
        self.calls.append("before")
        with torch.no_grad():
            context["model"]["brain"].brain.modules.net.weight.mul_(-1)

    @hookimpl
    def after_checkpoint_captured(self, context: Context) -> None:
        self.calls.append("after")
        with torch.no_grad():
            context["model"]["brain"].brain.modules.net.weight.mul_(-1)


@pytest.mark.parametrize("saves", [True, False])
def test_what_is_changed_for_a_checkpoint_is_changed_only_if_one_is_saved(saves: bool, tmp_path: Path) -> None:
    plain, plugin = Line(), Swapping()
    plain.fit(range(2), DATA)
    brain = Line(checkpointer=Checkpointer(tmp_path) if saves else None)
    brain.fit(range(2), DATA, plugins=[plugin])
    assert plugin.calls == ["before", "after"] * (2 * saves)
    assert torch.equal(brain.modules.net.weight, plain.modules.net.weight)


class Requesting:
    """Requests a checkpoint after each batch, and ends the training after five."""

    every_rank = True

    @hookimpl
    def after_batch(self, context: Context) -> None:
        context.request("checkpoint")
        if context["train_state"]["iteration"] == 5:
            context["is_exit"] = True


def test_what_a_fit_cannot_do_or_ends_early_is_logged(log_lines: list[str]) -> None:
    brain = Line()
    brain.fit(range(9), DATA, plugins=[Requesting()])
    assert trainable_of(brain).counters["iteration"] == 5
    assert [line.strip() for line in log_lines] == [
        "WARNING fit: a checkpoint was requested, and the Brain has no checkpointer; give it one",
        "INFO fit: context['is_exit'] has ended the training after iteration 5",
    ]


class Again:
    """Requests one more checkpoint when the first one is on disk."""

    every_rank = True

    def __init__(self) -> None:
        self.saved: list[str] = []

    @hookimpl
    def after_checkpoint_saved(self, context: Context, path: Path) -> None:
        self.saved.append(path.name)
        if len(self.saved) == 1:
            context.request("checkpoint")


def test_a_checkpoint_that_is_requested_while_one_is_saved_is_saved_too(tmp_path: Path) -> None:
    plugin = Again()
    Line(checkpointer=Checkpointer(tmp_path)).fit(range(2), DATA, plugins=[plugin])
    # The second one is saved when the next epoch starts, after the same iteration.
    assert plugin.saved == ["step-000000000003", "step-000000000003", "step-000000000006"]


def test_a_number_that_is_watched_needs_a_validation_set() -> None:
    with pytest.raises(
        ConfigError, match=r"early_stopping watches 'valid_loss', and fit has no valid_set; give it one"
    ):
        Line().fit(range(1), DATA, plugins=["early_stopping"])


def test_a_second_fit_of_a_brain_appends_its_numbers(tmp_path: Path) -> None:
    brain = Line(hparams={"output_folder": str(tmp_path)})
    for numbers in (range(2), range(2, 4)):
        brain.fit(numbers, DATA, plugins=["metric_log"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["event"] == "epoch"] == [0, 1, 2, 3]


class Wrapping:
    every_rank = True

    @hookimpl
    def wrap_model(self, model: Any) -> Any:
        return model


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Wrapping(), "fit: plugin 'Wrapping' has the hook wrap_model, which comes before the optimizers"),
        ("report", "report: shows a run directory, and a Brain that trains alone has none"),
    ],
)
def test_a_plugin_that_would_do_nothing_is_refused(plugin: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((PluginError, ConfigError), match=message):
        Line(hparams={"output_folder": str(tmp_path)}).fit(range(1), DATA, plugins=[plugin])


class Ending:
    """Notes how a training ends; raises in its second batch."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.batches = 0
        self.events: list[str] = []

    @hookimpl
    def before_batch(self) -> None:
        self.batches += 1
        if self.fails and self.batches == 2:
            raise OverflowError

    @hookimpl
    def after_stage(self) -> None:
        self.events.append("after_stage")

    @hookimpl
    def on_stage_error(self, name: str, error: BaseException) -> None:
        self.events.append(f"{name} {type(error).__name__}")

    @hookimpl
    def after_pipeline(self, context: Context) -> None:
        self.events.append(type(context.get("error")).__name__)

    @hookimpl
    def after_run(self) -> None:
        self.events.append("after_run")


def test_plugins_get_the_hooks_at_the_end_of_a_fit() -> None:
    done, failed = Ending(fails=False), Ending(fails=True)
    Line().fit(range(1), DATA, plugins=[done])
    with pytest.raises(OverflowError):
        Line().fit(range(1), DATA, plugins=[failed])
    assert done.events == ["after_stage", "NoneType", "after_run"]
    assert failed.events == ["runner OverflowError", "OverflowError", "after_run"]


class Counting:
    """Counts the batches of a training, over all its parts; is killed after some."""

    every_rank = True

    def __init__(self, kill_at: int = 0) -> None:
        self.kill_at = kill_at
        self.batches = 0

    @hookimpl
    def after_batch(self) -> None:
        self.batches += 1
        if self.batches == self.kill_at:
            raise KeyboardInterrupt

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def test_the_state_of_a_plugin_is_resumed(tmp_path: Path) -> None:
    options = {"ckpt_interval_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        Line(checkpointer=Checkpointer(tmp_path), run_opts=options).fit(range(3), DATA, plugins=[Counting(kill_at=6)])
    saver, counting = Checkpointer(tmp_path), Counting()
    newest = saver.newest()
    assert newest is not None
    assert read_checkpoint(newest).training["recoverables"] == {"plugin:Counting": {"batches": 4}}
    Line(checkpointer=saver, run_opts=options).fit(range(3), DATA, plugins=[counting])
    assert counting.batches == 9
    assert saver.recoverables == {}


def test_a_plugin_that_was_not_there_before_the_resume_starts_anew(tmp_path: Path) -> None:
    Line(checkpointer=Checkpointer(tmp_path)).fit(range(1), DATA)
    counting = Counting()
    Line(checkpointer=Checkpointer(tmp_path)).fit(range(2), DATA, plugins=[counting])
    assert counting.batches == 3


class Stopping:
    """Stops a training after some batches."""

    every_rank = True

    @hookimpl
    def after_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == 5:
            context.stop("that is enough")


def test_a_plugin_ends_a_fit_within_an_epoch_which_is_validated_and_saved(tmp_path: Path, log_lines: list[str]) -> None:
    brain, plugin = Line(checkpointer=Checkpointer(tmp_path)), Telling()
    brain.fit(range(3), DATA, DATA, plugins=[Stopping(), plugin])
    assert trainable_of(brain).counters["iteration"] == 5
    assert [path.name for path in brain.checkpointer.all()] == ["step-000000000003", "step-000000000005"]
    assert plugin.events.count(("after_validation", ["loss"])) == 2
    assert "INFO training ends after iteration 5: that is enough" in [line.strip() for line in log_lines]


def test_plugins_do_not_change_what_is_trained() -> None:
    plain, watched = Line(), Line()
    plain.fit(range(2), DATA, DATA)
    watched.fit(range(2), DATA, DATA, plugins=[Telling()])
    assert torch.equal(plain.modules.net.weight, watched.modules.net.weight)


def test_a_fit_that_a_plugin_has_stopped_stays_stopped(tmp_path: Path, log_lines: list[str]) -> None:
    Line(checkpointer=Checkpointer(tmp_path)).fit(range(3), DATA, plugins=[Stopping()])
    brain = Line(checkpointer=Checkpointer(tmp_path))
    brain.fit(range(3), DATA)
    assert trainable_of(brain).counters["iteration"] == 5
    assert (
        "nothing is left to train; 1 epochs and 5 updates are done, and it was stopped: that is enough" in log_lines[-1]
    )
