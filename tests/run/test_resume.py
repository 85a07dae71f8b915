"""Going on in the directory of an earlier run: what is told, what is kept, and from which checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from pipeline import Context, GeneralTrainer
from pipeline.brain.checkpointer import Checkpointer
from pipeline.check.checker import check_or_raise
from pipeline.cli import group
from pipeline.config.yaml_tree import differences
from pipeline.errors import ConfigError, ExitCode, NoCheckpointError
from pipeline.run.directory import RunDirectory
from pipeline.run.provenance import Provenance
from pipeline.run.resume import MAX_LINES, compare, find_previous, split_path

SAVING = ["runner.train_runner.save_interval=2"]
TWO = [
    "runner=[{name: first, class: train, device: cpu, epochs: 2, save_interval: 2, keep_last: null},"
    " {name: second, class: train, device: cpu, epochs: 1, save_interval: 2}, {name: third, class: infer, device: cpu}]"
]


def latest() -> Path:
    """The run directory."""
    return Path("runs/workspace/latest").resolve()


def stop_at(linear: Path, iteration: int, more: list[str]) -> Path:
    """The directory of a run that failed before its batch of this number."""
    (linear.parent / "stop.py").write_text(
        "from pipeline import hookimpl\nclass Plugin:\n    @hookimpl\n    def before_batch(self, context):\n"
        f"        if context['train_state']['iteration'] == {iteration}:\n            raise ValueError('stopped')\n"
    )
    with pytest.raises(ValueError, match="stopped"):
        GeneralTrainer(linear, [*more, 'plugins=["{workspace}/stop.py"]']).run()
    return latest()


def checkpoints(run_dir: Path, runner: str = "train_runner") -> list[int]:
    """The iterations of those that there are."""
    return [int(path.name.removeprefix("step-")) for path in Checkpointer(run_dir / runner / "checkpoints").all()]


def lines(run_dir: Path, runner: str = "train_runner") -> str:
    return (run_dir / runner / "metrics.jsonl").read_text(encoding="utf-8")


def weights(context: Context) -> Any:
    return context["model"]["line"]["model"].state_dict()


def before(run_dir: Path) -> Path:
    """The one folder with what a resumption has replaced."""
    (found,) = run_dir.glob("before-*")
    assert re.fullmatch(r"before-\d{8}-\d{6}-[0-9a-f]{6}", found.name)
    return found


def test_nothing_changed_is_told_in_one_line_and_nothing_is_replaced(linear: Path, log_lines: list[str]) -> None:
    run_dir = stop_at(linear, 8, SAVING)
    kept = {name: (run_dir / name).read_bytes() for name in ("config.yaml", "command.txt", "environment.json")}
    with pytest.raises(ValueError, match="stopped"):
        GeneralTrainer(linear, [*SAVING, 'plugins=["{workspace}/stop.py"]'], resume="auto").run()
    assert sum("config, plugins, code and versions are as they were" in line for line in log_lines) == 1
    assert {name: (run_dir / name).read_bytes() for name in kept} == kept
    assert list(run_dir.glob("before-*")) == []


def test_another_label_is_no_change_and_what_is_not_said_stays(linear: Path, log_lines: list[str]) -> None:
    run_dir = stop_at(linear, 8, [*SAVING, "label=first", "tags=[a]"])
    with pytest.raises(ValueError, match="stopped"):
        GeneralTrainer(linear, [*SAVING, 'plugins=["{workspace}/stop.py"]'], resume=run_dir, label="second").run()
    assert any("config, plugins, code and versions are as they were" in line for line in log_lines)
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["label"], status["tags"], status["note"]) == ("second", ["a"], None)


def test_what_changed_is_warned_of_and_what_was_is_kept(linear: Path, log_lines: list[str]) -> None:
    run_dir = stop_at(linear, 8, SAVING)
    was = {
        name: (run_dir / name).read_text()
        for name in ("config.yaml", "command.txt", "workspace/data.py", "workspace/stop.py")
    }
    data = linear.parent / "data.py"
    data.write_text(data.read_text().replace("- 1", "- 2"))
    GeneralTrainer(linear, [*SAVING, "runner.train_runner.epochs=3"], resume="auto").run()
    told = "".join(line for line in log_lines if line.startswith("WARNING"))
    for each in (
        "runner.train_runner.epochs: 2 -> 3",
        "plugins.",
        "stop.py: is no part of the run any more",
        "-        return self.x[index], 3 * self.x[index] - 1",
    ):
        assert each in told
    assert {name: (before(run_dir) / name).read_text() for name in was} == was
    assert (run_dir / "workspace/data.py").read_text() == data.read_text()
    assert not (run_dir / "workspace/stop.py").exists()
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["runner"][0]["epochs"] == 3


def test_where_what_is_replaced_is_kept_is_told_once(linear: Path, log_lines: list[str]) -> None:
    run_dir = GeneralTrainer(linear, SAVING).run()["run_dir"]
    checkpoint = min((run_dir / "train_runner" / "checkpoints").glob("step-*"))
    GeneralTrainer(linear, [*SAVING, "runner.train_runner.epochs=3"], resume=checkpoint).run()
    assert [line for line in log_lines if "/before-" in line] == [
        f"INFO what is replaced is kept in {before(run_dir)}\n"
    ]


def test_another_device_and_version_is_told(linear: Path, log_lines: list[str]) -> None:
    run_dir = stop_at(linear, 8, SAVING)
    kept = json.loads((run_dir / "environment.json").read_text())
    kept["hardware"]["devices"]["train_runner"], kept["packages"]["torch"] = "cuda:0", "1.0"
    (run_dir / "environment.json").write_text(json.dumps(kept))
    GeneralTrainer(linear, SAVING, resume="auto").run()
    assert any("hardware.devices.train_runner: cuda:0 -> cpu" in line for line in log_lines)
    assert json.loads((before(run_dir) / "environment.json").read_text()) == kept


def test_a_finished_run_stays_as_it_was_run(linear: Path, log_lines: list[str]) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    files = {
        path: path.read_bytes()
        for path in run_dir.rglob("*")
        if path.is_file() and path.name not in {"lock", "log.txt"}
    }
    assert not GeneralTrainer(linear, ["runner.train_runner.seed=5"], resume="auto").run()
    assert any("runner.train_runner.seed: 0 -> 5" in line for line in log_lines)
    assert {path: path.read_bytes() for path in files} == files
    assert list(run_dir.glob("before-*")) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("missing", ["config.yaml", "environment.json", "command.txt", "swaps.txt", "workspace"])
def test_a_run_directory_that_lacks_something_goes_on(missing: str, linear: Path) -> None:
    run_dir = stop_at(linear, 8, SAVING)
    shutil.rmtree(run_dir / missing) if missing == "workspace" else (run_dir / missing).unlink()
    assert GeneralTrainer(linear, SAVING, resume=run_dir).run()["train_state"]["iteration"] == 12
    assert (run_dir / missing).exists()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("through", ["latest", "name"])
def test_a_run_goes_on_from_the_checkpoint_that_is_named(through: str, linear: Path) -> None:
    whole = GeneralTrainer(linear, [*SAVING, "output_dir=whole"]).run()
    run_dir = stop_at(linear, 9, SAVING)
    newer = checkpoints(run_dir)[-2:]
    chosen = (
        Path("runs/workspace/latest") if through == "latest" else run_dir
    ) / "train_runner/checkpoints/step-000000000004"
    context = GeneralTrainer(linear, SAVING, resume=chosen).run()
    assert all(torch.equal(weights(context)[name], each) for name, each in weights(whole).items())
    assert lines(run_dir) == lines(whole["run_dir"])
    assert checkpoints(run_dir) == checkpoints(whole["run_dir"])
    aside = {path.name[:24] for path in (run_dir / "train_runner/checkpoints").glob(".later-*")}
    assert {f".later-step-{step:012d}" for step in newer} <= aside


def test_the_newest_checkpoint_may_be_named_and_nothing_is_taken_away(linear: Path) -> None:
    run_dir = stop_at(linear, 9, SAVING)
    newest = Checkpointer(run_dir / "train_runner/checkpoints").newest()
    assert newest is not None
    GeneralTrainer(
        linear, [*SAVING, 'plugins=["{workspace}/stop.py"]', "runner.train_runner.max_steps=9"], resume=newest
    ).run()
    assert list((run_dir / "train_runner/checkpoints").glob(".later-*")) == []


def test_a_finished_run_that_goes_back_runs_its_later_runners_again(linear: Path) -> None:
    first = GeneralTrainer(linear, TWO)
    run_dir = first.run()["run_dir"]
    results = {name: (run_dir / name / "results.json").read_text() for name in ("first", "second", "third")}
    numbers = {name: lines(run_dir, name) for name in results}
    again = GeneralTrainer(linear, TWO, resume=run_dir / "first/checkpoints/step-000000000008")
    again.run()
    assert list(again.contexts) == ["first", "second", "third"]
    assert {name: lines(run_dir, name) for name in results} == numbers
    assert {name: (before(run_dir) / name / "results.json").read_text() for name in results} == results
    assert {name: lines(before(run_dir), name) for name in results} == numbers
    assert checkpoints(run_dir, "second") == [2, 4, 6]
    assert len(list((run_dir / "second/checkpoints").glob(".later-*"))) == 3


def test_going_back_in_a_later_runner_leaves_those_before_it_alone(linear: Path) -> None:
    run_dir = GeneralTrainer(linear, TWO).run()["run_dir"]
    again = GeneralTrainer(linear, TWO, resume=run_dir / "second/checkpoints/step-000000000004")
    again.run()
    assert list(again.contexts) == ["second", "third"]
    assert checkpoints(run_dir, "first") == [2, 4, 6, 8, 10, 12]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("named", ["auto", "latest", "latest/train_runner/checkpoints/step-000000000012"])
def test_a_finished_run_trains_on_from_its_last_checkpoint_with_more_epochs(linear: Path, named: str) -> None:
    run_dir = GeneralTrainer(linear, SAVING).run()["run_dir"]
    longer = [*SAVING, "runner.train_runner.epochs=3"]
    context = GeneralTrainer(linear, longer, resume=named.replace("latest", str(run_dir))).run()
    whole = GeneralTrainer(linear, [*longer, "output_dir=whole"]).run()
    assert all(torch.equal(weights(context)[name], each) for name, each in weights(whole).items())
    assert lines(run_dir) == lines(whole["run_dir"])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("limits", [["max_steps=100"], ["epochs=1"], ["keep_last=2"]])
def test_a_finished_run_that_is_not_to_train_for_longer_stays_as_it_is(linear: Path, limits: list[str]) -> None:
    run_dir = GeneralTrainer(linear, SAVING).run()["run_dir"]
    trainer = GeneralTrainer(linear, [*SAVING, *(f"runner.train_runner.{limit}" for limit in limits)], resume=run_dir)
    trainer.run()
    assert not trainer.contexts
    assert checkpoints(run_dir) == [8, 10, 12]


def test_the_runners_after_one_that_trains_for_longer_begin_again(linear: Path) -> None:
    run_dir = GeneralTrainer(linear, TWO).run()["run_dir"]
    again = GeneralTrainer(linear, [*TWO, "runner.first.epochs=3"], resume=run_dir)
    again.run()
    assert list(again.contexts) == ["first", "second", "third"]
    assert checkpoints(run_dir, "first")[-1] == 18


def test_a_damaged_checkpoint_is_named_and_nothing_is_set_aside(linear: Path) -> None:
    run_dir = stop_at(linear, 9, SAVING)
    chosen = run_dir / "train_runner/checkpoints/step-000000000004"
    (chosen / "line.safetensors").write_bytes(b"cut")
    there = checkpoints(run_dir)
    trainer = GeneralTrainer(linear, SAVING, resume=chosen)
    with pytest.raises(NoCheckpointError, match=rf"{chosen}/line.safetensors: has 3 bytes") as caught:
        trainer.run()
    assert caught.value.exit_code is ExitCode.NO_CHECKPOINT
    assert checkpoints(run_dir) == there


def test_checkpoints_none_of_which_is_valid_never_begin_again(linear: Path) -> None:
    run_dir = stop_at(linear, 9, SAVING)
    for each in (run_dir / "train_runner/checkpoints").glob("step-*/state.json"):
        each.write_text("{}")
    trainer = GeneralTrainer(linear, SAVING, resume="auto")
    with pytest.raises(NoCheckpointError, match=r"none of its \d checkpoints is valid; bring one back from a copy"):
        trainer.run()
    assert trainer.outcome is ExitCode.NO_CHECKPOINT
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["resumable"]) == ("failed", 78, False)


@pytest.mark.parametrize(("iteration", "resumable"), [(1, False), (9, True)])
def test_status_json_says_whether_there_is_something_to_go_on_from(
    iteration: int, resumable: bool, linear: Path
) -> None:
    run_dir = stop_at(linear, iteration, SAVING)
    assert json.loads((run_dir / "status.json").read_text())["resumable"] is resumable


def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(linear: Path) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    chosen = run_dir / "train_runner/checkpoints/step-000000000005"
    with pytest.raises(
        ConfigError, match=r"there is no such checkpoint; there are: step-000000000006, step-000000000012"
    ):
        GeneralTrainer(linear, resume=chosen).run()


def test_a_checkpoint_of_a_runner_that_the_config_has_not_is_refused(linear: Path) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    chosen = run_dir / "train_runner/checkpoints/step-000000000006"
    with pytest.raises(ConfigError, match=r"the run has no runner 'train_runner'; known: first, second, third"):
        GeneralTrainer(linear, TWO, resume=chosen).run()


@pytest.mark.parametrize("inside", ["train_runner", "train_runner/checkpoints", "workspace"])
def test_the_path_of_something_in_a_run_directory_is_told_how_to_name_it(inside: str, linear: Path) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    with pytest.raises(ConfigError, match=rf"is no run directory.*check the path, or name {run_dir} or .*/step-…"):
        GeneralTrainer(linear, resume=run_dir / inside).run()


@pytest.mark.parametrize("kind", ["file", "nothing", "checkpoint of no run"])
def test_a_path_that_is_no_run_directory_is_refused(kind: str, linear: Path) -> None:
    path = Path("a/checkpoints/step-000000000001") if kind == "checkpoint of no run" else Path("some")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind != "nothing":
        path.touch()
    with pytest.raises(ConfigError, match=r"is no run directory, which has a config.yaml and a lock; check the path"):
        GeneralTrainer(linear, resume=path).run()


@pytest.mark.parametrize("left", [(), ("lock", "log.txt", ".command.txt.tmp")])
def test_in_a_folder_in_which_no_run_has_begun_a_new_one_begins(
    left: tuple[str, ...], linear: Path, log_lines: list[str]
) -> None:
    straight = GeneralTrainer(linear).run()["run_dir"]
    place = Path("place")
    place.mkdir()
    for name in left:
        (place / name).touch()
    del log_lines[:]
    run_dir = GeneralTrainer(linear, resume=place).run()["run_dir"]
    assert run_dir == place.resolve()
    assert lines(run_dir) == lines(straight)
    assert latest() == straight
    assert f"run directory {run_dir}" in "".join(log_lines)
    assert not [line for line in log_lines if "WARNING" in line]
    # A second time there is one to go on with, and nothing to do.
    assert not GeneralTrainer(linear, resume=place).run()
    assert lines(run_dir) == lines(straight)


def test_a_path_is_split_without_following_the_folder_of_the_checkpoints() -> None:
    elsewhere = Path("elsewhere")
    (elsewhere / "step-000000000001").mkdir(parents=True)
    Path("run/t").mkdir(parents=True)
    Path("run/t/checkpoints").symlink_to(elsewhere.resolve())
    Path("latest").symlink_to("run")
    run_dir = Path("run").resolve()
    assert split_path(Path("latest/t/checkpoints/step-000000000001")) == (
        run_dir,
        run_dir / "t/checkpoints/step-000000000001",
    )
    assert split_path(Path("run")) == (run_dir, None)


def test_auto_takes_the_run_that_latest_names_whatever_the_clock_says() -> None:
    newest = RunDirectory.new(Path("runs"), "config").path
    newest = newest.rename(newest.with_name(f"20010101-000000{newest.name[15:]}"))
    RunDirectory.new(Path("runs"), "config")
    Path("runs/config/latest").unlink()
    Path("runs/config/latest").symlink_to(newest.name)
    found = RunDirectory.newest(Path("runs"), "config")
    assert found is not None
    assert found.path == newest


def test_without_latest_the_names_tell_which_is_the_newest() -> None:
    made = [RunDirectory.new(Path("runs"), "config").path for _ in range(2)]
    older = made[0].rename(made[0].with_name(f"20010101-000000{made[0].name[15:]}"))
    (Path("runs/config") / "20990101-not-a-run").mkdir()
    os.unlink("runs/config/latest")
    found = RunDirectory.newest(Path("runs"), "config")
    assert found is not None
    assert found.path == made[1] != older


def elsewhere(linear: Path) -> Path:
    """The same config in another project, whose folder has the same name."""
    return shutil.copytree(linear.parent, linear.parents[1] / "other" / linear.parent.name) / linear.name


def test_auto_never_takes_the_run_of_another_config_whose_folder_has_the_same_name(
    linear: Path, log_lines: list[str]
) -> None:
    finished = GeneralTrainer(linear).run()["run_dir"]
    context = GeneralTrainer(elsewhere(linear), resume="auto").run()
    assert context["run_dir"] != finished
    assert context["train_state"]["iteration"] == 12
    assert any(
        f"{finished}: is a run of {linear}, so it is none of this config; beginning" in line for line in log_lines
    )


def test_auto_takes_the_newest_run_of_its_own_config_though_others_are_newer(linear: Path) -> None:
    run_dir = stop_at(linear, 8, SAVING)
    newer = GeneralTrainer(elsewhere(linear)).run()["run_dir"]
    context = GeneralTrainer(linear, SAVING, resume="auto").run()
    assert (context["run_dir"], context["train_state"]["iteration"]) == (run_dir, 12)
    assert latest() == newer


def test_a_config_whose_folder_was_moved_begins_a_new_run_and_says_how_to_name_the_old_one(
    linear: Path, log_lines: list[str]
) -> None:
    run_dir = stop_at(linear, 8, SAVING)
    moved = elsewhere(linear)
    shutil.rmtree(linear.parent)
    assert GeneralTrainer(moved, SAVING, resume="auto").run()["run_dir"] != run_dir
    (told,) = [line for line in log_lines if "is a run of" in line]
    assert f"{run_dir}: is a run of {linear}, which is not there any more" in told
    assert f"to go on with it, name it in the place of auto: {run_dir}" in told


def test_auto_takes_a_run_that_was_interrupted_before_it_wrote_its_first_file(linear: Path) -> None:
    directory = RunDirectory.new(Path("runs"), "workspace")
    (directory.path / "lock").touch()
    context = GeneralTrainer(linear, resume="auto").run()
    assert (context["run_dir"], context["train_state"]["iteration"]) == (directory.path, 12)


def test_auto_begins_a_new_run_where_the_one_before_may_not_be_read(linear: Path) -> None:
    config, own = check_or_raise(linear), os.geteuid()
    with TemporaryDirectory() as folder:
        run_dir = Path(folder, config.name, "20260101-000000-abcdef")
        run_dir.mkdir(parents=True)
        for path, mode in ((run_dir, 0), (Path(folder), 0o777), (run_dir.parent, 0o777)):
            path.chmod(mode)
        try:
            os.seteuid(own or 65534)  # root may read everything
            assert find_previous(Path(folder), config, "auto") is None
        finally:
            os.seteuid(own)


@pytest.mark.parametrize("by", ["file", "Python"])
def test_auto_takes_the_newest_run_of_the_name_that_a_config_gives_itself(by: str, linear: Path) -> None:
    named = [*SAVING, "name=workspace"]
    run_dir = stop_at(linear, 8, named)
    other = elsewhere(linear)
    config = other if by == "file" else yaml.safe_load(other.read_text()) | {"workspace": str(other.parent)}
    context = GeneralTrainer(config, named, resume="auto").run()
    assert (context["run_dir"], context["train_state"]["iteration"]) == (run_dir, 12)


def test_a_name_that_only_one_of_two_configs_gives_itself_makes_them_no_one_config(linear: Path) -> None:
    run_dir = GeneralTrainer(linear).run()["run_dir"]
    assert GeneralTrainer(elsewhere(linear), ["name=workspace"], resume="auto").run()["run_dir"] != run_dir


def test_a_config_from_python_without_a_name_begins_a_new_run_and_says_why(linear: Path, log_lines: list[str]) -> None:
    config = yaml.safe_load(linear.read_text()) | {"workspace": str(linear.parent)}
    first, second = (GeneralTrainer(config, resume="auto").run()["run_dir"] for _ in range(2))
    assert first != second
    assert any(
        "a config from Python is known by its `name:` alone, and this one has none" in line for line in log_lines
    )


@pytest.fixture
def first(linear: Path) -> Path:
    """The directory of a run of the config, whose weights another one begins with."""
    directory: Path = GeneralTrainer(linear, ["runner.train_runner.seed=5"]).run()["run_dir"]
    return directory


LATEST = "runner.train_runner.init_model_path=runs/workspace/latest"


def test_latest_of_the_same_config_is_the_run_before(linear: Path, first: Path) -> None:
    named = weights(GeneralTrainer(linear, [f"runner.train_runner.init_model_path={first}"]).run())
    Path("runs/workspace/latest").unlink()
    Path("runs/workspace/latest").symlink_to(first.name)
    context = GeneralTrainer(linear, [LATEST]).run()
    assert all(torch.equal(weights(context)[name], each) for name, each in named.items())
    assert yaml.safe_load((context["run_dir"] / "config.yaml").read_text())["runner"][0]["init_model_path"] == str(
        first
    )


def test_a_resumed_run_begins_again_with_what_latest_was_when_it_began(
    linear: Path, first: Path, log_lines: list[str]
) -> None:
    run_dir = stop_at(linear, 1, [LATEST])
    assert checkpoints(run_dir) == []
    newer = GeneralTrainer(linear, ["runner.train_runner.seed=9"]).run()["run_dir"]
    expected = weights(GeneralTrainer(linear, [f"runner.train_runner.init_model_path={first}", "name=named"]).run())
    context = GeneralTrainer(linear, [LATEST], resume=run_dir).run()
    assert all(torch.equal(weights(context)[name], each) for name, each in expected.items())
    assert any(f"leads to {newer} now; the run goes on with {first}, to which it led" in line for line in log_lines)


def test_first_weights_that_have_gone_refuse_no_resume_that_has_a_checkpoint(
    linear: Path, first: Path, log_lines: list[str]
) -> None:
    begun = [*SAVING, f"runner.train_runner.init_model_path={first}"]
    expected = weights(GeneralTrainer(linear, [*begun, "name=named"]).run())
    run_dir = stop_at(linear, 8, begun)
    shutil.rmtree(first)
    context = GeneralTrainer(linear, begun, resume="auto").run()
    assert context["run_dir"] == run_dir
    assert all(torch.equal(weights(context)[name], each) for name, each in expected.items())
    assert any(
        f"{first}: is not there any more; the run goes on from its own checkpoints" in line for line in log_lines
    )


@pytest.mark.parametrize("resume", ["auto", "never", "directory"])
def test_first_weights_that_have_gone_are_a_fault_where_they_are_needed(resume: str, linear: Path) -> None:
    gone = ["runner.train_runner.init_model_path=gone.safetensors"]
    Path("gone.safetensors").touch()
    run_dir = stop_at(linear, 0, []) if resume == "directory" else None
    Path("gone.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"init_model_path: no such checkpoint: {Path.cwd()}/gone.safetensors"):
        GeneralTrainer(linear, gone, resume=run_dir or resume).run()
    assert run_dir or not Path("runs").exists()


def test_a_path_on_the_command_line_means_the_same_file_when_the_run_is_resumed_from_elsewhere(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.py").write_text(
        "from pipeline import stages\nclass Terminal(stages.Terminal):\n    def terminal(self, context):\n"
        "        super().terminal(context)\n        (context['run_dir'] / 'own').touch()\n"
    )
    run_dir = stop_at(linear, 8, [*SAVING, "runner.train_runner.terminal_class_path=./own.py"])
    monkeypatch.chdir("/")
    stop = linear.parent / "stop.py"
    stop.write_text(stop.read_text().replace("== 8", "== -1"))
    assert CliRunner().invoke(group, ["resume", str(run_dir)]).exit_code == 0
    assert (run_dir / "own").exists()


def test_a_run_of_the_version_before_whose_command_txt_says_less_is_taken_too(linear: Path) -> None:
    run_dir = stop_at(linear, 8, SAVING)
    file = run_dir / "command.txt"
    kept = [line for line in file.read_text().splitlines() if not line.startswith(("name:", "links:", "run_dir:"))]
    file.write_text("".join(f"{line}\n" for line in kept))
    assert GeneralTrainer(linear, SAVING, resume="auto").run()["run_dir"] == run_dir


CONFIG = """
plugins: [mine, {other: {every: 2}}]
runner:
  - {name: t, class: train, epochs: 2, startup_class_path: pipeline.stages.startup:Startup}
"""


@pytest.fixture
def record(tmp_path: Path) -> Provenance:
    """What is kept of a small run whose only file of code is ``own.py``."""
    (tmp_path / "own.py").write_text("x = 1\ny = 2\n", encoding="utf-8")
    environment = {
        "time": "noon",
        "host": "here",
        "packages": {"torch": "2.13.0"},
        "hardware": {"devices": {"t": "cpu"}},
    }
    sources = {Path("workspace/own.py"): tmp_path / "own.py"}
    return Provenance(CONFIG, {"command": "run", "folder": "/there"}, environment, "none\n", sources)


@pytest.fixture
def directory(record: Provenance) -> RunDirectory:
    """The run directory that keeps it."""
    found = RunDirectory.new(Path("runs"), "config")
    record.write(found)
    return found


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"a": {"b": 2}}, {"a": {"b": 3}}, ["a.b: 2 -> 3"]),
        ({"a": 1}, {"a": True}, ["a: 1 -> true"]),
        ({"a": 1, "b": 2}, {"b": 2}, ["a: gone, it was 1"]),
        ({}, {"a": [1]}, ["a: new, [1]"]),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": {"b": 2}}, {"a": [2]}, ["a: {b: 2} -> [2]"]),
        ({"runner": [{"name": "t", "n": 1}]}, {"runner": [{"name": "t", "n": 2}]}, ["runner.t.n: 1 -> 2"]),
        (
            {"phase": [{"name": "p"}, {"name": "q"}]},
            {"phase": [{"name": "q"}, {"name": "p"}]},
            ["phase: the order was p, q -> q, p"],
        ),
    ],
)
def test_each_value_that_differs_is_told_by_its_address(before: Any, now: Any, told: list[str]) -> None:
    assert list(differences(before, now)) == told


def test_nothing_is_told_where_nothing_has_changed(directory: RunDirectory, record: Provenance) -> None:
    again = replace(
        record, environment={**record.environment, "time": "later"}, command={**record.command, "command": "resume"}
    )
    found = compare(directory, again)
    assert (found.messages, found.files) == ([], set())


def test_class_paths_come_first_and_the_lines_are_few(directory: RunDirectory, record: Provenance) -> None:
    more = "".join(f", k{number}: 1" for number in range(30)) + ", startup_class_path: own.py:Startup}"
    config = CONFIG.replace(", startup_class_path: pipeline.stages.startup:Startup}", more)
    lines = compare(directory, replace(record, config=config)).messages[0].splitlines()
    assert lines[1] == "  runner.t.startup_class_path: pipeline.stages.startup:Startup -> own.py:Startup"
    assert lines[-1] == f"  … and {31 - MAX_LINES} more lines"


def test_plugins_are_told_by_their_names(directory: RunDirectory, record: Provenance) -> None:
    config = CONFIG.replace("[mine, {other: {every: 2}}]", "[{other: {every: 5}}, third]")
    (told,) = compare(directory, replace(record, config=config)).messages
    assert told.splitlines() == [
        "the plugins are not as they were:",
        "  plugins.mine: gone, it was {}",
        "  plugins.other.every: 2 -> 5",
        "  plugins.third: new, {}",
    ]


def test_versions_host_and_devices_are_told(directory: RunDirectory, record: Provenance) -> None:
    now = {"host": "there", "packages": {"torch": "2.14.0"}, "hardware": {"devices": {"t": "cuda:0"}}}
    found = compare(directory, replace(record, environment=now))
    assert found.messages[0].splitlines()[1:] == [
        "  host: here -> there",
        "  packages.torch: 2.13.0 -> 2.14.0",
        "  hardware.devices.t: cpu -> cuda:0",
    ]
    assert found.files == {Path("environment.json")}


def test_the_source_of_a_file_is_told_as_a_diff(directory: RunDirectory, record: Provenance, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1\ny = 3\n", encoding="utf-8")
    found = compare(directory, record)
    lines = ["--- as it was", "+++ as it is", "@@ -1,2 +1,2 @@", " x = 1", "-y = 2", "+y = 3"]
    assert found.messages == ["\n  ".join(["workspace/own.py: is not as it was:", *lines])]


def test_files_that_are_new_and_that_are_gone_are_told(
    directory: RunDirectory, record: Provenance, tmp_path: Path
) -> None:
    found = compare(directory, replace(record, sources={Path("workspace/new.py"): tmp_path / "own.py"}))
    assert found.messages == [
        f"workspace/new.py: is new\n  it is {tmp_path / 'own.py'}",
        f"workspace/own.py: is no part of the run any more\n  it was {directory.path / 'workspace/own.py'}",
    ]


def test_a_copy_that_was_being_made_when_the_process_ended_is_none(directory: RunDirectory, record: Provenance) -> None:
    (directory.path / "workspace/.own.py.tmp").write_text("x =")
    assert compare(directory, record).messages == []
    record.write(directory)
    assert [path.name for path in (directory.path / "workspace").iterdir()] == ["own.py"]


def test_bytes_that_are_no_text_are_told_too(directory: RunDirectory, record: Provenance, tmp_path: Path) -> None:
    (directory.path / "workspace/own.py").write_bytes(b"\xff")
    (tmp_path / "own.py").write_bytes(b"\xfe")
    assert compare(directory, record).messages == ["workspace/own.py: is not as it was:\n  1 bytes -> 1 bytes"]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("content", [None, b"", b"[1", b"\xff\xfe", b"- a list", b"a: " + b"[" * 5000])
@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_a_file_that_is_missing_or_damaged_is_told_and_written_anew(
    name: str, content: bytes | None, directory: RunDirectory, record: Provenance
) -> None:
    (directory.path / name).unlink()
    if content is not None:
        (directory.path / name).write_bytes(content)
    found = compare(directory, record)
    assert len(found.messages) == 1
    assert found.messages[0].startswith(f"{name} of the run directory cannot be compared: ")
    assert found.files == {Path(name)}


def test_a_pipe_and_a_link_are_not_read(directory: RunDirectory, record: Provenance, tmp_path: Path) -> None:
    for name in ("environment.json", "workspace/own.py"):
        (directory.path / name).unlink()
    os.mkfifo(directory.path / "environment.json")
    (directory.path / "workspace/own.py").symlink_to(tmp_path / "own.py")
    told = compare(directory, record).messages
    assert [line.partition(" cannot be compared: ")[0] for line in told] == [
        "environment.json of the run directory",
        "workspace/own.py of the run directory",
    ]


def test_what_is_kept_cannot_steer_the_terminal(directory: RunDirectory, record: Provenance) -> None:
    (directory.path / "workspace/own.py").write_text("\x1b[2J\x9b2J", encoding="utf-8")
    (directory.path / "environment.json").write_text(json.dumps({"host": "\x1b[2J"}), encoding="utf-8")
    assert not {"\x1b", "\x9b"} & set("".join(compare(directory, record).messages))
