"""Every hook: when it is called, and with what."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Context, GeneralTrainer, hookspecs, testing
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import DataError, PipelineError
from pipeline.optim.stepping import OPTIMIZER_HOOKS
from pipeline.signals import StoppedError
from pipeline.user_code.plugins import HOOKS

Recorded = Callable[..., Context]

RECORDER = "from pipeline import hookimpl\n\nclass Plugin:\n" + "".join(
    f"""
    @hookimpl
    def {name}(self, {", ".join(hook.parameters)}):
        moment = {{"current_epoch": context.get("current_epoch"), **context["train_state"]}}
        moment |= dict({", ".join(f"{each}={each}" for each in hook.parameters if each != "context")})
        context.setdefault("calls", []).append(("{name}", moment))
"""
    for name, hook in HOOKS.items()
)
"""A plugin with every hook, each with all of its arguments; it keeps the calls in the context."""

WITNESS = """
    from pathlib import Path
    from pipeline import hookimpl, stages

    def note(line):
        with open("notes.txt", "a") as file:
            file.write(line + "\\n")

    class Plugin:
        @hookimpl
        def before_pipeline(self, context):
            context["resources"].callback(note, "resources closed")
        @hookimpl
        def after_stage(self, name):
            note(f"after_stage {name}")
        @hookimpl
        def on_stage_error(self, name, error):
            note(f"on_stage_error {name}: {error}")
        @hookimpl
        def after_pipeline(self, context):
            note(f"after_pipeline: {context.get('error')}")

    class Startup(stages.Startup):
        def startup(self, context):
            raise ZeroDivisionError("no weights")

    class Terminal(stages.Terminal):
        def terminal(self, context):
            super().terminal(context)
            note("terminal")
        def abort(self, context, error):
            note(f"abort: {error}")

    class Late:
        @hookimpl
        def after_pipeline(self):
            raise ZeroDivisionError("too late")
"""
"""Plugins and stages that write down, in ``notes.txt``, what happens to a run that fails."""

BATCH = ["before_batch", "before_backward", "after_backward", "before_update", "after_update", "after_batch"]
EPOCH = [
    *(BATCH * 3), "extend_metrics", "on_print_interval",
    *(BATCH * 3), "extend_metrics", "on_print_interval",
    "extend_metrics", "after_pass", "before_validation", "extend_metrics", "after_validation",
]  # fmt: skip
SAVE = ["before_checkpoint_saved", "after_checkpoint_captured"]
RUNNER = ["before_epoch", "before_phase", "before_pass", *EPOCH, "after_phase", "after_epoch", *SAVE]
ELSEWHERE = {"on_signal", "on_stage_error", "after_checkpoint_loaded", "on_resume", "on_visual"}
"""Come in a run that fails or is resumed, or of an experiment that shows something."""
SAVED = "after_checkpoint_saved"
"""Comes when the disk has it, while training goes on."""


RECORDING = 'plugins=["{workspace}/recorder.py"]'


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The context of a run of the linear config as it is, with a plugin that records every hook."""
    folder = tmp_path_factory.mktemp("plain")
    config = testing.Workspace(folder / "workspace").config
    (config.parent / "recorder.py").write_text(RECORDER, encoding="utf-8")
    return GeneralTrainer(config, [RECORDING, f"output_dir={folder}"]).run()


@pytest.fixture
def recorded(linear: Path, plain: Context) -> Recorded:
    """Runs the linear config with a plugin that records every hook; without overrides, returns the run of ``plain``."""

    def run(*overrides: str) -> Context:
        if not overrides:
            return plain
        (linear.parent / "recorder.py").write_text(RECORDER, encoding="utf-8")
        return GeneralTrainer(linear, [RECORDING, *overrides]).run()

    return run


def names(context: Context) -> list[str]:
    return [f"{name} {moment['name']}" if "stage" in name else name for name, moment in context["calls"]]


def moments(context: Context, hook: str) -> list[dict[str, Any]]:
    return [moment for name, moment in context["calls"] if name == hook]


def test_the_hooks_of_a_whole_run_come_in_this_order(recorded: Recorded) -> None:
    assert [name for name in names(recorded()) if name != SAVED] == [
        "before_pipeline",
        "before_stage instance", "after_stage instance",
        "before_stage network", "wrap_model", "after_stage network",
        "before_stage startup", "after_stage startup",
        "before_stage runner", *RUNNER, *RUNNER, *SAVE, "after_stage runner",
        "before_stage terminal", "after_stage terminal",
        "after_pipeline", "after_run",
    ]  # fmt: skip


OBSERVED = """
from torch import nn
from pipeline import observe
class Model(nn.Linear):
    def forward(self, x):
        return observe("output", super().forward(x))
"""


def test_the_manual_lists_the_hooks_in_the_order_in_which_they_first_come(recorded: Recorded, linear: Path) -> None:
    (linear.parent / "net.py").write_text(OBSERVED, encoding="utf-8")
    model, export = "phase.line.model={workspace}/net.py", "runner.train_runner.save_inference_interval=1"
    calls = names(recorded(model, export))
    later = [f"after_stage {stage}" for stage in ("instance", "network", "startup")]
    seen = dict.fromkeys(call.split()[0] for call in calls if call not in later)
    assert list(seen) == [name for name in HOOKS if name not in ELSEWHERE]


def test_every_hook_is_called_somewhere_in_the_framework_and_no_other_is() -> None:
    files = [*Path(hookspecs.__file__).parent.rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    calls = re.findall(r"(?:\bhooks|\[\"hooks\"\])\.(\w+)\b", text) + re.findall(
        r'hook_or_none\([\w.\[\]"]+, "(\w+)"\)', text
    )
    assert {*calls, *OPTIMIZER_HOOKS} == HOOKS.keys()


def test_hooks_of_batch_backward_and_update_name_the_phase_whose_pass_it_is_where_two_share_a_model(
    recorded: Recorded, linear: Path
) -> None:
    shared = linear.read_text(encoding="utf-8").replace(
        "  - name: line", "  - {name: again, model_of: line, dataset_name: train_data}\n  - name: line"
    )
    linear.write_text(shared, encoding="utf-8")
    context = recorded("runner.train_runner.epochs=1")
    for hook in BATCH:
        assert [moment["phase"] for moment in moments(context, hook)] == ["again"] * 6 + ["line"] * 6


def test_batch_hooks_get_the_batch_its_predictions_and_losses(recorded: Recorded) -> None:
    x = torch.linspace(-1, 1, 24).unsqueeze(1)
    context = recorded()
    before, after = (moments(context, hook)[:6] for hook in ("before_batch", "after_batch"))
    assert torch.equal(torch.cat([moment["batch"][0] for moment in before]), x)
    for earlier, moment in zip(before, after, strict=True):
        assert moment["batch"] is earlier["batch"]
        mean_square = (moment["predictions"] - moment["batch"][1]).square().mean()
        torch.testing.assert_close(moment["losses"]["loss"], mean_square)


STOPPER = """
    from pipeline import hookimpl
    class Plugin:
        def __init__(self, at):
            self.at = at
        @hookimpl
        def {hook}(self, context):
            context["is_exit"] = context["train_state"]["iteration"] == self.at and not context["checkpointer"].all()
"""
"""A plugin that ends a run at an iteration, so that it is resumed; where nothing was saved before."""


@pytest.fixture
def resumed(recorded: Recorded, linear: Path) -> Callable[..., Context]:
    """Runs the linear config up to a moment, and goes on with the recorder."""

    def run(hook: str, at: int, *overrides: str) -> Context:
        (linear.parent / "stopper.py").write_text(textwrap.dedent(STOPPER.format(hook=hook)), encoding="utf-8")
        overrides = (*overrides, "runner.train_runner.save_interval=null")
        stopper = f'plugins=["{{workspace}}/stopper.py": {{at: {at}}}]'
        GeneralTrainer(linear, [stopper, *overrides]).run()
        (linear.parent / "recorder.py").write_text(RECORDER, encoding="utf-8")
        return GeneralTrainer(linear, ['plugins=["{workspace}/recorder.py"]', *overrides], resume="auto").run()

    return run


def test_an_epoch_that_is_resumed_in_its_middle_does_not_begin_again(resumed: Callable[..., Context]) -> None:
    context = resumed("after_batch", 8)
    runner = names(context)[names(context).index("before_stage runner") + 1 :]
    assert runner[:4] == ["after_checkpoint_loaded", "on_resume", "before_batch", "before_backward"]
    assert moments(context, "after_checkpoint_loaded")[0]["path"].name == "step-000000000008"
    [moment] = moments(context, "on_resume")
    assert (moment["current_epoch"], moment["iteration"]) == (1, 8)
    assert not [name for name in names(context) if name in {"before_epoch", "before_phase", "before_pass"}]
    assert [len(moments(context, hook)) for hook in ("after_epoch", "after_phase", "after_pass")] == [1, 1, 1]


def test_hooks_that_a_resumed_epoch_leaves_out_say_so(recorded: Recorded, resumed: Callable[..., Context]) -> None:
    """The first line of a hook is its row in the table of plugins/README.md."""
    of_straight = {name.split()[0] for name in names(recorded())}
    of_resumed = {name.split()[0] for name in names(resumed("after_batch", 8))}
    left_out = of_straight - of_resumed
    rows = {name: (getattr(hookspecs, name).__doc__ or "").splitlines()[0] for name in of_straight}
    assert left_out == {"before_epoch", "before_phase", "before_pass"}
    assert {name for name, row in rows.items() if "resumed in its middle" in row} == left_out


@pytest.mark.parametrize("hook", ["after_epoch", "before_epoch"])
def test_a_run_that_is_resumed_between_two_epochs_begins_the_next(resumed: Callable[..., Context], hook: str) -> None:
    context = resumed(hook, 6)
    runner = names(context)[names(context).index("before_stage runner") + 1 :]
    begun = ["before_epoch"] if hook == "after_epoch" else []
    assert runner[1 : 5 + len(begun)] == ["on_resume", *begun, "before_phase", "before_pass", "before_batch"]
    assert moments(context, "on_resume")[0]["epoch"] == 1


def test_a_run_without_a_checkpoint_is_not_resumed(recorded: Recorded) -> None:
    assert not moments(recorded(), "on_resume")


CLASS = "runner.train_runner.runner_class_path"
OWN_RUNNERS = """
from pipeline import ExperimentBase, RunnerBase, stages
import torch

class Default(stages.Runner):
    pass

class Verbs(stages.Runner):
    def train_epoch(self, context, epoch):
        for phase in context["model"].values():
            self.train_phase(context, phase)
    def train_batch(self, context, phase, batch):
        return super().train_batch(context, phase, batch)
    def validate(self, context, phase):
        return super().validate(context, phase)

class Loop(RunnerBase):
    def run(self, context):
        for epoch in context.epochs():
            for batch in context.batches("line"):
                context["model"]["line"].brain.fit_batch(batch)

class Experiment(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = self.valid_loader = self.context["dataset"]["train_data"]
    def setup_model(self):
        entry = self.context["model"]["line"]
        self.model, self.optimizer = entry["model"], entry["optim_schedulers"]["main"]
    def train_batch(self):
        x, y = self.read_batch()
        self.optimizer.step((self.model(x) - y).square().mean())
    def valid(self):
        self.visualizer.add_scalar("loss", 1.0, self.iteration)
        self.visualizer.add_audio("tone", torch.zeros(2), self.iteration)
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("Verbs", "max_steps=9"),
        ("Loop", "epochs=2"),
        pytest.param("Verbs", "epochs=2", marks=pytest.mark.slow),
        pytest.param("Loop", "max_steps=9", marks=pytest.mark.slow),
    ],
)
def test_hooks_come_alike_from_the_default_runner_overridden_verbs_and_a_loop_of_ones_own(
    recorded: Recorded, linear: Path, kind: str, limit: str
) -> None:
    (linear.parent / "own.py").write_text(OWN_RUNNERS, encoding="utf-8")
    keys = ["save_interval=4", "save_inference_interval=1", "valid_interval=[1 epoch, 5]", "epochs=2", limit]
    calls = [
        names(recorded(*(f"runner.train_runner.{key}" for key in keys), f"{CLASS}={{workspace}}/own.py:{each}"))
        for each in ("Default", kind)
    ]
    default, own = ([name for name in each if name != SAVED] for each in calls)
    assert own == default


def test_an_experiment_has_the_hooks_of_the_default_runner_in_an_order_of_its_own(
    recorded: Recorded, linear: Path
) -> None:
    (linear.parent / "own.py").write_text(OWN_RUNNERS, encoding="utf-8")
    context = recorded(f"{CLASS}={{workspace}}/own.py:Experiment")
    calls = names(context)
    runner = [name for name in calls[calls.index("before_stage runner") + 1 :] if name != SAVED]
    validation = ["before_validation", "on_visual", "extend_metrics", "after_validation"]
    reports = ["extend_metrics", "on_print_interval"]
    assert runner[: runner.index("after_epoch") + 1] == [
        "before_epoch", "before_phase", "before_pass", *(BATCH * 3), *reports, *(BATCH * 3), *reports, *validation,
        "extend_metrics", "after_pass", "after_phase", "after_epoch",
    ]  # fmt: skip
    phases = {moment["phase"] for hook in BATCH for moment in moments(context, hook)}
    assert phases == {"experiment"}
    folder = context["run_dir"] / "train_runner" / "visuals"
    shown = [
        tuple(moment[name] for name in ("phase", "tag", "step", "path")) for moment in moments(context, "on_visual")
    ]
    assert shown == [("experiment", "tone", step, folder / f"tone-{step:012}.wav") for step in (6, 12)]
    assert [moment["iteration"] for moment in moments(context, "after_batch")] == list(range(1, 13))


def test_the_numbers_of_a_pass_are_those_of_its_batches(recorded: Recorded) -> None:
    context = recorded()
    losses = [moment["losses"]["loss"].item() for moment in moments(context, "after_batch")]
    passes = moments(context, "after_pass")
    assert [each["metrics"]["loss"] for each in passes] == pytest.approx([sum(losses[:6]) / 6, sum(losses[6:]) / 6])
    assert {each["phase"] for each in (*passes, *moments(context, "before_pass"))} == {"line"}


PENALTY = """
    from pipeline import hookimpl
    class Plugin:
        @hookimpl
        def before_backward(self, context, losses):
            weight = context["model"]["line"]["model"].weight
            context["initial"] = weight.item()
            losses["loss"] = losses["loss"] + 0.5 * weight.square().sum()
"""


def test_a_term_that_a_plugin_adds_before_backward_is_trained_on(linear: Path) -> None:
    (linear.parent / "penalty.py").write_text(textwrap.dedent(PENALTY), encoding="utf-8")
    one = "runner.train_runner.max_steps=1"
    added = GeneralTrainer(linear, ['plugins=["{workspace}/penalty.py"]', one]).run()
    plain = GeneralTrainer(linear, [one]).run()
    # The gradient of the term is the weight itself; the learning rate is 0.1.
    expected = plain["model"]["line"]["model"].weight.item() - 0.1 * added["initial"]
    assert added["model"]["line"]["model"].weight.item() == pytest.approx(expected)


TERM = """
from pipeline import hookimpl
class Plugin:
    @hookimpl
    def before_backward(self, losses):
        losses["loss"] = losses["loss"] + 1000
"""
BY_HAND = """
from torch.nn.functional import mse_loss
from pipeline import RunnerBase
class Runner(RunnerBase):
    def run(self, context):
        phase = context["model"]["line"]
        for _ in context.epochs():
            for inputs, targets in context.batches(phase):
                phase.optim_schedulers["main"].step(mse_loss(phase.model(inputs), targets))
"""
BY_NAME = """
import torch
from pipeline import Brain
class Net(Brain):
    def __init__(self, in_features, out_features):
        super().__init__({"net": torch.nn.Linear(in_features, out_features)})
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])
    def compute_objectives(self, predictions, batch, stage):
        return {"loss": torch.nn.functional.mse_loss(predictions, batch[1])}
"""
KEYS = {
    "scalar": [],
    "by_hand": ["runner.train_runner.runner_class_path={workspace}/by_hand.py"],
    "by_name": ["phase.line.model={workspace}/by_name.py:Net", "phase.line.loss=null"],
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_the_reported_loss_has_the_term_that_a_plugin_adds(linear: Path, keys: list[str]) -> None:
    for name, text in {"term": TERM, "by_hand": BY_HAND, "by_name": BY_NAME}.items():
        (linear.parent / f"{name}.py").write_text(text, encoding="utf-8")
    one = [*keys, "runner.train_runner.max_steps=1"]
    added = GeneralTrainer(linear, [*one, 'plugins=["{workspace}/term.py"]']).run()["metrics"]["line"]["loss"]
    assert added == pytest.approx(GeneralTrainer(linear, one).run()["metrics"]["line"]["loss"] + 1000)


KEEPING = """
import signal
from pathlib import Path
from pipeline import hookimpl
class Plugin:
    @hookimpl
    def after_batch(self, context):
        if context["train_state"]["iteration"] == 8 and not context["checkpointer"].all()[2:]:
            signal.raise_signal(signal.SIGTERM)
    @hookimpl
    def after_run(self, context):
        with Path("hooks.txt").open("a") as file:
            file.writelines(f"{name}\\n" for name, _ in context["calls"])
"""


def test_each_hook_is_called_in_a_run_that_a_signal_stops_and_the_one_that_goes_on(linear: Path) -> None:
    files = {"recorder.py": RECORDER, "net.py": OBSERVED, "keeping.py": KEEPING}
    for name, text in files.items():
        (linear.parent / name).write_text(text, encoding="utf-8")
    keys = ["phase.line.model={workspace}/net.py", "runner.train_runner.save_inference_interval=1"]
    keys.append('plugins=["{workspace}/recorder.py", "{workspace}/keeping.py"]')
    with pytest.raises(StoppedError):
        GeneralTrainer(linear, keys).run()
    GeneralTrainer(linear, keys, resume="auto").run()
    assert set(Path("hooks.txt").read_text(encoding="utf-8").split()) == HOOKS.keys() - {"on_visual"}


SIGNALED = """
    import signal
    from pathlib import Path
    from pipeline import hookimpl
    class Plugin:
        @hookimpl
        def after_batch(self, context):
            if context["train_state"]["iteration"] == 4:
                signal.raise_signal(signal.SIGTERM)
        @hookimpl
        def on_signal(self, context, signal):
            Path("signal.txt").write_text(f"{signal.name} {context['checkpointer'].newest().name}")
"""


def test_a_signal_is_announced_once_the_training_is_saved(linear: Path) -> None:
    (linear.parent / "signaled.py").write_text(textwrap.dedent(SIGNALED), encoding="utf-8")
    with pytest.raises(StoppedError):
        GeneralTrainer(linear, ['plugins=["{workspace}/signaled.py"]']).run()
    assert Path("signal.txt").read_text(encoding="utf-8") == "SIGTERM step-000000000004"


CHANGING = """
    from pipeline import hookimpl
    class Plugin:
        @hookimpl
        def before_checkpoint_saved(self, context):
            self.bias = context["model"]["line"]["model"].bias.data
            self.before = self.bias.clone()
            self.bias.fill_(context["train_state"]["iteration"])

        @hookimpl
        def after_checkpoint_captured(self):
            self.bias.copy_(self.before)
"""


def test_what_a_plugin_changes_before_a_checkpoint_is_saved_is_in_it_and_may_be_put_back(linear: Path) -> None:
    straight = GeneralTrainer(linear).run()
    (linear.parent / "changing.py").write_text(textwrap.dedent(CHANGING), encoding="utf-8")
    context = GeneralTrainer(linear, ['plugins=["{workspace}/changing.py"]']).run()
    saved = [read_checkpoint(path).weights["line"]["bias"].item() for path in context["checkpointer"].all()]
    assert sorted(saved) == [6, 12]
    assert context["metrics"] == straight["metrics"]


UPDATER = """
from pipeline import UpdaterBase
class Updater(UpdaterBase):
    def __init__(self, {taken}):
        super().__init__()
        self.taken = {taken}
    def update(self, batch):
        {does}
"""
UPDATERS = {
    "the default": {},
    "the Brain's fit_batch": {"taken": "brain", "does": "self.taken.fit_batch(batch)"},
    "a scheduler": {"taken": "model, optim_schedulers", "does": """self.taken[1]["main"].step(
        {"loss": (self.taken[0](batch[0]) - batch[1]).square().mean()})"""},
}  # fmt: skip


@pytest.mark.parametrize("updater", UPDATERS)
def test_the_batch_counts_in_after_batch_and_not_before(recorded: Recorded, linear: Path, updater: str) -> None:
    (linear.parent / "own.py").write_text(UPDATER.format(**UPDATERS[updater]) if UPDATERS[updater] else "")
    phase = ["phase.line.updater.class_path={workspace}/own.py"] if UPDATERS[updater] else []
    context = recorded(*phase)
    for hook in BATCH:
        done = range(1, 13) if hook == "after_batch" else range(12)
        found = [[each[name] for name in ("iteration", "update", "samples")] for each in moments(context, hook)]
        assert found == [[count, count, 4 * count] for count in done], hook


def test_epochs_count_from_0_and_are_there_when_they_begin(recorded: Recorded) -> None:
    assert [moment["current_epoch"] for moment in moments(recorded(), "before_epoch")] == [0, 1]


def test_a_report_is_the_mean_of_the_losses_since_the_last(recorded: Recorded) -> None:
    context = recorded()
    losses = [moment["losses"]["loss"].item() for moment in moments(context, "after_batch")]
    means = [sum(losses[start : start + 3]) / 3 for start in range(0, 12, 3)]
    reports = moments(context, "on_print_interval")
    assert [report["metrics"]["loss"] for report in reports] == pytest.approx(means)
    assert {report["phase"] for report in reports} == {"line"}


def test_the_numbers_of_a_validation_are_those_of_the_trained_model(recorded: Recorded) -> None:
    context = recorded()
    x = torch.linspace(-1, 1, 24).unsqueeze(1)
    loss = (context["model"]["line"]["model"](x) - (3 * x - 1)).square().mean().item()
    last = moments(context, "after_validation")[-1]
    assert last["phase"] == "line"
    assert last["metrics"] == {"loss": pytest.approx(loss)}


@pytest.mark.parametrize(
    ("interval", "steps"),
    [
        ("2 epoch", [12]),
        ("[1 epoch, 5]", [5, 6, 10, 12]),
        ("null", [12]),
        pytest.param("1 epoch", [6, 12], marks=pytest.mark.slow),
        pytest.param("5", [5, 10, 12], marks=pytest.mark.slow),
    ],
)
def test_each_checkpoint_is_announced_and_is_complete_by_then(
    recorded: Recorded, interval: str, steps: list[int]
) -> None:
    context = recorded(f"runner.train_runner.save_interval={interval}", "runner.train_runner.keep_last=null")
    paths = [moment["path"] for moment in moments(context, "after_checkpoint_saved")]
    folder = context["run_dir"] / "train_runner" / "checkpoints"
    assert paths == [folder / f"step-{step:012d}" for step in steps]
    assert all((path / "manifest.json").is_file() for path in paths)


def test_the_last_checkpoint_of_an_epoch_is_announced_before_the_next_is_saved(recorded: Recorded) -> None:
    told = [moment["iteration"] for moment in moments(recorded(), SAVED)]
    assert 6 <= told[0] <= told[1] == 12


def test_a_checkpoint_that_takes_the_place_of_another_is_announced_too(recorded: Recorded) -> None:
    context = recorded("runner.train_runner.save_interval=4")
    steps = [int(moment["path"].name[5:]) for moment in moments(context, SAVED)]
    assert steps == [4, 8, 12, 12]


ADDING = """
    from pipeline import hookimpl
    class Plugin:
        after = ("progress_bar", "metric_log")
        @hookimpl
        def extend_metrics(self, context, metrics):
            return {"negative": -context["train_state"]["iteration"], "twice": 2 * metrics["loss"]}
"""


@pytest.fixture
def added(linear: Path) -> Path:
    """The linear config with a plugin that adds two numbers, and is called last."""
    (linear.parent / "adding.py").write_text(textwrap.dedent(ADDING), encoding="utf-8")
    with linear.open("a", encoding="utf-8") as file:
        file.write('plugins: ["{workspace}/adding.py"]\n')
    return linear


def test_a_number_of_a_plugin_is_in_metrics_jsonl_results_and_the_bar(added: Path, log_lines: list[str]) -> None:
    run_dir = GeneralTrainer(added).run()["run_dir"]
    lines = [json.loads(line) for line in (run_dir / "train_runner" / "metrics.jsonl").read_text().splitlines()]
    assert {line["event"] for line in lines} == {"train", "validate", "epoch"}
    assert all(line["negative"] == -line["iteration"] and line["twice"] == 2 * line["loss"] for line in lines)
    results = json.loads((run_dir / "train_runner" / "results.json").read_text())["metrics"]["line"]
    assert (results["valid_negative"], results["valid_twice"]) == (-12, 2 * results["valid_loss"])
    assert sum("batch 3/6" in line and "negative -3  twice" in line for line in log_lines) == 1


def test_the_best_checkpoint_may_be_that_of_a_number_of_a_plugin(added: Path) -> None:
    keep = "runner.train_runner.keep_best={metric: valid_negative, mode: max}"
    assert GeneralTrainer(added, [keep]).run()["best"]["value"] == -6


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0]", "returned a list; return a dict of numbers by name"),
        ("{'name': (1, 2)}", ": 'name' is a tuple, which is no number"),
        ("{'name': 'high'}", ": 'name' is a str, which is no number"),
        ("{'name': None}", ": 'name' is a NoneType, which is no number"),
    ],
)
def test_what_is_no_number_by_name_is_an_error_of_the_plugin(added: Path, returned: str, message: str) -> None:
    text = (added.parent / "adding.py").read_text(encoding="utf-8")
    (added.parent / "adding.py").write_text(re.sub(r"return .*", f"return {returned}", text), encoding="utf-8")
    with pytest.raises(PipelineError, match=f"plugin 'adding', hook extend_metrics ?{message}"):
        GeneralTrainer(added).run()


def test_the_name_of_a_number_of_a_plugin_is_a_string(added: Path) -> None:
    text = (added.parent / "adding.py").read_text(encoding="utf-8")
    (added.parent / "adding.py").write_text(re.sub(r"return .*", "return {1: 2.5}", text), encoding="utf-8")
    assert GeneralTrainer(added).run()["metrics"]["line"]["valid_1"] == 2.5


def test_two_plugins_that_add_a_number_of_one_name_are_an_error_of_both(added: Path) -> None:
    file = "{workspace}/adding.py"
    message = "plugin 'again', hook extend_metrics returned 'negative', which plugin 'adding' returned too"
    with pytest.raises(DataError, match=message):
        GeneralTrainer(added, [f"plugins=['{file}', {{name: again, class_path: '{file}'}}]"]).run()


def test_an_infer_runner_has_one_validation_and_no_epoch(recorded: Recorded, tmp_path: Path) -> None:
    trained = recorded()["run_dir"] / "train_runner" / "checkpoints" / "step-000000000012"
    calls = names(recorded("runner.train_runner.class=infer", "runner.train_runner.epochs=null",
                           f"runner.train_runner.init_model_path={trained}"))  # fmt: skip
    runner = calls[calls.index("before_stage runner") + 1 : calls.index("after_stage runner")]
    assert runner == ["before_validation", "extend_metrics", "after_validation"]


def witnessed(linear: Path, plugins: str, *overrides: str) -> list[str]:
    """The notes of a run that fails."""
    (linear.parent / "witness.py").write_text(textwrap.dedent(WITNESS), encoding="utf-8")
    terminal = 'runner.train_runner.terminal_class_path="{workspace}/witness.py"'
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(linear, [f"plugins={plugins}", terminal, *overrides]).run()
    return Path("notes.txt").read_text(encoding="utf-8").splitlines()


def test_after_a_failure_the_error_is_told_then_terminal_aborts_then_all_is_closed(linear: Path) -> None:
    startup = 'runner.train_runner.startup_class_path="{workspace}/witness.py"'
    assert witnessed(linear, '["{workspace}/witness.py"]', startup) == [
        "after_stage instance",
        "after_stage network",
        "on_stage_error startup: no weights",
        "abort: no weights",
        "after_pipeline: no weights",
        "resources closed",
    ]


def test_a_plugin_that_fails_after_terminal_neither_aborts_nor_ends_the_pipeline_twice(linear: Path) -> None:
    notes = witnessed(linear, '["{workspace}/witness.py", "{workspace}/witness.py:Late"]')
    assert notes[-4:] == ["terminal", "after_stage terminal", "after_pipeline: None", "resources closed"]


OVER = """
    import json
    from pipeline import hookimpl

    class Plugin:
        @hookimpl
        def after_run(self, context):
            status = json.loads((context["run_dir"] / "status.json").read_text())
            done = (context["run_dir"] / context["runner_name"] / "done.json").is_file()
            with open("notes.txt", "a") as file:
                file.write(f"{context['runner_name']} {status['state']} {done} {context.get('error')}\\n")

    class Failing:
        @hookimpl
        def after_run(self):
            raise ZeroDivisionError("too late")
"""
TWO = "runner=[{name: one, class: train, device: cpu, epochs: 1}, {name: two, class: train, device: cpu, epochs: 1}]"


def test_when_the_run_is_over_the_plugins_of_its_last_runner_are_told(linear: Path) -> None:
    (linear.parent / "over.py").write_text(textwrap.dedent(OVER), encoding="utf-8")
    GeneralTrainer(linear, [TWO, 'plugins=["{workspace}/over.py"]']).run()
    assert Path("notes.txt").read_text(encoding="utf-8") == "two done True None\n"


def test_when_a_run_has_failed_its_status_says_so_by_then(linear: Path) -> None:
    (linear.parent / "over.py").write_text(textwrap.dedent(OVER), encoding="utf-8")
    (linear.parent / "witness.py").write_text(textwrap.dedent(WITNESS), encoding="utf-8")
    words = ['runner.one.startup_class_path="{workspace}/witness.py"', 'plugins=["{workspace}/over.py"]']
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(linear, [TWO, *words]).run()
    assert Path("notes.txt").read_text(encoding="utf-8") == "one failed False no weights\n"


def test_an_error_when_the_run_is_over_is_logged_with_its_plugin_and_changes_nothing(
    linear: Path, log_lines: list[str]
) -> None:
    (linear.parent / "over.py").write_text(textwrap.dedent(OVER), encoding="utf-8")
    plugins = 'plugins=["{workspace}/over.py", {name: late, class_path: "{workspace}/over.py:Failing"}]'
    context = GeneralTrainer(linear, [plugins]).run()
    assert json.loads((context["run_dir"] / "status.json").read_text())["state"] == "done"
    [error] = [line for line in log_lines if line.startswith("ERROR")]
    assert "plugin 'late', hook after_run (over.py:" in error
    assert "failed: ZeroDivisionError: too late" in error
