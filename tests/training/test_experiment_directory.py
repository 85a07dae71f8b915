"""The folder of an experiment: what it is made of is in it, and nothing in it is lost."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from loguru import logger

from pipeline import create_experiment_directory, parse_arguments
from pipeline.brain import script
from pipeline.errors import ConfigError, ExitCode, StorageError

PARAMETERS = """\
# what is trained
seed: 1
lr: 1e-3  # base rate
same: &same {depth: 2, width: 3}
other: *same
model: !new:torch.nn.Linear
  in_features: 3
  out_features: !ref <same[width]>
attack: !!python/object/apply:pathlib.Path.mkdir [[unpickled]]
"""


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    yield
    script.end_log()


@pytest.fixture
def parameters(tmp_path: Path) -> Path:
    file = tmp_path / "hyperparams.yaml"
    file.write_text(PARAMETERS, encoding="utf-8")
    return file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_script_leaves_what_its_experiment_was_made_of(tmp_path: Path, parameters: Path) -> None:
    folder = tmp_path / "results" / "first"
    create_experiment_directory(folder, parameters)
    assert names(folder) == ["env.log", "hyperparams.yaml", "log.txt", Path(__file__).name]
    assert (folder / "hyperparams.yaml").read_text() == PARAMETERS
    assert (folder / Path(__file__).name).read_bytes() == Path(__file__).read_bytes()


def test_the_environment_names_python_and_every_package(tmp_path: Path) -> None:
    create_experiment_directory(str(tmp_path / "results"))
    lines = (tmp_path / "results" / "env.log").read_text().splitlines()
    assert lines[0] == f"python: {sys.version}"
    assert f"torch=={version('torch')}" in lines


def test_what_is_not_asked_for_is_not_written(tmp_path: Path) -> None:
    create_experiment_directory(tmp_path / "results", save_env_desc=False)
    assert names(tmp_path / "results") == ["log.txt", Path(__file__).name]


def saved_nodes(tmp_path: Path, parameters: Path, overrides: Any) -> dict[str, yaml.Node]:
    create_experiment_directory(tmp_path / "results", parameters, overrides)
    node = yaml.compose((tmp_path / "results" / "hyperparams.yaml").read_text(), Loader=yaml.SafeLoader)
    return {key.value: value for key, value in node.value}


def test_a_notebook_has_no_script_to_copy(tmp_path: Path) -> None:
    exec("create(folder)", {"create": create_experiment_directory, "folder": tmp_path / "results"})
    assert names(tmp_path / "results") == ["env.log", "log.txt"]


@pytest.mark.parametrize("given", ["seed: 7\nname: 'yes'", {"seed": 7, "name": "yes"}])
def test_overrides_replace_and_add_values(tmp_path: Path, parameters: Path, given: Any) -> None:
    saved = saved_nodes(tmp_path, parameters, given)
    assert list(saved) == ["seed", "lr", "same", "other", "model", "attack", "name"]
    assert [saved[name].value for name in ("seed", "lr", "name")] == ["7", "1e-3", "yes"]
    assert saved["name"].tag == "tag:yaml.org,2002:str"


def test_tags_are_kept_and_nothing_that_they_name_is_built(tmp_path: Path, parameters: Path) -> None:
    saved = saved_nodes(tmp_path, parameters, "lr: !ref <seed>")
    assert (saved["lr"].tag, saved["lr"].value) == ("!ref", "<seed>")
    assert saved["model"].tag == "!new:torch.nn.Linear"
    assert saved["attack"].tag == "tag:yaml.org,2002:python/object/apply:pathlib.Path.mkdir"
    assert not Path("unpickled").exists()


def test_a_mapping_goes_into_the_one_that_is_there_and_an_alias_of_that_keeps_its_meaning(
    tmp_path: Path, parameters: Path
) -> None:
    saved = saved_nodes(tmp_path, parameters, "same: {depth: 5}\nmodel: {in_features: 4, bias: false}")
    plain = {name: {key.value: value.value for key, value in saved[name].value} for name in ("same", "other", "model")}
    assert plain["same"] == {"depth": "5", "width": "3"}
    assert plain["other"] == {"depth": "2", "width": "3"}
    assert plain["model"] == {"in_features": "4", "out_features": "<same[width]>", "bias": "false"}
    assert saved["model"].tag == "!new:torch.nn.Linear"


def test_the_overrides_of_a_command_line_go_in_as_they_are(tmp_path: Path, parameters: Path) -> None:
    file, _, overrides = parse_arguments([str(parameters), "--seed", "10", "--note", "a: b # c"])
    create_experiment_directory(tmp_path / "results", file, overrides)
    saved = (tmp_path / "results" / "hyperparams.yaml").read_text().splitlines()
    assert saved[0] == "seed: 10"
    assert saved[-1] == "note: 'a: b # c'"


def test_the_same_experiment_again_leaves_its_files_as_they_are(tmp_path: Path, parameters: Path) -> None:
    folder = tmp_path / "results"
    create_experiment_directory(folder, parameters)
    before = {name: (folder / name).stat().st_mtime_ns for name in names(folder) if name != "log.txt"}
    create_experiment_directory(folder, folder / "hyperparams.yaml")
    assert {name: (folder / name).stat().st_mtime_ns for name in names(folder) if name != "log.txt"} == before


def test_what_another_experiment_left_is_kept_under_a_name_with_the_time(tmp_path: Path, parameters: Path) -> None:
    folder = tmp_path / "results"
    for seed in range(4):
        create_experiment_directory(folder, parameters, {"seed": seed})
    kept = [name for name in names(folder) if name.startswith("hyperparams.yaml.2")]
    seeds = sorted((folder / name).read_text().splitlines()[0] for name in [*kept, "hyperparams.yaml"])
    assert seeds == ["seed: 0", "seed: 1", "seed: 2", "seed: 3"]
    assert (folder / "hyperparams.yaml").read_text().startswith("seed: 3\n")


def test_log_lines_of_both_kinds_go_to_the_newest_experiment_directory(tmp_path: Path) -> None:
    create_experiment_directory(tmp_path / "one")
    logger.debug("to one")
    create_experiment_directory(tmp_path / "two")
    logging.getLogger("theirs").warning("to two")
    script.end_log()
    logger.info("to nobody")
    one, two = ((tmp_path / name / "log.txt").read_text() for name in ("one", "two"))
    assert [line.split(" ", 5)[-1].split()[-2:] for line in one.splitlines()[1:]] == [["to", "one"]]
    assert [line.split()[-3:] for line in two.splitlines()[1:]] == [["theirs:", "to", "two"]]


def test_the_log_begins_with_the_folder_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "h.yaml", "--note", "two words"])
    create_experiment_directory(tmp_path / "one")
    line = (tmp_path / "one" / "log.txt").read_text()
    assert line.endswith(f"experiment directory {tmp_path / 'one'}, made by train.py h.yaml --note 'two words'\n")


def test_the_log_may_end_after_all_places_of_log_lines_were_removed(tmp_path: Path) -> None:
    before = logging.root.handlers[:]
    create_experiment_directory(tmp_path / "one")
    logger.remove()
    script.end_log()
    logger.add(sys.stderr)
    assert logging.root.handlers == before


def test_uncaught_exceptions_are_left_to_python(tmp_path: Path) -> None:
    before = sys.excepthook
    create_experiment_directory(tmp_path)
    assert sys.excepthook is before


ENDINGS = """
import os
import sys

from pipeline import create_experiment_directory


def train(ending):
    if ending == "error":
        raise ValueError("the data are wrong")
    if ending == "interrupt":
        raise KeyboardInterrupt
    if ending == "exit":
        sys.exit(3)


for ending in sys.argv[1:]:
    if os.fork() == 0:
        break
    os.wait()
else:
    sys.exit()
os.dup2(os.open(f"{ending}.txt", os.O_WRONLY | os.O_CREAT), 2)
try:
    1 / 0
except ZeroDivisionError:
    pass
create_experiment_directory(ending, save_env_desc=False)
train(ending)
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script whose processes end in four ways: their experiment directories, and what is on stderr."""
    folder = tmp_path_factory.mktemp("endings")
    file = folder / "train.py"
    file.write_text(ENDINGS, encoding="utf-8")
    subprocess.run([sys.executable, str(file), "error", "interrupt", "exit", "nothing"], cwd=folder, check=True)
    return folder


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("ending", "ended_by"),
    [
        ("error", ["    train(ending)", "    raise ValueError(…)", "ValueError: the data are wrong"]),
        ("interrupt", ["    train(ending)", "    raise KeyboardInterrupt", "KeyboardInterrupt"]),
        ("exit", []),
        ("nothing", []),
    ],
)
def test_the_traceback_of_what_ends_the_process_is_in_the_log_and_on_stderr(
    endings: Path, ending: str, ended_by: list[str]
) -> None:
    lines = (endings / ending / "log.txt").read_text(encoding="utf-8").splitlines()[1:]
    kept = [line.replace('ValueError("the data are wrong")', "ValueError(…)") for line in lines if "File" not in line]
    kept = [line for line in kept if set(line) - set(" ^")]
    assert kept == (
        ["the process was ended by this error:", "Traceback (most recent call last):", *ended_by] if ended_by else []
    )
    errors = (endings / f"{ending}.txt").read_text(encoding="utf-8")
    assert errors.count("Traceback") == bool(ended_by)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("- 1", None, "hyperparams.yaml: is no mapping; write `key: value` lines"),
        ("a: [", None, "hyperparams.yaml: is no YAML: .*; mend it"),
        ("[" * 5000, None, "hyperparams.yaml: is no YAML: .*; mend it"),
        (b"\xff", None, "hyperparams.yaml: cannot be read: invalid start byte; name a YAML file"),
        ("a: 1", "a: [", "overrides: is no YAML: .*; mend it"),
        ("a: 1", "a", "overrides: is no mapping; write `key: value` lines"),
        ("a: 1", {"a": object()}, "overrides: hold what YAML cannot: .*object.*; keep them plain"),
    ],
)
def test_wrong_hyperparameters_are_refused_before_anything_is_made(
    tmp_path: Path, text: Any, overrides: Any, message: str
) -> None:
    (tmp_path / "hyperparams.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        create_experiment_directory(tmp_path / "results", tmp_path / "hyperparams.yaml", overrides)
    assert not (tmp_path / "results").exists()


def test_hyperparameters_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file or directory; name a YAML file"):
        create_experiment_directory(tmp_path / "results", "none.yaml")


def test_overrides_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"overrides without hyperparams_to_save; name their file"):
        create_experiment_directory(tmp_path / "results", overrides="seed: 1")


def test_a_config_of_standard_logging_is_refused_with_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"log_config is 'log.yaml'; log lines go through loguru; .*loguru.logger.add"
    ):
        create_experiment_directory(tmp_path / "results", log_config="log.yaml")  # type: ignore[arg-type]


@pytest.mark.parametrize("taken", ["results", "results/log.txt", "results/env.log"])
def test_a_folder_that_cannot_be_written_is_a_fault_of_the_storage(tmp_path: Path, taken: str) -> None:
    if taken == "results":
        (tmp_path / taken).write_text("a file")
    else:
        (tmp_path / taken).mkdir(parents=True)
    with pytest.raises(
        StorageError,
        match=rf"{taken}: cannot be (read or )?written: .*; free or repair the storage, or choose another folder",
    ) as caught:
        create_experiment_directory(tmp_path / "results")
    assert caught.value.exit_code == ExitCode.STORAGE
