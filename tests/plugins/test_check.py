"""``pipeline check`` names every mistake of a config."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from pipeline_plugins.check.command import annotation

from pipeline.check.checker import check
from pipeline.errors import Fault

Call = Callable[..., Result]
FOLDER = Path(__file__).parents[2] / "workspace_examples"
EXAMPLES = ["custom_plugin", "custom_startup", "first_steps", "five_stages", "movielens_deepfm"]
# All others that need no extra, and the trainings beside scripts.
OTHERS = [
    pytest.param(config.parent, id=config.parent.name, marks=pytest.mark.slow)
    for config in sorted([*FOLDER.rglob("config.yaml"), *FOLDER.parent.glob("tests/jobs/*/config.yaml")])
    if config.parent.name not in EXAMPLES and not config.read_text(encoding="utf-8").startswith("# needs:")
]
RUNNER = """
from pipeline import RunnerBase
class Runner(RunnerBase):
    def run(self, context):
        print("for people")
        context["current_epoch"], context["metrics"] = 0, {}
"""
COUNTING = """
from pipeline import hookimpl
class Plugin:
    def __init__(self, path): self.path = path
    @hookimpl
    def before_batch(self, context): self.note("t")
    @hookimpl
    def after_validation(self, context, metrics): self.note("v" if context["is_infer"] else "V")
    def note(self, what):
        with open(self.path, "a") as file: file.write(what)
"""


def test_a_config_without_faults_exits_0(pipeline: Call, linear: Path) -> None:
    done = pipeline("check", linear)
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{linear}: no faults\n", "")


@pytest.mark.parametrize("arguments", [["-m", "{}"], ["--model", "{}", "-o", "runner.train_runner.epochs=3"],
                                       ["output_dir=x", "{}"]])  # fmt: skip
def test_the_config_and_overrides_may_be_given_as_options(pipeline: Call, linear: Path, arguments: list[str]) -> None:
    assert pipeline("check", *(each.replace("{}", str(linear)) for each in arguments)).exit_code == 0


def test_faults_go_to_stderr_and_exit_2(pipeline: Call, linear: Path) -> None:
    overrides = ["runner.train_runner.epochs=two", "outptu_dir=x"]
    done = pipeline("check", linear, overrides[0], "-o", overrides[1])
    faults = "\n".join(str(fault) for fault in check(linear, overrides))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == f"{faults}\n2 faults; nothing was run\n"


def test_one_fault_is_counted_as_one(pipeline: Call) -> None:
    assert pipeline("check", "nope.yaml").stderr == (
        "nope.yaml: cannot be read: No such file or directory; check the path\n1 fault; nothing was run\n"
    )


def test_json_gives_the_faults_as_data_on_stdout(pipeline: Call, linear: Path) -> None:
    linear.write_text(
        linear.read_text(encoding="utf-8").replace("epochs: 2", "epochs: two, größe: 1"), encoding="utf-8"
    )
    done = pipeline("check", linear, "--json", "outptu_dir=x")
    assert (done.exit_code, done.stderr) == (2, "")
    assert json.loads(done.stdout) == [fault.as_dict() for fault in check(linear, ["outptu_dir=x"])]
    assert [fault["address"] for fault in json.loads(done.stdout)] == [
        "runner.train_runner.epochs",
        "runner.train_runner.größe",
        "outptu_dir",
    ]


def test_json_of_no_faults_is_an_empty_list(pipeline: Call, linear: Path) -> None:
    done = pipeline("check", "--json", linear)
    assert (done.exit_code, json.loads(done.stdout)) == (0, [])


def test_a_check_runs_nothing_and_writes_nothing(pipeline: Call, linear: Path) -> None:
    (linear.parent / "data.py").write_text("open('touched', 'w')\nclass Line:\n    def __init__(self, size): pass\n")
    assert pipeline("check", linear).exit_code == 0
    assert list(Path.cwd().iterdir()) == []


def test_the_process_leaves_with_2() -> None:
    Path("config.yaml").write_text("runer: 1\n", encoding="utf-8")
    command = [sys.executable, "-m", "pipeline", "check", "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "config.yaml:1:1: runer: unknown key; did you mean 'runner'?\n    runer: 1\n    ^\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_class_files_in_a_folder_of_the_workspace_are_followed(pipeline: Call, linear: Path) -> None:
    folder = linear.parent / "deep" / "er"
    folder.mkdir(parents=True)
    (linear.parent / "data.py").rename(folder / "data.py")
    path = "dataset.train_data.class_path={workspace}/deep/er/data.py:Line"
    assert pipeline("check", linear, path).exit_code == 0
    assert "did you mean 'Line'?" in pipeline("check", linear, path.replace(":Line", ":Lin")).stderr


# GitHub's annotations


def fault(where: str, address: str = "runner.x", message: str = "is 3", line: int = 0, column: int = 0) -> Fault:
    return Fault(where, line, column, address, message, "  x: 3")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (("a.yaml", "runner.x", "is 3", 4, 5), "file=a.yaml,line=4,col=5,title=pipeline check::runner.x: is 3"),
        (("a.yaml", "", "is empty"), "file=a.yaml,title=pipeline check::is empty"),
        (("a.yaml", "x", "5 %\r\nof it: a,b"), "file=a.yaml,title=pipeline check::x: 5 %25%0D%0Aof it: a,b"),
        (("b,c:%.yaml", "x"), "file=b%2Cc%3A%25.yaml,title=pipeline check::x: is 3"),
        (("sub/../a.yaml", "x"), "file=a.yaml,title=pipeline check::x: is 3"),
        (("override 'x=3'", "x"), "title=pipeline check::override 'x=3': x: is 3"),
        (("nope.yaml", "", "cannot be read"), "title=pipeline check::nope.yaml: cannot be read"),
    ],
)
def test_github_marks_a_fault_where_it_is(given: tuple[str, str], written: str) -> None:
    Path("sub").mkdir()
    for name in ("a.yaml", "b,c:%.yaml"):
        Path(name).touch()
    assert annotation(fault(*given)) == f"::error {written}"


def test_github_names_a_file_within_the_folder_relatively_and_another_as_it_is(linear: Path) -> None:
    Path("a.yaml").touch()
    assert "file=a.yaml," in annotation(fault(str(Path("a.yaml").absolute())))
    assert f"file={linear}," in annotation(fault(str(linear)))


def test_github_gets_one_annotation_for_each_fault_on_stdout(pipeline: Call, linear: Path) -> None:
    linear.write_text(linear.read_text().replace("epochs: 2", "epochs: two"))
    done = pipeline("check", linear, "--format", "github", "outptu_dir=x")
    first = f"::error file={linear},line=7,col=61,title=pipeline check::runner.train_runner.epochs: is 'two', a string;"
    assert (done.exit_code, done.stderr, len(done.stdout.splitlines())) == (2, "", 2)
    assert done.stdout.startswith(first)
    assert "\n::error title=pipeline check::override 'outptu_dir=x': outptu_dir: unknown key" in done.stdout


@pytest.mark.parametrize(("form", "stdout"), [("github", ""), ("json", "[]\n")])
def test_no_faults_say_nothing_to_a_program(pipeline: Call, linear: Path, form: str, stdout: str) -> None:
    done = pipeline("check", linear, "--format", form)
    assert (done.exit_code, done.stdout, done.stderr) == (0, stdout, "")


@pytest.mark.parametrize(("options", "stdout"), [([], "{}: no faults\n"), (["--json"], "[]\n")])
def test_two_phases_with_the_model_of_one_file_are_noted_and_no_fault(
    pipeline: Call, linear: Path, options: list[str], stdout: str
) -> None:
    (linear.parent / "net.py").write_text("import torch\nclass Model(torch.nn.Linear): pass\n", encoding="utf-8")
    text = linear.read_text(encoding="utf-8").replace("torch.nn.Linear", "net.py")
    linear.write_text(
        text + text[text.index("  - name: line") :].replace("name: line", "name: other"), encoding="utf-8"
    )
    done = pipeline("check", linear, *options)
    assert (done.exit_code, done.stdout) == (0, stdout.format(linear))
    what = (
        "'net.py' is the model of phase 'line' too, and each gets one of its own; to share one, write `model_of: line`"
    )
    assert done.stderr == f"note: {linear}:16: phase.other.model: {what}\n"


def test_what_a_swap_changes_is_said_to_people(pipeline: Call, linear: Path) -> None:
    (linear.parent / "own.py").write_text(RUNNER)
    own = "runner.train_runner.runner_class_path={workspace}/own.py"
    assert pipeline("check", linear, own).stdout.startswith("train_runner: runner is own.py:Runner, in the place of ")
    assert pipeline("check", linear, own, "--json").stdout == "[]\n"


# --build


def test_build_tells_of_each_phase_in_a_line(pipeline: Call, linear: Path) -> None:
    text = linear.read_text()
    phase = text.partition("phase:\n")[2]
    linear.write_text(text + phase.replace("name: line", "name: longer").replace("features: 1", "features: 1"))
    done = pipeline("check", linear, "--build")
    lines = ["line:   Linear, 2 parameters (8 B)", "longer: Linear, 2 parameters (8 B)"]
    lines.append(f"{linear}: no faults; what becomes of a batch --steps 1 tells")
    assert (done.exit_code, done.stdout.splitlines(), done.stderr) == (0, lines, "")


@pytest.mark.parametrize("form", ["json", "github"])
def test_build_tells_a_program_of_faults_only(pipeline: Call, linear: Path, form: str) -> None:
    done = pipeline("check", linear, "--build", "--format", form)
    assert done.stdout == ("[]\n" if form == "json" else "")
    assert done.stderr.startswith("line: Linear, 2 parameters")


def test_build_does_not_begin_where_the_source_has_faults(pipeline: Call, linear: Path) -> None:
    (linear.parent / "data.py").write_text("class Line:\n    def __init__(self, size): pass\nprint('imported')\n")
    done = pipeline("check", linear, "--build", "runner.train_runner.epochs=two")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "imported" not in done.stderr


def broken(config: Path) -> None:
    (config.parent / "data.py").write_text("class Line:\n    def __init__(self, size): pass\nprint('hi')\n1 / 0\n")


def test_build_shows_what_user_code_raised_and_names_the_fault(pipeline: Call, linear: Path) -> None:
    broken(linear)
    done = pipeline("check", linear, "--build")
    said = f'Traceback (most recent call last):\n  File "{linear.parent}/data.py", line 4, in <module>\n    1 / 0\n'
    assert (done.exit_code, done.stdout.splitlines()[:1]) == (
        2,
        ["line: Linear, 2 parameters (8 B)"],
    )
    assert done.stderr.partition("hi\n")[2].startswith(said)
    assert f"{linear}:5:36: dataset.train_data.class_path: " in done.stderr
    assert "ZeroDivisionError: division by zero; mend the file\n" in done.stderr
    assert done.stderr.endswith("^\n1 fault; nothing was run\n")


def test_build_gives_its_faults_as_data_and_what_user_code_prints_elsewhere(pipeline: Call, linear: Path) -> None:
    broken(linear)
    (only,) = json.loads(pipeline("check", linear, "--build", "--json").stdout)
    assert (only["address"], only["line"]) == ("dataset.train_data.class_path", 5)


@pytest.mark.parametrize("example", EXAMPLES)
def test_build_finds_no_fault_in_an_example_whether_its_data_is_there_or_not(
    pipeline: Call, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = pipeline("check", "--build", FOLDER / example / "config.yaml")
    assert (done.exit_code, [line for line in done.stderr.splitlines() if not line.startswith("note: ")]) == (0, [])
    assert not (tmp_path / "cache").exists()
    assert ("parameters" in done.stdout) is (example != "five_stages")


# --steps


def counted(config: Path) -> tuple[str, Path]:
    """An override for a plugin that writes a letter for each training batch and each pass without training."""
    (config.parent / "counting.py").write_text(COUNTING)
    path = config.parent / "counted.txt"
    return f"plugins=[{{{config.parent}/counting.py: {{path: {path}}}}}]", path


def test_steps_runs_that_many_of_each_phase_and_leaves_nothing(
    pipeline: Call, linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cwd"))
    text = linear.read_text()
    phase = text.partition("phase:\n")[2].replace("name: line", "name: other")
    infer = "  - {name: infer_runner, class: infer, device: cpu}\nphase:"
    linear.write_text(text.replace("phase:", infer, 1) + phase)
    plugin, path = counted(linear)
    before = sorted(tmp_path.rglob("*"))
    done = pipeline("check", "--steps", 3, linear, plugin)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, f"{linear}: no faults; 3 steps went through")
    assert (done.stderr, path.read_text()) == ("", "tttVtttVvv")
    assert sorted(tmp_path.rglob("*")) == sorted([*before, path])


def test_steps_cuts_a_pass_without_training_short(pipeline: Call, linear: Path) -> None:
    with open(linear.parent / "data.py", "a", encoding="utf-8") as file:
        file.write("\nclass Long(Line):\n    def __len__(self): return 10 ** 12\n"
                   "    def __getitem__(self, index): return super().__getitem__(index % 24)\n")  # fmt: skip
    assert (
        pipeline("check", "--steps", "2", linear, "dataset.train_data.class_path={workspace}/data.py:Long").exit_code
        == 0
    )


def test_steps_goes_on_through_the_epochs_of_little_data(pipeline: Call, linear: Path) -> None:
    plugin, path = counted(linear)
    assert pipeline("check", "--steps", 8, linear, plugin).exit_code == 0
    assert path.read_text() == "ttttttVttV"


FAILING = "from pipeline import stages\nclass Startup(stages.Startup):\n    def startup(self, context): raise KeyError('mine')\n"


def test_steps_that_do_not_go_through_are_a_fault_with_the_users_traceback(pipeline: Call, linear: Path) -> None:
    (linear.parent / "own.py").write_text(FAILING)
    done = pipeline("check", "--steps", 1, linear, "runner.train_runner.startup_class_path={workspace}/own.py")
    place = "override 'runner.train_runner.startup_class_path={workspace}/own.py'"
    assert done.exit_code == 2
    assert 'own.py", line 3, in startup' in done.stderr
    assert (
        f"{linear}:7:5: runner.train_runner: startup (own.Startup, {place}) failed in startup (own.py:3): KeyError: 'mine'\n"
        in done.stderr
    )
    assert done.stderr.endswith("1 fault; 1 step did not go through; nothing is kept of them\n")
    assert list(Path.cwd().iterdir()) == []


def test_steps_that_diverge_are_a_fault_too(pipeline: Call, linear: Path) -> None:
    overrides = ["hyper_parameters.optimizer.learning_rate=1e38", "runner.train_runner.nonfinite_patience=0"]
    done = pipeline("check", "--steps", 9, "--json", linear, *overrides)
    (only,) = json.loads(done.stdout)
    assert (done.exit_code, only["address"]) == (2, "runner.train_runner")
    assert "phase.line: 'loss' is " in only["message"]


def test_steps_on_a_device_that_is_not_there_are_a_fault_at_its_line(pipeline: Call, linear: Path) -> None:
    linear.write_text(linear.read_text().replace("device: cpu", "device: cuda:99"))
    done = pipeline("check", "--steps", 1, "--json", linear)
    (only,) = json.loads(done.stdout)
    assert (done.exit_code, only["address"], only["line"]) == (2, "runner.train_runner.device", 7)
    assert re.fullmatch(r"is 'cuda:99', and this machine has \d GPUs?; write cpu or auto", only["message"])


def test_of_a_runner_stage_that_heeds_no_limit_that_is_said_before_it_is_run(pipeline: Call, linear: Path) -> None:
    (linear.parent / "own.py").write_text(RUNNER)
    override = "runner.train_runner.runner_class_path={workspace}/own.py"
    done = pipeline("check", "--steps", 2, linear, override)
    lines = done.stderr.splitlines()
    address = f"override '{override}': runner.train_runner.runner_class_path"
    assert (done.exit_code, "for people" in lines) == (0, True)
    assert lines[0].startswith(f"note: {address}: Runner (own.py:3) heeds no limit, saves nothing, calls no hook")
    assert "max_steps" not in done.stderr


COUNTED = """
import gc
from pipeline.cli import main

rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase))
try:
    main()
finally:
    print(len(rounds))
"""


def test_a_plain_check_costs_no_round_of_the_garbage_collector(linear: Path) -> None:
    done = subprocess.run([sys.executable, "-c", COUNTED, "check", linear], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize("example", OTHERS)
def test_build_accepts_the_other_examples_and_jobs_too(pipeline: Call, example: Path) -> None:
    done = pipeline("check", "--build", example / "config.yaml")
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.parametrize("example", [*EXAMPLES, *OTHERS])
def test_two_steps_of_an_example_go_through(pipeline: Call, example: str | Path) -> None:
    done = pipeline("check", "--steps", "2", FOLDER / example / "config.yaml")
    assert (done.exit_code, done.stdout.endswith("config.yaml: no faults; 2 steps went through\n")) == (0, True)
    assert "ERROR" not in done.stderr
    assert list(Path.cwd().iterdir()) == []
