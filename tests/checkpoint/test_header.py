"""The header of a safetensors file is looked at before the library reads the file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pipeline.checkpoint.header import read_header
from pipeline.errors import CheckpointError


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 5, (2**63).to_bytes(8, "little"), (9).to_bytes(8, "little") + b'{"a": 1}\n']
)
def test_what_is_no_safetensors_file_is_refused_by_its_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(str(tmp_path))}/w.safetensors: is (no safetensors|damaged)"
    ):
        read_header(tmp_path / "w.safetensors")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"w.safetensors: is no regular file; use another"):
        read_header(tmp_path / "w.safetensors")
