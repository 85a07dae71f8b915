"""Which files of two run directories are compared, and what is said of those that differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from pipeline_plugins.resume_test.files import compare_files, file_difference, volatile_files

Said = dict[str, tuple[str, bool]]


def written(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def said(straight: Path, interrupted: Path, *volatile: str, apart: tuple[str, ...] = ()) -> Said:
    """Part -> (text, whether it differs)."""
    paths = [volatile_files(folder, {"Plot": volatile}) for folder in (straight, interrupted)]
    return {found.part: (found.text, found.differs) for found in compare_files(straight, interrupted, paths, apart)}


@pytest.mark.parametrize(
    ("name", "one", "other", "expected"),
    [
        ("a.json", '{"x": 1, "y": [2]}', '{ "y": [2],\n"x": 1 }\n', None),
        ("a.json", '{"x": {"y": 1}}', '{"x": {"y": 2}}', "x.y: 1 and 2"),
        ("a.json", "[NaN]", "[ NaN]", None),
        ("a.json", "[0.0]", "[-0.0]", "[0]: 0.0 and -0.0"),
        ("a.json", "{torn", "{toni", "from byte 3 on, in line 1 (- straight, + interrupted):\n-{torn\n+{toni"),
        ("a.jsonl", '{"x": 1}\n{"y": 2}', '{"x":1}\n{"y":2}\n', None),
        ("a.jsonl", '{"x": 1}\n{"iteration": 3, "x": 1}', '{"x": 1}\n{"iteration": 3, "x": 2}', "line 2: x: 1 and 2, at iteration 3"),
        ("a.jsonl", "1\n", "1\n2\n", "line 2: only the interrupted run has it"),
        ("a.jsonl", "1\n2\n", "1\n", "line 2: only the straight run has it"),
        ("a.txt", "one\ntwo\n", "one\ntwx\n", "from byte 6 on, in line 2 (- straight, + interrupted):\n-two\n+twx"),
        ("a.txt", "one", "one more", "from byte 3 on, in line 1 (- straight, + interrupted):\n-one\n+one more"),
        ("a.txt", '{"x": 1}', '{"x":1}', "from byte 5 on, in line 1 (- straight, + interrupted):\n-{\"x\": 1}\n+{\"x\":1}"),
        ("a.txt", "1\n", "".join(f"{number}\n" for number in range(1, 12)), "from byte 2 on, in line 2 (- straight, + interrupted):\n"
         "+2\n+3\n+4\n+5\n+6\n+7\n+8\n+9\n… and 2 more"),
        ("a.png", b"\x00\xff", b"\x00\xff", None),
        ("a.png", b"\x00\xff", b"\x00\xfe", "from byte 1 on, in line 1"),
    ],
)  # fmt: skip
def test_two_files_differ_in_what_they_mean(
    tmp_path: Path, name: str, one: str, other: str, expected: str | None
) -> None:
    paths = [written(tmp_path / run, {name: text}) / name for run, text in (("straight", one), ("other", other))]
    assert file_difference(*paths) == expected


def test_a_file_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    straight, other = written(tmp_path / "a", {"x/y.txt": "", "z": ""}), written(tmp_path / "b", {"z": "", "w": ""})
    assert said(straight, other) == {
        "w": ("only the interrupted run has it", True),
        "x/y.txt": ("only the straight run has it", True),
        "files": ("the same: z", False),
    }


def test_what_its_writer_names_volatile_is_listed_and_not_compared(tmp_path: Path) -> None:
    names = ["now.txt", "plots/a/b.png", "deep/x.log", "x.log"]
    straight = written(tmp_path / "a", dict.fromkeys(names, "one"))
    other = written(tmp_path / "b", dict.fromkeys([*names, "plots/c.png"], "other"))
    assert said(straight, other, "now.txt", "plots", "*/x.log") == {
        "x.log": ("from byte 1 on, in line 1 (- straight, + interrupted):\n-one\n+other", True),
        "not compared": ("deep/x.log, now.txt, plots/a/b.png, plots/c.png (volatile in Plot)", False),
    }


def test_a_plugin_may_name_what_it_writes_beside_its_folder(tmp_path: Path) -> None:
    run = written(tmp_path / "a", {"top.txt": "", "t/own.txt": ""})
    assert volatile_files(run / "t", {"Plot": ["../top.txt"]}) == {run / "top.txt": "Plot"}


def test_what_is_compared_by_itself_is_left_out_at_the_top_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", {"checkpoints/x": "", "metrics.jsonl": "", "sub/checkpoints/y": ""})
    assert said(folder, folder, apart=("checkpoints", "metrics.jsonl")) == {
        "files": ("the same: sub/checkpoints/y", False)
    }


def test_a_link_is_compared_by_where_it_leads(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, {"x": "", "y": ""}) for name in "ab"]
    for folder, target in zip(folders, "xy", strict=True):
        (folder / "same").symlink_to("..")
        (folder / "best").symlink_to(target)
    found = said(*folders)
    assert found["best"] == ("leads to x and y", True)
    assert found["files"] == ("the same: same, x, y", False)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(written(tmp_path, {"x": ""}) / "pipe")
    assert said(tmp_path, tmp_path)["not compared"] == ("pipe (no regular file)", False)


def test_of_many_files_some_are_listed(tmp_path: Path) -> None:
    folder = written(tmp_path, {f"{number:02d}": "" for number in range(25)})
    assert said(folder, folder)["files"][0].endswith("18, 19, and 5 more")
