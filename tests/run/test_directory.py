"""The folder that a run leaves: what is in it, that it is nobody else's, and that it holds no secret."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from pipeline import GeneralTrainer
from pipeline.brain.checkpointer import Checkpointer
from pipeline.config.schema import ABOUT
from pipeline.errors import ExitCode, LockedError, StorageError
from pipeline.run.directory import RunDirectory, is_at, lock_held
from tests.conftest import RUN_FILES

Workspace = Callable[..., Path]
UNLABELLED = {"label": None, "tags": [], "note": None}
COMMITTER = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]


def read(name: str, run: str = "runs/workspace/latest") -> Any:
    """A file of the run directory: JSON parsed, anything else as text."""
    text = (Path(run) / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else text


def git(folder: Path, *arguments: str) -> str:
    command = ["git", *COMMITTER, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(linear: Path) -> Path:
    """The config in a workspace that is a git repository with everything committed."""
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        git(linear.parent, *command)
    return linear


def test_a_run_leaves_these_files_and_latest_points_at_them(linear: Path) -> None:
    context = GeneralTrainer(linear).run()
    run = Path("runs/workspace/latest")
    assert {each.name for each in run.iterdir()} == RUN_FILES | {"workspace", "train_runner"}
    assert run.is_symlink()
    assert run.resolve() == context["run_dir"]
    assert not os.readlink(run).startswith("/")
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", context["run_dir"].name)


def test_config_yaml_is_resolved_and_trains_the_same_again(linear: Path) -> None:
    first = GeneralTrainer(linear, ["runner.train_runner.epochs=1"]).run()
    again = GeneralTrainer(first["run_dir"] / "config.yaml").run()
    assert yaml.safe_load(read("config.yaml"))["runner"][0]["max_stage_repeats"] == 100
    assert again["train_state"] == first["train_state"]
    assert torch.equal(again["model"]["line"]["model"].weight, first["model"]["line"]["model"].weight)


def test_a_class_given_from_python_stands_in_config_yaml_as_its_path(linear: Path) -> None:
    config = yaml.safe_load(linear.read_text()) | {"workspace": str(linear.parent)}
    config["phase"][0]["model"] = torch.nn.Linear
    GeneralTrainer(config).run()
    assert (
        yaml.safe_load(read("config.yaml", "runs/config/latest"))["phase"][0]["model"]
        == "torch.nn.modules.linear:Linear"
    )


def test_status_json_of_a_finished_run(linear: Path) -> None:
    GeneralTrainer(linear).run()
    expected = {"state": "done", "exit_code": 0, "reason": "", "resumable": False}
    assert read("status.json") == expected | {"iteration": 12, "epoch": 2, "error": None} | UNLABELLED


def test_status_json_says_running_while_a_stage_runs(linear: Path) -> None:
    (linear.parent / "own.py").write_text(
        "import json\nfrom pipeline import stages\nclass Terminal(stages.Terminal):\n    def terminal(self, context):\n"
        "        context['found'] = json.loads((context['run_dir'] / 'status.json').read_text())\n"
    )
    found = GeneralTrainer(linear, ["runner.train_runner.terminal_class_path={workspace}/own.py"]).run()["found"]
    expected = {"state": "running", "exit_code": None, "reason": "", "resumable": True}
    assert found == expected | {"iteration": 12, "epoch": 2, "error": None} | UNLABELLED


def test_status_json_of_a_run_that_failed_late_keeps_its_counters(linear: Path) -> None:
    (linear.parent / "own.py").write_text(
        "from pipeline import TerminalBase\nclass Terminal(TerminalBase):\n"
        "    def terminal(self, context):\n        raise OSError('full')\n"
    )
    with pytest.raises(OSError, match="full"):
        GeneralTrainer(linear, ["runner.train_runner.terminal_class_path={workspace}/own.py"]).run()
    left = read("status.json")
    assert (left["state"], left["exit_code"], left["iteration"], left["epoch"]) == ("failed", 1, 12, 2)
    assert left["error"] == "OSError: full"


def test_command_txt_says_what_a_resume_needs(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline", "run", str(linear), "+hyper_parameters.name='a b'"])
    GeneralTrainer(linear).run()
    lines = dict(line.split(": ", 1) for line in read("command.txt").splitlines())
    assert lines["command"].startswith(f"pipeline run {linear} ")
    assert "'\"'\"'" in lines["command"]
    assert (lines["folder"], lines["config"], lines["workspace"]) == (os.getcwd(), str(linear), str(linear.parent))


OWN = """
from pipeline import hookimpl, stages
from .parts.tree import tree

class Startup(stages.Startup):
    def startup(self, context):
        context["tree"] = tree()

class Plugin:
    @hookimpl
    def before_epoch(self):
        pass

class Trainer(stages.Startup): ...
"""


def test_the_workspace_files_are_kept_with_what_they_import_relatively(linear: Path) -> None:
    folder = linear.parent
    for name, text in {
        "own.py": OWN,
        "parts/tree.py": "from ..leaves import leaf\ndef tree(): return leaf\n",
        "leaves.py": "leaf = 1\n",
        "unused.py": "nothing = 1\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    own = "runner.train_runner.startup_class_path={workspace}/own.py"
    run = GeneralTrainer(linear, [own, 'plugins=["{workspace}/own.py"]']).run()["run_dir"]
    kept = {str(each.relative_to(run / "workspace")) for each in (run / "workspace").rglob("*") if each.is_file()}
    assert kept == {"own.py", "data.py", "parts/tree.py", "leaves.py"}
    assert all((run / "workspace" / name).read_bytes() == (folder / name).read_bytes() for name in kept)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("key", "code"),
    [
        (
            "runner.train_runner.trainer_class",
            "from pipeline import GeneralTrainer\nclass Trainer(GeneralTrainer): ...",
        ),
        ("phase.line.loss", "import torch\nLoss = torch.nn.MSELoss"),
        ("phase.line.loss", "import torch\nclass Loss(torch.nn.MSELoss): ..."),
        (
            "dataset.train_data.collate_fn",
            "from torch.utils.data import default_collate\ndef collate(b): return default_collate(b)",
        ),
        ("plugins", "from pipeline import hookimpl\nclass Plugin:\n    @hookimpl\n    def after_epoch(self): ..."),
        (
            "phase.line.metrics",
            "class Metric:\n    reset = compute = lambda self: 1.0\n    def update(self, p, t): ...",
        ),
    ],
)
def test_every_kind_of_user_file_is_kept(linear: Path, key: str, code: str) -> None:
    (linear.parent / "mine.py").write_text(code + "\n")
    value = {"plugins": '["{workspace}/mine.py"]', "phase.line.metrics": "{mine: {class: '{workspace}/mine.py'}}"}.get(
        key, "{workspace}/mine.py"
    )
    run = GeneralTrainer(linear, [f"{key}={value}"]).run()["run_dir"]
    assert (run / "workspace" / "mine.py").read_text() == code + "\n"


def test_a_file_outside_the_workspace_is_kept_apart(linear: Path, workspace: Workspace) -> None:
    elsewhere = (
        workspace({"own.py": "from pipeline import stages\nclass Startup(stages.Startup): ...\n"}, "other") / "own.py"
    )
    run = GeneralTrainer(linear, [f"runner.train_runner.startup_class_path={elsewhere}"]).run()["run_dir"]
    assert (run / "workspace" / "_elsewhere" / elsewhere.relative_to("/")).read_bytes() == elsewhere.read_bytes()


def test_environment_json_lists_every_distribution_that_is_imported(linear: Path) -> None:
    GeneralTrainer(linear).run()
    tops = {name for name in sys.modules if "." not in name}
    expected = {name for top, names in packages_distributions().items() if top in tops for name in names}
    assert read("environment.json")["packages"] == {name: version(name) for name in expected}


def test_a_package_that_the_data_import_is_listed_too(
    linear: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {"METADATA": "Name: Far-Off\nVersion: 1.5\n", "RECORD": "far_off.py,,\n"}
    site = workspace(
        {"far_off.py": "", **{f"far_off-1.5.dist-info/{name}": text for name, text in metadata.items()}}, "site"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "far_off", raising=False)
    data = linear.parent / "data.py"
    data.write_text(data.read_text().replace("self.x = ", "import far_off\n        self.x = "))
    GeneralTrainer(linear).run()
    assert read("environment.json")["packages"]["Far-Off"] == "1.5"


def test_environment_json_has_versions_hardware_and_only_the_listed_variables(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    GeneralTrainer(linear).run()
    found = read("environment.json")
    assert (found["packages"]["torch"], found["python"]) == (version("torch"), sys.version)
    assert found["variables"]["OMP_NUM_THREADS"] == "1"
    assert found["hardware"]["cpus"] == os.cpu_count()
    assert "AWS_SECRET_ACCESS_KEY" not in found["variables"]


def test_no_file_of_the_run_holds_a_secret_of_the_environment(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-token")
    (linear.parent / "report.py").write_text("token = None", encoding="utf-8")  # A program beside the config.
    context = GeneralTrainer(linear, ["+hyper_parameters.token=${env:MY_TOKEN}"]).run()
    files = [each for each in context["run_dir"].rglob("*") if each.is_file()]
    assert context["hyper_parameters"]["token"] == "s3cr3t-token"
    assert "${env:MY_TOKEN}" in read("config.yaml")
    assert [each for each in files if b"s3cr3t" in each.read_bytes()] == []


def test_environment_json_names_the_commit_of_a_clean_repository(repository: Path) -> None:
    GeneralTrainer(repository).run()
    assert read("environment.json")["git"] == {"commit": git(repository.parent, "rev-parse", "HEAD"), "dirty": False}


def test_the_runs_own_output_does_not_make_a_repository_dirty(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.parent)
    for _ in range(2):
        GeneralTrainer("config.yaml").run()
        assert read("environment.json")["git"]["dirty"] is False


@pytest.mark.parametrize("change", ["data.py", "new.py"])
def test_environment_json_says_that_a_repository_is_dirty(repository: Path, change: str) -> None:
    with open(repository.parent / change, "a", encoding="utf-8") as file:
        file.write("# changed\n")
    GeneralTrainer(repository).run()
    assert read("environment.json")["git"]["dirty"] is True


def test_a_change_elsewhere_in_the_workspaces_repository_counts(linear: Path, tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text("x = 1\n")
    for command in (["init", "-q"], ["add", "lib.py", "workspace"], ["commit", "-q", "-m", "all"]):
        git(tmp_path, *command)
    (tmp_path / "lib.py").write_text("x = 2\n")
    GeneralTrainer(linear).run()
    assert read("environment.json")["git"]["dirty"] is True


def test_outside_a_repository_git_is_null(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(linear.parents[1]))
    GeneralTrainer(linear).run()
    assert read("environment.json")["git"] is None


def test_runs_of_the_same_second_get_directories_of_their_own() -> None:
    with ThreadPoolExecutor(16) as pool:
        paths = list(pool.map(lambda _: RunDirectory.new(Path("runs"), "race").path, range(64)))
    assert len(set(paths)) == 64
    assert Path("runs/race/latest").resolve() in paths
    assert {each.name for each in Path("runs/race").iterdir()} == {path.name for path in paths} | {"latest"}


RACER = """
import sys
from pathlib import Path
from pipeline.run.directory import RunDirectory
sys.stdin.readline()
for _ in range(20):
    print(RunDirectory.new(Path("runs"), "race").path)
"""


def test_two_processes_that_start_at_once_get_directories_of_their_own() -> None:
    command = [sys.executable, "-c", RACER]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    paths = [path for racer in racers for path in racer.communicate()[0].split()]
    assert len(set(paths)) == 40


def test_latest_points_at_the_newest() -> None:
    for _ in range(3):
        newest = RunDirectory.new(Path("runs"), "same").path
        assert Path("runs/same/latest").resolve() == newest


def test_the_run_directory_is_named_after_the_config(workspace: Workspace, linear: Path) -> None:
    other = linear.with_name("small.yaml")
    other.write_text(linear.read_text())
    assert GeneralTrainer(other).config.name == "small"
    assert GeneralTrainer(other, ["output_dir=elsewhere"]).run()["run_dir"].parent == Path("elsewhere/small").resolve()


def test_a_run_directory_that_cannot_be_made_is_a_storage_error() -> None:
    Path("runs").write_text("in the way")
    with pytest.raises(
        StorageError, match=r"runs.*cannot be written: Not a directory; free or repair the storage"
    ) as caught:
        RunDirectory.new(Path("runs"), "config")
    assert caught.value.exit_code == ExitCode.STORAGE == 74


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write("host there, pid 1, since noon")
lock.flush()
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Another process holds the lock until the block ends."""
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        yield
        holder.communicate("\n")


def test_a_run_directory_that_another_process_holds_is_refused_with_its_holder_named() -> None:
    directory = RunDirectory.new(Path("runs"), "config")
    message = rf"{directory.path}: is in use by host there, pid 1, since noon; wait for it, or stop it"
    with held(directory.path / "lock"), pytest.raises(LockedError, match=message) as caught, directory.locked():
        pass
    assert caught.value.exit_code == ExitCode.LOCKED == 73
    assert (directory.path / "lock").read_text() == "host there, pid 1, since noon"


def test_the_lock_of_a_process_that_ended_is_free_and_names_its_new_holder() -> None:
    directory = RunDirectory.new(Path("runs"), "config")
    with held(directory.path / "lock"):
        pass
    with directory.locked():
        assert f"pid {os.getpid()}, since 20" in (directory.path / "lock").read_text()


def test_the_lock_is_held_while_stages_run_and_free_afterwards(linear: Path) -> None:
    (linear.parent / "own.py").write_text(
        "import fcntl\nfrom pipeline import stages\nclass Startup(stages.Startup):\n    def startup(self, context):\n"
        "        with open(context['run_dir'] / 'lock') as lock:\n            try:\n"
        "                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "            except OSError:\n                context['was_locked'] = True\n"
    )
    context = GeneralTrainer(linear, ["runner.train_runner.startup_class_path={workspace}/own.py"]).run()
    assert context["was_locked"]
    with held(context["run_dir"] / "lock"):
        pass


def linger(started: Any) -> None:
    """What a worker does that hangs."""
    started.set()
    time.sleep(60)


def test_a_forked_process_that_outlives_its_parent_does_not_hold_the_lock() -> None:
    directory, forks = RunDirectory.new(Path("runs"), "config"), multiprocessing.get_context("fork")
    started = forks.Event()
    worker = forks.Process(target=linger, args=(started,))
    with directory.locked():
        worker.start()
        started.wait()
    try:
        with directory.locked():
            assert worker.is_alive()
    finally:
        worker.terminate()
        worker.join()


LOCK_HOLDER = """
import sys
from pathlib import Path
from pipeline.run.directory import lock_held
with lock_held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holder(lock: Path) -> subprocess.Popen[str]:
    """Another process that holds a lock."""
    command = [sys.executable, "-c", LOCK_HOLDER, str(lock)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("stopped", [False, True])
def test_a_holder_is_named_also_when_it_is_stopped(stopped: bool) -> None:
    with holder(Path("lock")) as process:
        if stopped:
            process.send_signal(signal.SIGSTOP)
        named = rf"{Path.cwd()}: is in use by host \S+, pid {process.pid}, since 20\S+; wait for it, or stop it"
        with pytest.raises(LockedError, match=named) as caught, lock_held(Path("lock").absolute()):
            pass
        process.kill()
    assert caught.value.exit_code == ExitCode.LOCKED == 73


def test_the_lock_of_a_killed_process_is_free() -> None:
    with holder(Path("lock")) as process:
        process.kill()
    with lock_held(Path("lock")):
        assert f"pid {os.getpid()}, since 20" in Path("lock").read_text()


def test_a_lock_whose_holder_has_not_written_yet_is_in_use_all_the_same() -> None:
    with open("lock", "w", encoding="utf-8") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="is in use by another process; wait for it"), lock_held(Path("lock")):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_no_holder(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = (
        rf"lock: cannot be locked: {os.strerror(number)} \({errno.errorcode[number]}\); set output_dir to a file system"
    )
    with pytest.raises(StorageError, match=message), lock_held(Path("lock")):
        pass


def test_a_lock_that_cannot_be_made_is_a_storage_error() -> None:
    with (
        pytest.raises(StorageError, match=r"gone/lock: cannot be written: No such file or directory"),
        lock_held(Path("gone/lock")),
    ):
        pass


def test_nothing_is_written_through_a_link() -> None:
    Path("precious").write_text("all I have")
    Path("lock").symlink_to("precious")
    with pytest.raises(StorageError, match="lock: cannot be written"), lock_held(Path("lock")):
        pass
    assert Path("precious").read_text() == "all I have"


def test_a_lock_knows_when_its_file_is_gone_or_another() -> None:
    with lock_held(Path("lock")) as lock:
        assert is_at(lock, Path("lock"))
        Path("lock").unlink()
        assert not is_at(lock, Path("lock"))
        Path("lock").touch()
        assert not is_at(lock, Path("lock"))


@pytest.fixture
def directory() -> RunDirectory:
    """One of a run with a single runner."""
    directory = RunDirectory.new(Path("runs"), "config")
    directory.add(["t"])
    return directory


def test_a_runner_is_done_once_that_is_noted(directory: RunDirectory) -> None:
    assert not directory.is_done("t")
    directory.mark_done("t", {"iteration": 3})
    assert directory.is_done("t")
    assert [path.name for path in (directory.path / "t").iterdir()] == ["done.json"]


@pytest.mark.parametrize("content", ["", '{"iteration"', "\x00\x00"])
def test_a_damaged_note_is_none_and_told(content: str, directory: RunDirectory, log_lines: list[str]) -> None:
    (directory.path / "t/done.json").write_text(content)
    assert not directory.is_done("t")
    assert "done.json: is damaged" in log_lines[0]
    assert "t goes through its stages again" in log_lines[0]


def test_a_note_that_cannot_be_written_is_a_storage_error(directory: RunDirectory) -> None:
    (directory.path / "other").touch()
    with pytest.raises(StorageError, match=r"other/done.json: cannot be written: Not a directory; free"):
        directory.mark_done("other", {})


def test_a_run_is_resumable_with_a_checkpoint_or_a_runner_that_is_done(directory: RunDirectory) -> None:
    assert not directory.is_resumable()
    saved = Checkpointer(directory.path / "t/checkpoints").save({"p": {"model": nn.Linear(1, 1)}}, {"iteration": 2}, {})
    assert directory.is_resumable()
    (saved / "p.safetensors").write_bytes(b"cut")
    assert not directory.is_resumable()
    directory.mark_done("t", {})
    assert directory.is_resumable()


def test_label_tags_and_note_are_in_the_status(linear: Path) -> None:
    label = "lr=0.1: 'é' 🙂"
    GeneralTrainer(linear, ["tags=[a, b]"], label=label, note="2 of 3").run()
    assert {name: read("status.json")[name] for name in ABOUT} == {"label": label, "tags": ["a", "b"], "note": "2 of 3"}


def test_a_failed_run_keeps_its_label(linear: Path) -> None:
    with pytest.raises(RuntimeError):
        GeneralTrainer(linear, ["phase.line.model_args={in_features: 2, out_features: 1}"], label="wide").run()
    assert (read("status.json")["state"], read("status.json")["label"]) == ("failed", "wide")
