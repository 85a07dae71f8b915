"""``pipeline new`` writes workspaces, stages and plugins that pass every check and run as they are."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import Result
from pipeline_plugins.new.command import KINDS

from pipeline.check.checker import check
from pipeline.context import STAGES

REPOSITORY = Path(__file__).parents[2]
ADDED = [*STAGES, "my_plugin"]
"""What may be added: the name of its file."""
LEARNT: dict[str, tuple[str, str, dict[str, tuple[float, float]]]] = {
    "plain": ("train_runner", "circle", {"valid_accuracy": (0.9, 1)}),
    "ctr": ("infer_runner", "ctr", {"auc": (0.74, 0.85), "log_loss": (0.4, 0.56)}),
    "brain": ("train_runner", "waves", {"valid_loss": (0, 0.01)}),
    "experiment": ("train_runner", "experiment", {"valid_loss": (0, 0.12)}),
}
"""Kind -> runner, phase and the bounds of its last numbers: what was written learns."""
Call = Callable[..., Result]


def add(pipeline: Call, name: str, folder: str = "mine") -> Result:
    return pipeline("new", folder, *(["--plugin"] if name == "my_plugin" else ["--stage", name]))


def with_line(config: Path, printed: str) -> None:
    """Do as the output of ``new`` says: add its line to the config, at the place that it names."""
    *_, place, line = printed.splitlines()
    before = "    class: train\n" if place == "to keep it, add to an item of `runner:` in the config:" else "runner:\n"
    text = config.read_text(encoding="utf-8")
    assert place in {"to keep it, add to an item of `runner:` in the config:", "add to the config:"}
    config.write_text(text.replace(before, f"{line}\n{before}"), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_that_new_prints_check_and_run_what_it_wrote(pipeline: Call, kind: str) -> None:
    done = pipeline("new", "my work", "--kind", kind)
    wrote, commands = done.stdout.split("next:\n")
    assert wrote == "".join(f"wrote {path}\n" for path in sorted(Path("my work").iterdir()))
    checked, ran = (pipeline(*shlex.split(line)[1:]) for line in commands.splitlines())
    assert (checked.exit_code, ran.exit_code) == (0, 0)
    assert "my work/config.yaml: no faults\n" in checked.stdout
    runner, phase, bounds = LEARNT[kind]
    results = json.loads(Path("runs/my work/latest", runner, "results.json").read_text(encoding="utf-8"))
    numbers = results["metrics"][phase]
    assert {name: low < numbers[name] < high for name, (low, high) in bounds.items()} == dict.fromkeys(bounds, True)


def test_without_a_kind_the_plain_one_is_written(pipeline: Call) -> None:
    Path("mine").mkdir()
    assert pipeline("new", "mine").stdout == pipeline("new", "other").stdout.replace("other", "mine")
    template = REPOSITORY / "plugins" / "new" / "templates" / "plain"
    written = {path.name: path.read_bytes() for path in Path("mine").iterdir()}
    assert written == {path.name: path.read_bytes() for path in template.iterdir() if path.is_file()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_checks_and_runs_once_the_printed_line_is_in_the_config(pipeline: Call, name: str) -> None:
    pipeline("new", "mine")
    done = add(pipeline, name)
    assert done.stdout.startswith(f"wrote mine/{name}.py\n")
    with_line(Path("mine/config.yaml"), done.stdout)
    assert check("mine/config.yaml") == []
    assert pipeline("run", "mine/config.yaml", "runner.train_runner.epochs=1").exit_code == 0
    assert Path(f"runs/mine/latest/workspace/{name}.py").is_file()


def test_a_stage_is_tried_by_the_command_that_new_prints(pipeline: Call) -> None:
    pipeline("new", "my work")
    lines = add(pipeline, "startup", "my work").stdout.splitlines()
    assert lines[1] == "try:"
    assert pipeline(*shlex.split(lines[2])[1:], "runner.train_runner.epochs=1").exit_code == 0
    assert Path("runs/my work/latest/workspace/startup.py").is_file()


def test_stages_and_a_plugin_may_be_added_at_once(pipeline: Call) -> None:
    pipeline("new", "mine")
    done = pipeline("new", "mine", "--stage", "network", "--plugin", "--stage", "startup")
    assert done.stdout == (
        "wrote mine/network.py\nwrote mine/startup.py\nwrote mine/my_plugin.py\nwrote mine/test_my_plugin.py\n"
        "try:\n  pipeline run mine --network mine/network.py --startup mine/startup.py\n"
        "to keep it, add to an item of `runner:` in the config:\n"
        '    network_class_path: "{workspace}/network.py"\n    startup_class_path: "{workspace}/startup.py"\n'
        "test it:\n  pytest mine/test_my_plugin.py\n"
        'add to the config:\nplugins: ["{workspace}/my_plugin.py"]\n'
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_one_short_class_that_says_where_to_read_on(pipeline: Call, stage: str) -> None:
    pipeline("new", "mine")
    add(pipeline, stage)
    text = Path(f"mine/{stage}.py").read_text(encoding="utf-8")
    assert f"class {stage.capitalize()}(stages.{stage.capitalize()}):\n" in text
    assert f"see `pipeline stages {stage}`" in text
    assert 8 <= len(text.splitlines()) <= 15


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["ctr", "brain"])
def test_all_five_stages_together_train_as_the_defaults_do(pipeline: Call, kind: str) -> None:
    pipeline("new", kind, "--kind", kind)
    config = f"{kind}/config.yaml"
    numbers = {}
    for folder in ("before", "after"):
        added = [f"runner.train_runner.{stage}_class_path={{workspace}}/{stage}.py" for stage in STAGES]
        overrides = ["mode=train_runner", "runner.train_runner.epochs=1", f"output_dir={folder}"]
        assert pipeline("run", config, *overrides, *(added if folder == "after" else [])).exit_code == 0
        results = Path(folder, kind, "latest", "train_runner", "results.json").read_text(encoding="utf-8")
        numbers[folder] = json.loads(results)["metrics"]
        pipeline("new", kind, *(word for stage in STAGES for word in ("--stage", stage)))
    assert numbers["after"] == numbers["before"]


def test_a_plugin_does_something(pipeline: Call) -> None:
    pipeline("new", "mine")
    with_line(Path("mine/config.yaml"), add(pipeline, "my_plugin").stdout)
    said = pipeline("run", "mine/config.yaml", "runner.train_runner.epochs=2").stderr
    assert re.findall(r"after epoch (\d): the loss was {'circle': 0\.\d+}, and is {'circle': 0\.\d+}\n", said) == [
        "0",
        "1",
    ]


@pytest.mark.slow
def test_a_plugin_has_a_test_which_pytest_runs_whatever_its_name(pipeline: Call) -> None:
    pipeline("new", "my work")
    done = pipeline("new", "my work", "--plugin", "loss_log")
    wrote, (_, test, _, line) = done.stdout.splitlines()[:2], done.stdout.splitlines()[2:]
    assert wrote == ["wrote my work/loss_log.py", "wrote my work/test_loss_log.py"]
    assert line == 'plugins: ["{workspace}/loss_log.py"]'
    command = [sys.executable, "-m", *shlex.split(test), "-q", "-p", "no:cacheprovider"]
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "2 passed" in tested.stdout, tested.stdout


MISTAKES = {
    "": (0, 0),
    'self.first = state["first"]': (0, 1),
    'self.trigger.load_state_dict(state["trigger"])': (0, 1),
    "if self.trigger.fires(context):": (1, 0),
}
"""A line of the plugin that is left out, and whether its two tests fail then."""


@pytest.mark.slow
@pytest.mark.parametrize("line", MISTAKES)
def test_the_tests_of_a_plugin_pass_and_find_its_mistakes(pipeline: Call, line: str, tmp_path: Path) -> None:
    pipeline("new", "mine")
    pipeline("new", "mine", "--plugin", "loss_log")
    plugin = Path("mine/loss_log.py")
    text = plugin.read_text(encoding="utf-8")
    plugin.write_text(text.replace(line, "if True:" if line.startswith("if") else line and "pass"), encoding="utf-8")
    tests = [own for name, own in runpy.run_path("mine/test_loss_log.py").items() if name.startswith("test_")]
    failed = []
    for number, test in enumerate(tests):
        with suppress(AssertionError):
            test(tmp_path / str(number))
            continue
        failed.append(number)
    assert tuple(int(number in failed) for number in (0, 1)) == MISTAKES[line]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine"], "mine: is not empty; name a new folder, or add to it with --stage or --plugin"),
        (["mine/data.py"], "mine/data.py/config.yaml: cannot be written: File exists; name another folder"),
        (["new", "--kind", "pain"], "there is no kind 'pain'; did you mean 'plain'?"),
        (["new", "--kind", "x"], "there is no kind 'x'; known: brain, ctr, experiment, plain"),
        (["mine", "--stage", "strtup"], "there is no stage 'strtup'; did you mean 'startup'?"),
        (["mine", "--stage", "x"], "there is no stage 'x'; known: instance, network, runner, startup, terminal"),
        (["mine", "--stage", "network", "--stage", "runner"], "mine/runner.py: is there already; edit it, or rename it first"),
        (["a b", "--plugin"], "a b: no such folder; name the folder of a config, or write one first: pipeline new 'a b'"),
        (["mine", "--plugin", "a-b"], "--plugin a-b: is no name of a Python module; write letters, digits and _"),
        (["mine", "--plugin", "class"], "--plugin class: is no name of a Python module; write letters, digits and _"),
        (["mine", "--plugin", "metric_log"], "--plugin metric_log: is the name of a stage or of an installed plugin; choose another"),
        (["mine", "--plugin", "startup"], "--plugin startup: is the name of a stage or of an installed plugin; choose another"),
        (["mine", "--plugin", "data"], "mine/data.py: is there already; edit it, or rename it first"),
        (["mine", "--plugin", "done"], "mine/test_done.py: is there already; edit it, or rename it first"),
        (["mine", "--kind", "ctr", "--plugin"], "--kind ctr is for a whole workspace; leave it out, or --stage and --plugin"),
        ([], "Missing argument 'DIR'."),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_refused_and_nothing_is_written(
    pipeline: Call, arguments: list[str], message: str
) -> None:
    pipeline("new", "mine")
    Path("mine/runner.py").symlink_to("nowhere")
    Path("mine/test_done.py").touch()
    before = sorted(Path().rglob("*"))
    done = pipeline("new", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(f"Error: {message}\n")
    assert sorted(Path().rglob("*")) == before
