"""The manifest: a damaged checkpoint is noticed before it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import manifest
from pipeline.errors import CheckpointError


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def test_the_manifest_has_size_and_sha256_of_every_other_file(saved: Path) -> None:
    written = json.loads((saved / "manifest.json").read_text())
    others = {path.name: path.read_bytes() for path in saved.iterdir() if path.name != "manifest.json"}
    assert set(others) == {"main.safetensors", "state.json"}
    assert written["format"] == 1
    assert written["files"] == {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in others.items()
    }


def test_a_whole_checkpoint_is_read_as_it_was_written(saved: Path) -> None:
    contents = manifest.read_verified(saved)
    assert contents == {name: (saved / name).read_bytes() for name in ("main.safetensors", "state.json")}


def test_a_file_that_the_manifest_does_not_list_is_not_read(saved: Path) -> None:
    (saved / "other.safetensors").write_bytes(b"not ours")
    assert "other.safetensors" not in manifest.read_verified(saved)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "is damaged: its SHA-256 is not the one that was written"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"has \d+ bytes, not the \d+ that were written"),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), r"has \d+ bytes, not the \d+ that were written"),
        (lambda path: path.write_bytes(b""), "has 0 bytes, not the"),
        (lambda path: path.unlink(), "is missing or no regular file"),
        (replace_by_link, "is missing or no regular file"),
        (lambda path: (path.unlink(), path.mkdir()), "is missing or no regular file"),
    ],
    ids=["flipped", "truncated", "longer", "emptied", "missing", "link", "folder"],
)
@pytest.mark.parametrize("name", ["main.safetensors", "state.json"])
def test_a_damaged_file_is_refused_by_name(
    saved: Path, name: str, damage: Callable[[Path], object], message: str
) -> None:
    damage(saved / name)
    with pytest.raises(CheckpointError, match=f"{name}: {message}.*; use another checkpoint"):
        manifest.read_verified(saved)


@pytest.mark.parametrize("name", ["../step-outside", "/etc/hostname", "sub/file", "..", ".", ""])
def test_a_name_that_leads_out_of_the_folder_is_refused(saved: Path, name: str) -> None:
    (saved.parent / "step-outside").write_bytes(b"outside")
    (saved / "sub").mkdir()
    (saved / "sub" / "file").write_bytes(b"inside")
    entry = {"size": 7, "sha256": hashlib.sha256(b"outside").hexdigest()}
    edit(saved, lambda content: content["files"].update({name: entry}))
    with pytest.raises(
        CheckpointError, match=r"is missing or no regular file, but manifest.json lists it; use another"
    ):
        manifest.read_verified(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("null", "is damaged"),
        ('{"format": 1}', "is damaged"),
        ('{"format": 1, "files": []}', "is damaged"),
        ('{"format": 1, "files": {"state.json": {"size": 3}}}', r"is damaged \(a file without size or sha256\)"),
        ('{"format": 1, "files": {"state.json": 3}}', "is damaged"),
        ("\xff", "is damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(saved: Path, text: str, message: str) -> None:
    (saved / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=f"manifest.json: {message}.*; use another checkpoint"):
        manifest.read_verified(saved)


def test_a_manifest_of_another_format_is_refused_with_the_number(saved: Path) -> None:
    edit(saved, lambda content: content.update(format=2))
    with pytest.raises(CheckpointError, match="format 2 is not 1; use the version that wrote it"):
        manifest.read_verified(saved)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no checkpoint: .*No such file.*; name a step-… folder"):
        manifest.read_verified(tmp_path)
