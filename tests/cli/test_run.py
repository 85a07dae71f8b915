"""``pipeline run`` runs a config, and leaves with the exit code that the run has earned."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from pipeline import GeneralTrainer
from pipeline.errors import ConfigError

Call = Callable[..., Result]
FAILING = """
    from pipeline import stages

    class Startup(stages.Startup):
        def startup(self, context):
            raise ZeroDivisionError("mine")
"""


def runs() -> list[Path]:
    return [path for path in Path("runs").glob("*/*") if not path.is_symlink()]


@pytest.mark.slow
def test_a_run_that_is_done_exits_0_and_keeps_stdout_free(linear: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "run", str(linear), "runner.train_runner.epochs=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Warning" not in done.stderr
    assert len(runs()) == 1


def test_a_stage_that_fails_exits_1_with_its_own_traceback(pipeline: Call, linear: Path) -> None:
    (linear.parent / "mine.py").write_text(FAILING.replace("\n    ", "\n"), encoding="utf-8")
    done = pipeline("run", linear, "runner.train_runner.startup_class_path={workspace}/mine.py")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "ZeroDivisionError: mine" in done.stderr
    assert 'mine.py", line 6, in startup' in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runner.train_runner.epochs=two"], "runner.train_runner.epochs: is 'two', a string; write an integer"),
        (["-o", "runner.train_runner.epoch=2"], "runner.train_runner.epoch: unknown key; did you mean 'epochs'?"),
        (
            ["runner.train_runner.class=cluster_train"],
            "runner.train_runner.fleet_mode: is 'collective', and this is one process; start it by `torchrun … -m pipeline",
        ),
        (["--nproc", "0"], "'0' is no number of processes; write 2, or auto"),
        (["--max-restarts", "2"], "--max-restarts 2: is for processes that are started; add --nproc N"),
        (
            ["--nproc", "3", "dataset.train_data.global_batch_size=2"],
            "dataset.train_data.global_batch_size: is 2, and there are 3 processes; start fewer, or write a larger one",
        ),
        (
            ["runner.train_runner.device=auto", "runner.train_runner.sync_batchnorm=true"],
            "runner.train_runner.sync_batchnorm: is true, and the device is the CPU; use GPUs, or remove it",
        ),
    ],
)
def test_a_wrong_config_exits_2_and_runs_nothing(
    pipeline: Call, linear: Path, arguments: list[str], message: str
) -> None:
    done = pipeline("run", linear, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert runs() == []


def test_overrides_and_the_option_for_the_config_reach_the_run(pipeline: Call, linear: Path) -> None:
    (linear.parent / "report.py").write_text("note = None", encoding="utf-8")  # A program beside the config.
    done = pipeline("run", "-q", "-m", linear, "runner.train_runner.epochs=1", "-o", "+hyper_parameters.note=a=b")
    kept = yaml.safe_load((runs()[0] / "config.yaml").read_text(encoding="utf-8"))
    assert done.exit_code == 0
    assert (kept["runner"][0]["epochs"], kept["hyper_parameters"]["note"]) == (1, "a=b")


def test_the_kept_config_has_environment_variables_unexpanded(
    pipeline: Call, linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_SECRET", "hidden")
    (linear.parent / "report.py").write_text("token = None", encoding="utf-8")  # A program beside the config.
    assert pipeline("run", "-q", linear, "+hyper_parameters.token=${env:PIPELINE_SECRET}").exit_code == 0
    text = (runs()[0] / "config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["hyper_parameters"]["token"] == "${env:PIPELINE_SECRET}"
    assert "hidden" not in text


def test_the_kept_config_runs_again(pipeline: Call, linear: Path) -> None:
    (linear.parent / "report.py").write_text("text = None", encoding="utf-8")  # A program beside the config.
    assert pipeline("run", "-q", linear, "+hyper_parameters.text='1e5'").exit_code == 0
    assert pipeline("run", "-q", runs()[0] / "config.yaml").exit_code == 0
    again = [yaml.safe_load((each / "config.yaml").read_text(encoding="utf-8")) for each in runs()]
    assert len(again) == 2
    assert again[0] == again[1]
    assert again[0]["hyper_parameters"]["text"] == "1e5"


def test_the_kept_config_of_runners_of_both_kinds_runs_again(pipeline: Call, linear: Path) -> None:
    infer = "  - {name: judge, class: infer, device: cpu}\nphase:\n"
    linear.write_text(linear.read_text(encoding="utf-8").replace("phase:\n", infer), encoding="utf-8")
    assert pipeline("run", "-q", linear, "phase.line.valid_dataset_name=null").exit_code == 0
    assert pipeline("run", "-q", runs()[0] / "config.yaml").exit_code == 0


def test_one_of_several_processes_is_refused_before_it_makes_a_run_directory(
    pipeline: Call, linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = "environment WORLD_SIZE=2: RANK is not set; start the processes with torchrun, or set it for each of them"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        GeneralTrainer(linear).run()
    done = pipeline("run", linear)
    assert (done.exit_code, done.stderr, runs()) == (2, f"{message}\n", [])


def test_one_process_of_a_launcher_is_one_process(
    pipeline: Call, linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert pipeline("run", "-q", linear, "runner.train_runner.epochs=1").exit_code == 0


@pytest.mark.parametrize(("option", "level", "quiet"), [("-q", "INFO", True), ("-v", "INFO", False)])
def test_quiet_logs_no_information(pipeline: Call, linear: Path, option: str, level: str, quiet: bool) -> None:
    done = pipeline("run", option, linear, "plugins=[{progress_bar: false}]")
    assert done.exit_code == 0
    assert (level not in done.stderr) is quiet


def test_the_process_of_a_failed_check_leaves_with_2(
    process: Callable[..., subprocess.CompletedProcess[str]], linear: Path
) -> None:
    done = process("run", linear, "--max-restarts", "2", WORLD_SIZE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "--max-restarts 2: is for processes that are started; add --nproc N\n"


SEEING = """
    from pathlib import Path
    from pipeline import stages

    class Startup(stages.Startup):
        def startup(self, context):
            super().startup(context)
            address = f"runner.{context['runner_name']}.debug"
            with Path("seen").open("a") as file:
                print(address, context["config"].get(address), context["config"].origin(address), file=file)
"""


@pytest.mark.parametrize("options", [["--debug"], []])
def test_debug_is_set_for_every_runner_of_mode(pipeline: Call, linear: Path, options: list[str]) -> None:
    (linear.parent / "seeing.py").write_text(SEEING.replace("\n    ", "\n"), encoding="utf-8")
    own = "startup_class_path: seeing.py"
    text = linear.read_text(encoding="utf-8").replace("print_interval: 3}", f"{own}}}").replace(
        "phase:\n",
        f"  - {{name: again, class: infer, device: cpu, {own}}}\n"
        "  - {name: left_out, class: infer, device: cpu}\nphase:\n",
    )  # fmt: skip
    linear.write_text(text, encoding="utf-8")
    assert pipeline("run", "-q", *options, linear, "mode=[train_runner, again]").exit_code == 0
    on = [f"runner.{name}.debug True override 'runner.{name}.debug=true'" for name in ("train_runner", "again")]
    off = [f"runner.train_runner.debug False {linear}:7", f"runner.again.debug False {linear}:8"]
    assert Path("seen").read_text(encoding="utf-8").splitlines() == (on if options else off)


def test_debug_replaces_what_the_config_says(pipeline: Call, linear: Path) -> None:
    keys = ["runner.train_runner.debug=false", "runner.train_runner.debug_batches=1"]
    assert pipeline("run", "-q", linear, *keys).exit_code == 2
    assert pipeline("run", "-q", "--debug", linear, *keys).exit_code == 0


def test_debug_of_a_config_that_cannot_be_read_is_a_wrong_config(pipeline: Call, linear: Path) -> None:
    linear.write_text("runner: [", encoding="utf-8")
    done = pipeline("run", "--debug", linear)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "1 fault; nothing was run" in done.stderr


def test_a_debug_run_leaves_nothing_behind_unless_it_is_told_to(pipeline: Call, linear: Path) -> None:
    assert pipeline("run", "-q", "--debug", linear).exit_code == 0
    assert runs() == []
    assert pipeline("run", "-q", "--debug", linear, "runner.train_runner.debug_persistently=true").exit_code == 0
    assert len(runs()) == 1
