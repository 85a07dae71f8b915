"""The manifest: a damaged checkpoint is noticed before it is used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import layout
from pipeline.errors import CheckpointError


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content, indent=1))


def test_the_manifest_has_size_and_sha256_of_every_other_file(saved: Path) -> None:
    written = json.loads((saved / "manifest.json").read_text())
    others = {path.name: path.read_bytes() for path in saved.iterdir() if path.name != "manifest.json"}
    assert set(others) == {"main.safetensors", "state.json"}
    assert written["format"] == 1
    assert written["files"] == {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in others.items()
    }


def test_what_is_listed_is_what_was_written(saved: Path) -> None:
    contents = {name: (saved / name).read_bytes() for name in ("main.safetensors", "state.json")}
    assert layout.listed_files(saved) == {name: layout.file_entry(content) for name, content in contents.items()}


def test_no_file_is_opened_to_compare_sizes(saved: Path) -> None:
    (saved / "main.safetensors").unlink()
    os.mkfifo(saved / "main.safetensors")
    with pytest.raises(CheckpointError, match=r"main\.safetensors: is missing or no regular file"):
        layout.listed_files(saved)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"has \d+ bytes, not the \d+ written"),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), r"has \d+ bytes, not the \d+ written"),
        (lambda path: path.write_bytes(b""), "has 0 bytes, not the"),
        (lambda path: path.unlink(), "is missing or no regular file"),
        (replace_by_link, "is missing or no regular file"),
        (lambda path: (path.unlink(), path.mkdir()), "is missing or no regular file"),
    ],
    ids=["truncated", "longer", "emptied", "missing", "link", "folder"],
)
@pytest.mark.parametrize("name", ["main.safetensors", "state.json"])
def test_a_file_of_another_size_or_kind_is_refused_by_name(
    saved: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    damage(saved / name)
    with pytest.raises(CheckpointError, match=f"{name}: {message}.*; use another checkpoint"):
        layout.listed_files(saved)


@pytest.mark.parametrize(
    "name", ["../step-outside", "/etc/hostname", "sub/file", "..", ".", "", "a\\b", "a\0b", "manifest.json"]
)
def test_a_name_that_is_not_of_a_file_in_the_folder_is_refused(saved: Path, name: str) -> None:
    entry = {"size": 7, "sha256": hashlib.sha256(b"outside").hexdigest()}
    edit(saved, lambda content: content["files"].update({name: entry}))
    with pytest.raises(
        CheckpointError, match=r"manifest.json: is damaged \(.* is no name of a file in it\); use another"
    ):
        layout.listed_files(saved)


ENTRY = '{"size": 1, "sha256": "' + "a" * 64 + '"}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("null", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 1, "files": []}', "is damaged"),
        ('{"format": 1, "files": {"state.json": {"size": 3}}}', r"is damaged \('sha256'\)"),
        ('{"format": 1, "files": {"a": {"size": -1, "sha256": ""}}}', "is damaged .the size of 'a' is no count"),
        ('{"format": 1, "files": {"a": {"size": true, "sha256": ""}}}', "is damaged .the size of 'a' is no count"),
        ('{"format": 1, "files": {"a": {"size": 1, "sha256": "../a"}}}', "is damaged .the sha256 of 'a' is none"),
        (f'{{"format": 1, "files": {{"a": {ENTRY}, "a": {ENTRY}}}}}', "is damaged .it is not as it was written"),
        ('{"format": 1, "files": {"state.json": 3}}', "is damaged"),
        ("\xff", "is damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(saved: Path, text: str, message: str) -> None:
    (saved / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=f"manifest.json: {message}.*; use another checkpoint"):
        layout.listed_files(saved)


def test_a_manifest_that_says_the_same_in_other_words_is_refused(saved: Path) -> None:
    (saved / "manifest.json").write_bytes((saved / "manifest.json").read_bytes() + b"\n")
    with pytest.raises(CheckpointError, match=r"is damaged \(it is not as it was written"):
        layout.listed_files(saved)


def test_a_manifest_of_another_format_is_refused_with_the_number(saved: Path) -> None:
    edit(saved, lambda content: content.update(format=2))
    with pytest.raises(CheckpointError, match="format 2 is not 1; use the version that wrote it"):
        layout.listed_files(saved)


def test_a_manifest_that_could_not_be_read_again_is_not_written() -> None:
    with pytest.raises(
        CheckpointError, match=r"a checkpoint of 9999 files is too large for its manifest\.json; use fewer"
    ):
        layout.encode_manifest({f"{index}": layout.file_entry(b"") for index in range(9999)})


def test_a_large_manifest_is_refused_before_it_is_read(saved: Path) -> None:
    os.truncate(saved / "manifest.json", 2**36)
    with pytest.raises(CheckpointError, match=r"is no checkpoint: .*has more than 1048576 bytes; use another"):
        layout.listed_files(saved)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no checkpoint: .*No such file.*; name a step-… folder"):
        layout.listed_files(tmp_path)


def test_a_link_to_a_checkpoint_is_none(saved: Path) -> None:
    link = saved.with_name("step-000000000099")
    link.symlink_to(saved)
    with pytest.raises(CheckpointError, match="step-000000000099: is a link; name the folder that it leads to"):
        layout.listed_files(link)
