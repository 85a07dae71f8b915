"""What is told of a config, plugins, code and versions that are not as a run directory keeps them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.directory import RunDirectory
from pipeline.run.provenance import Provenance
from pipeline.run.resume import MOST_LINES, changes, differences

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
    record.keep(found)
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
    found = changes(directory, again)
    assert (found.told, found.files) == ([], set())


def test_class_paths_come_first_and_the_lines_are_few(directory: RunDirectory, record: Provenance) -> None:
    more = "".join(f", k{number}: 1" for number in range(30)) + ", startup_class_path: own.py:Startup}"
    config = CONFIG.replace(", startup_class_path: pipeline.stages.startup:Startup}", more)
    lines = changes(directory, replace(record, config=config)).told[0].splitlines()
    assert lines[1] == "  runner.t.startup_class_path: pipeline.stages.startup:Startup -> own.py:Startup"
    assert lines[-1] == f"  … and {31 - MOST_LINES} more lines"


def test_plugins_are_told_by_their_names(directory: RunDirectory, record: Provenance) -> None:
    config = CONFIG.replace("[mine, {other: {every: 2}}]", "[{other: {every: 5}}, third]")
    (told,) = changes(directory, replace(record, config=config)).told
    assert told.splitlines() == [
        "the plugins are not as they were:",
        "  plugins.mine: gone, it was {}",
        "  plugins.other.every: 2 -> 5",
        "  plugins.third: new, {}",
    ]


def test_versions_host_and_devices_are_told(directory: RunDirectory, record: Provenance) -> None:
    now = {"host": "there", "packages": {"torch": "2.14.0"}, "hardware": {"devices": {"t": "cuda:0"}}}
    found = changes(directory, replace(record, environment=now))
    assert found.told[0].splitlines()[1:] == [
        "  host: here -> there",
        "  packages.torch: 2.13.0 -> 2.14.0",
        "  hardware.devices.t: cpu -> cuda:0",
    ]
    assert found.files == {Path("environment.json")}


def test_the_source_of_a_file_is_told_as_a_diff(directory: RunDirectory, record: Provenance, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1\ny = 3\n", encoding="utf-8")
    found = changes(directory, record)
    lines = ["--- as it was", "+++ as it is", "@@ -1,2 +1,2 @@", " x = 1", "-y = 2", "+y = 3"]
    assert found.told == ["\n  ".join(["workspace/own.py: is not as it was:", *lines])]


def test_files_that_are_new_and_that_are_gone_are_told(
    directory: RunDirectory, record: Provenance, tmp_path: Path
) -> None:
    found = changes(directory, replace(record, sources={Path("workspace/new.py"): tmp_path / "own.py"}))
    assert found.told == [
        f"workspace/new.py: is new\n  it is {tmp_path / 'own.py'}",
        f"workspace/own.py: is no part of the run any more\n  it was {directory.path / 'workspace/own.py'}",
    ]


def test_a_copy_that_was_being_made_when_the_process_ended_is_none(directory: RunDirectory, record: Provenance) -> None:
    (directory.path / "workspace/.own.py.tmp").write_text("x =")
    assert changes(directory, record).told == []
    record.keep(directory)
    assert [path.name for path in (directory.path / "workspace").iterdir()] == ["own.py"]


def test_bytes_that_are_no_text_are_told_too(directory: RunDirectory, record: Provenance, tmp_path: Path) -> None:
    (directory.path / "workspace/own.py").write_bytes(b"\xff")
    (tmp_path / "own.py").write_bytes(b"\xfe")
    assert changes(directory, record).told == ["workspace/own.py: is not as it was:\n  1 bytes -> 1 bytes"]


@pytest.mark.parametrize("content", [None, b"", b"[1", b"\xff\xfe", b"- a list", b"a: " + b"[" * 5000])
@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_a_file_that_is_missing_or_damaged_is_told_and_written_anew(
    name: str, content: bytes | None, directory: RunDirectory, record: Provenance
) -> None:
    (directory.path / name).unlink()
    if content is not None:
        (directory.path / name).write_bytes(content)
    found = changes(directory, record)
    assert len(found.told) == 1
    assert found.told[0].startswith(f"{name} of the run directory cannot be compared: ")
    assert found.files == {Path(name)}


def test_a_pipe_and_a_link_are_not_read(directory: RunDirectory, record: Provenance, tmp_path: Path) -> None:
    for name in ("environment.json", "workspace/own.py"):
        (directory.path / name).unlink()
    os.mkfifo(directory.path / "environment.json")
    (directory.path / "workspace/own.py").symlink_to(tmp_path / "own.py")
    told = changes(directory, record).told
    assert [line.partition(" cannot be compared: ")[0] for line in told] == [
        "environment.json of the run directory",
        "workspace/own.py of the run directory",
    ]


def test_what_is_kept_cannot_steer_the_terminal(directory: RunDirectory, record: Provenance) -> None:
    (directory.path / "workspace/own.py").write_text("\x1b[2J\x9b2J", encoding="utf-8")
    (directory.path / "environment.json").write_text(json.dumps({"host": "\x1b[2J"}), encoding="utf-8")
    assert not {"\x1b", "\x9b"} & set("".join(changes(directory, record).told))
