"""What a run says at its end: what was saved, and how it goes on."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pipeline import Context, GeneralTrainer, hookimpl
from tests.training.conftest import linear_config

Run = Callable[..., subprocess.CompletedProcess[str]]

STOPPING = """
    import os, signal
    from pipeline import hookimpl

    class Plugin:
        every_rank = True

        def __init__(self, how, at):
            self.how, self.at = how, at

        @hookimpl
        def after_batch(self, context):
            if context["train_state"]["iteration"] == self.at:
                if self.how == "exit":
                    context["is_exit"] = True
                elif self.how == "error":
                    raise ZeroDivisionError("in the model")
                elif self.how != "never":
                    os.kill(os.getpid(), getattr(signal, self.how))
"""


def stopping(config: Path, how: str, at: int = 8) -> str:
    """The override with which a run ends so in an iteration; epochs have six."""
    (config.parent / "stopping.py").write_text("\n".join(line[4:] for line in STOPPING.splitlines()), encoding="utf-8")
    return "plugins=" + json.dumps([{"{workspace}/stopping.py": {"how": how, "at": at}}])


def last_lines(stderr: str) -> tuple[str, str]:
    """(level and text, command) of the last message."""
    *_, text, command = stderr.splitlines()
    return re.sub(r"^\d\d:\d\d:\d\d (\w+) +", r"\1 ", text), command


class Stop:
    """Ends a run in its fourth iteration."""

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == 3:
            raise ZeroDivisionError


def run_dir() -> Path:
    return Path("runs/workspace/latest").resolve()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_is_no_error_and_says_what_was_saved_and_the_command_that_goes_on(
    process: Run, pipeline: Callable[..., Result], linear: Path, name: str
) -> None:
    done = process("run", linear, stopping(linear, name), PWD=str(Path.cwd()))
    folder = run_dir().relative_to(Path.cwd())
    saved = "train_runner/checkpoints/step-000000000008 and 1 older"
    assert last_lines(done.stderr) == (f"WARNING saved in {folder}: {saved}; to go on:", f"  pipeline resume {folder}")
    assert "ERROR" not in done.stderr
    # As it stands there.
    again = pipeline(*shlex.split(last_lines(done.stderr)[1])[1:], stopping(linear, "never"))
    assert (again.exit_code, json.loads((run_dir() / "status.json").read_text())["iteration"]) == (0, 12)


def test_an_error_stays_one_and_says_what_comes_again(process: Run, linear: Path) -> None:
    done = process("run", linear, stopping(linear, "error"))
    assert re.search(r"ERROR .*ZeroDivisionError: in the model", done.stderr)
    saved = f"saved in {run_dir()}: train_runner/checkpoints/step-000000000006"
    text = f"WARNING {saved}; the 2 iterations after it come again; once that is mended, this goes on:"
    assert last_lines(done.stderr) == (text, f"  pipeline resume {run_dir()}")


def test_an_error_before_anything_was_saved_has_the_last_word(linear: Path, log_lines: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(linear, [stopping(linear, "error", at=2)]).run()
    assert log_lines[-1].startswith("ERROR ")


def test_a_signal_before_anything_was_saved_says_so(
    linear: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = "from pipeline import stages\nclass Network(stages.Network):\n    writes = ('dataset', 'model')\n    def build_network(self, context):\n"
    (linear.parent / "own.py").write_text(f"{network}        raise KeyboardInterrupt\n", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        GeneralTrainer(linear, ['runner.train_runner.network_class_path="{workspace}/own.py"']).run()
    assert log_lines[-1] == "WARNING nothing was saved yet with which the run could go on; begin it again\n"


def test_is_exit_says_how_to_go_on(linear: Path, log_lines: list[str]) -> None:
    GeneralTrainer(linear, [stopping(linear, "exit")]).run()
    assert any("the run ends here, before the end of train_runner" in line for line in log_lines)
    items = "train_runner/checkpoints/step-000000000008 and 1 older, train_runner/results.json"
    assert log_lines[-1] == f"INFO saved in {run_dir()}: {items}; to go on:\n  pipeline resume {run_dir()}\n"


def test_a_run_that_resumes_by_itself_is_begun_again_by_its_own_command_quoted_for_the_shell(
    linear: Path, log_lines: list[str]
) -> None:
    overrides = [stopping(linear, "SIGTERM"), "note=it's mine"]
    with pytest.raises(BaseException, match="SIGTERM"):
        GeneralTrainer(linear, overrides, resume="auto").run()
    words = shlex.split(log_lines[-1].splitlines()[1])
    assert words == ["pipeline", "run", str(linear), *overrides, "--resume", "auto"]


def test_a_directory_that_others_may_write_to_goes_on_by_its_config(linear: Path, log_lines: list[str]) -> None:
    linear.chmod(0o666)
    overrides = [stopping(linear, "SIGTERM")]
    with pytest.raises(BaseException, match="SIGTERM"):
        GeneralTrainer(linear, overrides).run()
    [first] = [line for line in log_lines if line.startswith("INFO run directory")]
    assert first
    run_dir().chmod(0o777)
    with pytest.raises(BaseException, match="SIGTERM"):
        GeneralTrainer(linear, [stopping(linear, "SIGTERM", at=10)], resume=run_dir()).run()
    words = shlex.split(log_lines[-1].splitlines()[1])
    assert words == ["pipeline", "run", str(linear), stopping(linear, "SIGTERM", at=10), "--resume", str(run_dir())]


def test_a_config_from_python_goes_on_there(log_lines: list[str]) -> None:
    config = linear_config(save_interval=1)
    config["plugins"].append(Stop)
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(config).run()
    folder = next(Path("runs/config").resolve().glob("2*"))
    assert log_lines[-1].endswith(f"this goes on:\n  GeneralTrainer(config, resume={str(folder)!r}).run()\n")


def test_each_runner_says_at_its_end_what_it_has_saved(linear: Path, log_lines: list[str]) -> None:
    runners = (
        "runner=[{name: t, class: train, device: cpu, epochs: 4, save_inference_interval: 2},"
        "{name: i, class: infer, device: cpu, predictions: {format: jsonl}}]"
    )
    GeneralTrainer(linear, [runners]).run()
    train, infer = [line for line in log_lines if "; saved in " in line and " done" in line]
    items = (
        "checkpoints/step-000000000024 and 2 older, inference/line-000000000024.safetensors and 1 older, results.json"
    )
    assert train == f"INFO t done; saved in {run_dir() / 't'}: {items}\n"
    assert infer == f"INFO i done; saved in {run_dir() / 'i'}: results.json, line_predictions.jsonl\n"
    assert log_lines[-1] == f"INFO to look at the run: pipeline report {run_dir()}\n"


def test_run_without_the_extra_names_a_command_that_works(
    linear: Path, log_lines: list[str], monkeypatch: pytest.MonkeyPatch, pipeline: Callable[..., Result]
) -> None:
    """`pipeline report` needs bokeh and jinja2."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    GeneralTrainer(linear).run()
    command = re.search(r"INFO to look at the run: pipeline ([^(]*) \(", log_lines[-1])
    assert command
    done = pipeline(*shlex.split(command[1]))
    assert done.exit_code == 0
    assert run_dir().name in done.stdout


def test_of_a_debug_run_nothing_is_kept_and_nothing_goes_on(linear: Path, log_lines: list[str]) -> None:
    debug = "runner.train_runner.debug=true"
    GeneralTrainer(linear, [debug]).run()
    assert "INFO train_runner done; nothing is kept\n" in log_lines
    with pytest.raises(ZeroDivisionError):
        GeneralTrainer(linear, [debug, stopping(linear, "error", at=3)]).run()
    assert not [line for line in log_lines if "pipeline resume" in line]


@pytest.mark.slow
def test_of_two_processes_the_first_says_it_once(process: Run, linear: Path) -> None:
    overrides = [stopping(linear, "SIGTERM"), "runner.train_runner.epochs=8"]
    done = process("run", linear, *overrides, "--nproc", 2)
    assert last_lines(done.stderr)[1] == f"  pipeline resume {run_dir()} --nproc 2"
    assert done.stderr.count("pipeline resume") == 1
    assert done.stderr.count("asked to end by SIGTERM") <= 2
    assert "ERROR" not in done.stderr
