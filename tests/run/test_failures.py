"""When a stage fails: the log, ``abort``, the plugins and the resources get their turn, and the first error is raised."""

from __future__ import annotations

import json
import re
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_runs import Zygote
from loguru import logger

from pipeline import Checkpointer, Context, GeneralTrainer, hookimpl
from pipeline.distributed.world import Failure, PeerError
from pipeline.errors import ClassPathError, DataError, ExitCode, PipelineError, StorageError
from pipeline.run import failures
from pipeline.stages.base import METHODS, TerminalBase

Act = Callable[[Context], object]
Workspace = Callable[..., Path]
STAGES = list(METHODS)


def raising(error: BaseException) -> Act:
    """Raises the error."""

    def act(context: Context) -> None:
        raise error

    return act


def five(done: list[str], abort: Act | None = None, **acts: Act) -> dict[str, Any]:
    """A config of five stages that do what is given for them; terminal and its abort note in ``done`` that they ran."""

    def stage(name: str) -> type:
        base, method = METHODS[name]
        act = acts.get(name, lambda _: None)
        return type(name.capitalize(), (base,), {method: lambda self, context: act(context)})

    class Terminal(TerminalBase):
        def terminal(self, context: Context) -> None:
            done.append("terminal")
            acts.get("terminal", lambda _: None)(context)

        def abort(self, context: Context, error: BaseException) -> None:
            done.append(f"abort {error!r}")
            (abort or (lambda _: None))(context)

    classes = {f"{name}_class_path": stage(name) for name in METHODS} | {"terminal_class_path": Terminal}
    return {"runner": [{"name": "only", "class": "train", "device": "cpu", **classes}]}


def open_two(done: list[str], then: Act = lambda _: None) -> Act:
    """Puts two resources on the stack that note their closing, then does something else."""

    def act(context: Context) -> None:
        context["resources"].callback(done.append, "close first")
        context["resources"].callback(done.append, "close second")
        then(context)

    return act


def run_directory() -> Path:
    return Path("runs/config/latest")


def status() -> Any:
    return json.loads((run_directory() / "status.json").read_text())


def log() -> str:
    return (run_directory() / "log.txt").read_text()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3), GeneratorExit("odd")], ids=repr
)
@pytest.mark.parametrize("stage", STAGES[:4])
def test_abort_runs_instead_of_terminal_and_resources_close_last_opened_first(stage: str, error: BaseException) -> None:
    done: list[str] = []
    acts = {"instance": open_two(done)} | {stage: open_two(done, raising(error))}
    with pytest.raises(type(error)) as caught:
        GeneralTrainer(five(done, **acts)).run()
    assert caught.value is error
    closes = ["close second", "close first"] * (1 if stage == "instance" else 2)
    assert done == [f"abort {error!r}", *closes]


def test_after_success_the_resources_close_last_opened_first_after_terminal() -> None:
    done: list[str] = []
    GeneralTrainer(five(done, instance=open_two(done))).run()
    assert done == ["terminal", "close second", "close first"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_a_failure_inside_terminal_does_not_call_abort(error: BaseException) -> None:
    done: list[str] = []
    with pytest.raises(type(error)):
        GeneralTrainer(five(done, instance=open_two(done), terminal=raising(error))).run()
    assert done == ["terminal", "close second", "close first"]


def test_a_status_written_in_terminal_does_not_call_abort_since_terminal_ran() -> None:
    done: list[str] = []
    with pytest.raises(PipelineError, match="nothing follows"):
        GeneralTrainer(five(done, terminal=lambda context: context.update(status="uninit"))).run()
    assert done == ["terminal"]


def test_a_resource_that_fails_to_close_after_success_fails_the_run_without_abort() -> None:
    done: list[str] = []

    def add(context: Context) -> None:
        context["resources"].callback(done.append, "close other")
        context["resources"].callback(raising(OSError("disk is gone")), context)

    with pytest.raises(OSError, match="disk is gone"):
        GeneralTrainer(five(done, network=add)).run()
    assert done == ["terminal", "close other"]
    assert status()["state"] == "failed"


def test_abort_finds_the_error_in_the_context() -> None:
    error, seen = ValueError("no"), []
    with pytest.raises(ValueError, match="no"):
        GeneralTrainer(five([], lambda context: seen.append(context["error"]), startup=raising(error))).run()
    assert seen == [error]


def test_a_terminal_without_abort_is_left_out_after_a_failure() -> None:
    done: list[str] = []
    config = five(done, runner=raising(ValueError("no")))
    config["runner"][0]["terminal_class_path"] = type(
        "Terminal", (TerminalBase,), {"terminal": lambda self, context: done.append("terminal")}
    )
    with pytest.raises(ValueError, match="no"):
        GeneralTrainer(config).run()
    assert done == []


@pytest.mark.parametrize("second", [RuntimeError("also"), KeyboardInterrupt(), SystemExit(4)], ids=repr)
def test_an_error_in_abort_is_logged_beside_the_first_which_is_raised(second: BaseException) -> None:
    done: list[str] = []
    config = five(done, raising(second), instance=open_two(done), startup=raising(ValueError("the first")))
    with pytest.raises(ValueError, match="the first"):
        GeneralTrainer(config).run()
    assert done[1:] == ["close second", "close first"]
    assert f"abort failed as well: {type(second).__name__}" in log()
    assert status()["error"] == "ValueError: the first"


def test_an_error_in_closing_a_resource_is_logged_beside_the_first_and_the_others_still_close() -> None:
    done: list[str] = []

    def fail(context: Context) -> None:
        context["resources"].callback(raising(OSError("cannot close")), context)
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        GeneralTrainer(five(done, instance=open_two(done), runner=fail)).run()
    assert done[1:] == ["close second", "close first"]
    assert "closing the resources failed as well: OSError: cannot close" in log()


def test_that_another_process_has_failed_is_no_error_beside_the_first() -> None:
    def fail(context: Context) -> None:
        peer = PeerError(Failure(1, ExitCode.FAILED, "of rank 1"))
        context["resources"].callback(raising(peer), context)
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        GeneralTrainer(five([], runner=fail)).run()
    (line,) = [line for line in log().splitlines() if "closing the resources failed as well: rank 1 failed" in line]
    assert " INFO " in line


class BadPlugin:
    """Fails when it is told of a failure."""

    @hookimpl
    def on_stage_error(self, name: str) -> None:
        raise RuntimeError(f"plugin fails after {name}")


def test_an_error_in_an_error_hook_is_logged_beside_the_first_and_abort_still_runs() -> None:
    done: list[str] = []
    config = five(done, startup=raising(ValueError("the first"))) | {"plugins": [BadPlugin]}
    with pytest.raises(ValueError, match="the first"):
        GeneralTrainer(config).run()
    assert done == ["abort ValueError('the first')"]
    assert "on_stage_error failed as well: RuntimeError: plugin fails after startup" in log()


def test_a_stage_that_deletes_the_run_directory_does_not_hide_its_error() -> None:
    def fail(context: Context) -> None:
        shutil.rmtree(context["run_dir"])
        raise ValueError("the first")

    done: list[str] = []
    with pytest.raises(ValueError, match="the first"):
        GeneralTrainer(five(done, instance=open_two(done), runner=fail)).run()
    assert done == ["abort ValueError('the first')", "close second", "close first"]


def test_the_runner_after_a_failed_one_is_not_run() -> None:
    done: list[str] = []
    config = five(done, runner=raising(ValueError("no")))
    config["runner"].append(config["runner"][0] | {"name": "second"})
    trainer = GeneralTrainer(config)
    with pytest.raises(ValueError, match="no"):
        trainer.run()
    assert done == ["abort ValueError('no')"]
    assert trainer.contexts == {}


STARTUP = """
    from pipeline import stages

    def helper():
        raise ValueError("tree has {no} <root>")

    class Startup(stages.Startup):
        def startup(self, context):
            helper()
"""
OVERRIDE = ["runner.train_runner.startup_class_path={workspace}/startup.py"]


@pytest.fixture
def failing(linear: Path) -> Path:
    """The small complete config, with a startup that raises; its class path stands on line 8."""
    (linear.parent / "startup.py").write_text(STARTUP.replace("\n    ", "\n"))
    named = 'startup_class_path: "{workspace}/startup.py"'
    linear.write_text(linear.read_text().replace("epochs: 2,", f"epochs: 2,\n         {named},"))
    return linear


HEADLINE = "runner 'train_runner': startup (startup.Startup, config.yaml:8) failed in startup (startup.py:9): ValueError: tree has {no} <root>"


def test_the_caller_gets_the_users_exception_with_its_traceback_and_a_note(
    failing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(failing.parent)
    with pytest.raises(ValueError, match="tree has") as caught:
        GeneralTrainer("config.yaml").run()
    assert caught.value.__notes__ == [HEADLINE]
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-2:] == ["startup", "helper"]
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_the_log_has_stage_class_and_config_line_and_then_the_traceback_from_the_users_frame_on(
    failing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(failing.parent)
    with pytest.raises(ValueError, match="tree has"):
        GeneralTrainer("config.yaml").run()
    lines = (failing.parent / "runs/workspace/latest/log.txt").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.endswith(HEADLINE))
    frames = [line.split('"')[1] for line in lines[first:] if line.lstrip().startswith("File ")]
    assert [Path(frame).name for frame in frames] == ["startup.py", "startup.py"]
    assert lines[first + 1].startswith("Traceback")
    assert sum("tree has" in line for line in lines) == 3  # the headline, the line of code and the error


OWN_RUNNER = """
from pipeline import StartupBase, stages
class Startup(StartupBase):
    def startup(self, context): pass
class Runner(stages.Runner):
    def fail(self):
        raise RuntimeError("mine")
    {body}
"""


def reason_of(linear: Path, body: str, *settings: str) -> str:
    """Why a run failed, by status.json; its Runner has this body from line 8 on."""
    (linear.parent / "own.py").write_text(OWN_RUNNER.format(body=body), encoding="utf-8")
    with pytest.raises(RuntimeError, match="mine"):
        GeneralTrainer(linear, ["runner.train_runner.runner_class_path={workspace}/own.py", *settings]).run()
    return str(json.loads(Path("runs/workspace/latest/status.json").read_text())["reason"])


OWN_STARTUP = "startup_class_path={workspace}/own.py"
INFER = [f"runner.train_runner.{setting}" for setting in ("class=infer", "epochs=null", OWN_STARTUP)]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "verb", ["__init__", "run", "train_epoch", "train_phase", "train_batch", "validate", "is_over", "evaluate"]
)
def test_the_verb_that_failed_is_named_with_its_line(linear: Path, verb: str) -> None:
    settings = INFER if verb == "evaluate" else []
    reason = reason_of(linear, f"def {verb}(self, *rest):\n        self.fail()", *settings)
    assert f"runner (own.Runner, {PLACE}) failed in {verb} (own.py:9): RuntimeError: mine" in reason


PLACE = "override 'runner.train_runner.runner_class_path={workspace}/own.py'"
INNER = [
    # Of two verbs, that which the other has led to.
    ("def run(self, context): super().run(context)\n    def train_batch(self, *rest): self.fail()", "train_batch (own.py:9)"),
    ("@__import__('torch').no_grad()\n    def train_batch(self, *rest): self.fail()", "train_batch (own.py:9)"),
    ("def run(self, context): self.each(context)\n    def each(self, context): self.fail()", "run (own.py:8)"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "verb"), INNER)
def test_the_verb_is_the_one_that_the_framework_has_called_last(linear: Path, body: str, verb: str) -> None:
    assert f") failed in {verb}: RuntimeError: mine" in reason_of(linear, body)


def test_the_verb_is_named_too_where_we_say_to_which_phase_its_error_belongs(linear: Path) -> None:
    body = "def train_batch(self, context, phase, batch): return phase.updater.update(None)"
    (linear.parent / "own.py").write_text(OWN_RUNNER.format(body=body), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        GeneralTrainer(linear, ["runner.train_runner.runner_class_path={workspace}/own.py"]).run()
    assert f"{PLACE}) failed in train_batch (own.py:8): DataError: phase.line: " in caught.value.__notes__[-1]


RECIPE = """
import torch
from pipeline import Brain
class Recipe(Brain):
    def __init__(self, in_features, out_features):
        super().__init__({"net": torch.nn.Linear(in_features, out_features)})
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])
    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.mse_loss(predictions, batch[1])
    def on_stage_end(self, stage, stage_loss, epoch=None):
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("own", self)
        self.$CALL
"""


def test_a_brain_that_calls_the_checkpointer_that_it_has_not_in_a_config_is_told_that_the_run_saves(
    linear: Path,
) -> None:
    def reason(call: str) -> str:
        (linear.parent / "recipe.py").write_text(RECIPE.replace("$CALL", call), encoding="utf-8")
        model = ["phase.line.model={workspace}/recipe.py:Recipe", "phase.line.loss=null"]
        with pytest.raises(AttributeError):
            GeneralTrainer(linear, model).run()
        return str(json.loads(Path("runs/workspace/latest/status.json").read_text())["reason"])

    said = "(if this is self.checkpointer: a Brain in a config has none, since the run saves; set save_interval and keep_best)"
    calls = reason("checkpointer.save_and_keep_only({}, min_keys=['loss'])")
    assert "AttributeError: 'NoneType' object has no attribute 'save_and_keep_only'" in calls
    assert calls.endswith(said)
    assert not [call for call in ("hparams.save_checkpoint", "checkpointer.other()") if said in reason(call)]


def test_the_calls_that_are_explained_are_those_of_a_checkpointer() -> None:
    calls = {name for name in vars(Checkpointer) if not name.startswith("_") and callable(getattr(Checkpointer, name))}
    assert calls == failures.CHECKPOINTER_CALLS


def test_of_an_error_in_a_worker_the_verb_is_that_which_waited_for_the_batch(linear: Path) -> None:
    data = linear.parent / "data.py"
    data.write_text(data.read_text().replace("return self.x", "raise RuntimeError('mine')\n        return self.x", 2))
    body = "def run(self, context):\n        for batch in context.batches('line'): pass"
    reason = reason_of(linear, body, "dataset.train_data.num_workers=1")
    assert ") failed in run (own.py:9): RuntimeError: " in reason


def test_a_model_file_that_fails_to_import_is_told_with_the_users_own_traceback(linear: Path) -> None:
    (linear.parent / "model.py").write_text(
        "import torch\nwrong = torch.nn.Linear(1)\nclass Model(torch.nn.Linear): ..."
    )
    trainer = GeneralTrainer(
        linear, ["phase.line.model={workspace}/model.py", "phase.line.model_args={in_features: 1, out_features: 1}"]
    )
    with pytest.raises(
        ClassPathError, match=r"phase\.line\.model: .*model\.py:2: TypeError: .*out_features.*mend the file"
    ):
        trainer.run()
    lines = Path("runs/workspace/latest/log.txt").read_text().splitlines()
    files = [line.split('"')[1] for line in lines if line.lstrip().startswith("File ")]
    assert files == [str(linear.parent / "model.py")]


def test_a_class_that_cannot_be_loaded_once_stages_have_run_is_no_fault_of_the_command_line(linear: Path) -> None:
    (linear.parent / "model.py").write_text(
        "import torch\nclass Model(torch.nn.Module): ...\nraise OSError('no weights here')"
    )
    trainer = GeneralTrainer(linear, ["phase.line.model={workspace}/model.py", "phase.line.model_args={}"])
    with pytest.raises(ClassPathError, match="no weights here"):
        trainer.run()
    assert trainer.outcome is ExitCode.FAILED


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [(ValueError("no"), "failed", 1), (SystemExit(0), "failed", 1), (KeyboardInterrupt(), "interrupted", 130)],
    ids=repr,
)
def test_status_json_says_how_the_run_ended(error: BaseException, state: str, code: int) -> None:
    trainer = GeneralTrainer(five([], runner=raising(error)))
    with pytest.raises(type(error)):
        trainer.run()
    left = status()
    assert (left["state"], left["exit_code"], left["resumable"]) == (state, code, False)
    assert left["error"] == f"{type(error).__name__}: {error}"
    assert left["reason"].startswith("runner 'only': ")
    assert ".Runner, dict)" in left["reason"]
    assert trainer.outcome == code


def test_a_failure_between_two_stages_says_so() -> None:
    class Between:
        @hookimpl
        def before_pipeline(self) -> None:
            raise ValueError("too early")

    done: list[str] = []
    with pytest.raises(ValueError, match="too early"):
        GeneralTrainer(five(done) | {"plugins": [Between]}).run()
    headline = r"plugin 'Between', hook before_pipeline \(test_failures.py:\d+\) failed: ValueError: too early"
    assert re.search(headline, status()["reason"])
    assert done == ["abort ValueError('too early')"]


RUNNER = """
    import time
    from pathlib import Path
    from pipeline import RunnerBase, TerminalBase

    class Runner(RunnerBase):
        def run(self, context):
            context["resources"].callback(Path("closed").touch)
            print("ready", flush=True)
            time.sleep(60)

    class Terminal(TerminalBase):
        def terminal(self, context):
            Path("terminal").touch()
        def abort(self, context, error):
            Path("aborted").write_text(type(error).__name__)
"""


def test_ctrl_c_leaves_130_and_a_closed_run(linear: Path, workspace: Workspace, zygote: Zygote) -> None:
    workspace({"own.py": RUNNER})
    paths = [f"runner.train_runner.{stage}_class_path={{workspace}}/own.py" for stage in ("runner", "terminal")]
    printed, errors = Path("printed"), Path("errors")
    with zygote.start(Path.cwd(), ["run", str(linear), *paths], errors, {}, printed) as process:
        while not (printed.exists() and printed.read_text() == "ready\n") and process.wait(0.01) is None:
            pass
        process.send(signal.SIGINT)
        process.wait()
    left = json.loads(Path("runs/workspace/latest/status.json").read_text())
    assert (process.code, left["state"], left["exit_code"]) == (130, "interrupted", 130)
    assert Path("aborted").read_text() == "KeyboardInterrupt"
    assert Path("closed").exists()
    assert not Path("terminal").exists()
    assert "interrupted in runner (own.Runner" in errors.read_text()
    assert "Traceback" not in errors.read_text()


def test_what_the_storage_refuses_after_it_has_refused_something_is_said_once(log_lines: list[str]) -> None:
    def remove(context: Context) -> None:
        shutil.rmtree(context["run_dir"])

    trainer = GeneralTrainer(five([], network=remove))
    with pytest.raises(StorageError, match="was removed or replaced while the run was going on; begin a new run"):
        trainer.run()
    assert trainer.outcome is ExitCode.STORAGE
    assert len([line for line in log_lines if line.startswith("ERROR")]) == 1


def test_no_value_of_a_variable_is_logged_whatever_takes_the_lines(linear: Path) -> None:
    lines: list[str] = []
    # As loguru's own sink is, which a run from Python has.
    sink = logger.add(lambda line: lines.append(str(line)), diagnose=True, backtrace=True)
    secret = "a password"
    (linear.parent / "own.py").write_text(
        f"from pipeline import stages\nclass Runner(stages.Runner):\n    def run(self, context):\n"
        f"        password = '{secret}'.upper()\n        raise ValueError(len(password))\n"
    )
    with pytest.raises(ValueError, match=str(len(secret))):
        GeneralTrainer(linear, ["runner.train_runner.runner_class_path={workspace}/own.py"]).run()
    logger.remove(sink)
    text = "".join(lines)
    assert "raise ValueError(len(password))" in text
    assert secret.upper() not in text
