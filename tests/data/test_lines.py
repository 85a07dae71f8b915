"""The files that a path names, and their lines by number."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.slots.lines import STEP, LineFiles, find_files, first_line


def write(folder: Path, **contents: bytes) -> list[Path]:
    paths = [folder / name for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    return paths


def test_folders_and_patterns_are_sorted_and_leave_out_hidden_files(tmp_path: Path, log_lines: list[str]) -> None:
    for name in ("b/2.txt", "b/10.txt", "a.txt", ".hidden", "b/.part/3.txt", "c/.x"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x\n")
    found = [str(path.relative_to(tmp_path)) for path in find_files(str(tmp_path), "d")]
    assert found == ["a.txt", "b/10.txt", "b/2.txt"]
    assert any("d: what is hidden is left out, 3 in all" in line for line in log_lines)
    one = [str(path.relative_to(tmp_path)) for path in find_files(f"{tmp_path}/b/*.txt", "d")]
    assert one == ["b/10.txt", "b/2.txt"]
    both = find_files([f"{tmp_path}/a.txt", f"{tmp_path}/**/2.txt", f"{tmp_path}/a.txt"], "d")
    assert [path.name for path in both] == ["a.txt", "2.txt"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert find_files("?*", "d") == [Path("a.txt")]
        assert find_files(".*", "d") == [Path(".hidden")]
    # A file that is named is read whatever its name is.
    assert find_files(f"{tmp_path}/.hidden", "d") == [tmp_path / ".hidden"]


@pytest.mark.parametrize("path", ["none.txt", "c", "no*"])
def test_a_path_that_names_no_file_is_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".hidden").write_text("x\n")
    with pytest.raises(
        DataError, match=rf"^d: data_path names no file: {tmp_path}/{path.replace('*', '.')}.*; check the path$"
    ):
        find_files(f"{tmp_path}/{path}", "d")


@pytest.mark.parametrize("seed", range(20))
def test_lines_come_by_number_whatever_is_asked_for(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    contents = []
    for _ in range(chance.randrange(1, 5)):
        lines = [
            b"x" * chance.randrange(0, 9) for _ in range(chance.choice([0, 1, STEP - 1, STEP, STEP + 1, 3 * STEP, 40]))
        ]
        end = b"\n" if chance.random() < 0.5 else b""
        # Without a newline at its end, an empty last line is none.
        contents.append(b"\n".join(lines) + (end if lines and (lines[-1] or end) else b""))
    paths = write(tmp_path, **{f"f{number}": content for number, content in enumerate(contents)})
    expected = [line for content in contents for line in content.splitlines()]
    if not expected:
        with pytest.raises(DataError, match="there is no line in"):
            LineFiles(paths, "d")
        return
    files = LineFiles(paths, "d")
    assert len(files) == len(expected)
    for count in (1, 3, len(expected)):
        numbers = chance.choices(range(len(expected)), k=count)
        assert files.read(numbers) == b"".join(expected[number] + b"\n" for number in numbers)
    first = chance.randrange(len(expected))
    last = chance.randrange(first, len(expected))
    assert files.read(range(first, last)) == b"".join(line + b"\n" for line in expected[first:last])
    again = pickle.loads(pickle.dumps(files))
    assert again.read(range(len(again))) == b"".join(line + b"\n" for line in expected)


def test_a_place_counts_from_1_in_each_file(tmp_path: Path) -> None:
    paths = write(tmp_path, a=b"1\n2\n", b=b"", c=b"3\n4")
    files = LineFiles(paths, "d")
    assert [files.place(number) for number in range(4)] == [
        f"{tmp_path}/a, line 1",
        f"{tmp_path}/a, line 2",
        f"{tmp_path}/c, line 1",
        f"{tmp_path}/c, line 2",
    ]


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("count", [1, STEP - 1, STEP, STEP + 1, 3 * STEP])
def test_a_header_is_no_line_and_counts_in_places(tmp_path: Path, count: int, end: bytes) -> None:
    lines = [b"%d" % number for number in range(count)]
    text = b"\n".join([b"the header", *lines]) + end
    paths = write(tmp_path, a=text, b=b"", c=b"alone" + end, d=text)
    files = LineFiles(paths, "d", header=True)
    assert [first_line(path) for path in paths] == [b"the header\n", b"", b"alone\n", b"the header\n"]
    assert files.first == [0, count, count, count, 2 * count]
    assert files.read(range(2 * count)) == b"".join(line + b"\n" for line in lines * 2)
    for number in range(2 * count):
        assert files.read([number]) == lines[number % count] + b"\n"
        assert files.place(number) == f"{tmp_path}/{'ad'[number // count]}, line {number % count + 2}"


@pytest.mark.parametrize("content", [b"1\n2\n", b"11\n22\n33\n44\n", b"1\n2\n3\n5\n"])
def test_a_file_that_has_changed_is_an_error(tmp_path: Path, content: bytes) -> None:
    (path,) = write(tmp_path, a=b"1\n2\n3\n4\n")
    os.utime(path, ns=(1, 1))
    files = LineFiles([path], "d")
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path} has changed since it was read first; begin anew"):
        files.read([3])


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    (path,) = write(tmp_path, a=b"1\n")
    assert LineFiles([path], "d").read([0]) == b"1\n"
    path.unlink()
    path.write_bytes(b"2\n")
    assert LineFiles([path], "d").read([0]) == b"2\n"
