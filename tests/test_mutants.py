"""The small changes of the code that the tests have to notice: ``tests/faults/mutants.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from code_changes import changes

MUTANTS = Path(__file__).parent / "faults" / "mutants.py"
SOURCE = '''\
LIMIT = 3
def f(a: "int", b=2):
    """A text."""
    if not a < b and "key" in a:
        logger.debug("a text", 1)
        raise ValueError(f"{a} is not {1}", 1)
    a.save("a text", flag=True)
    a["key"] = b is (
        None)
    return g(a) if a else "text"
'''


def _changed_lines(source: str) -> list[str]:
    """Return each changed version of a source: only the lines that differ."""
    before = source.splitlines()
    versions = []
    for change in changes(source.encode()):
        after = change.apply(source.encode()).decode()
        compile(after, "changed", "exec")
        versions.append(" | ".join(line.strip() for line in after.splitlines() if line not in before))
    return versions


def test_code_changes_of_a_function_are_all_listed() -> None:
    """Texts, annotations, defaults, errors and debug logs stay; so does what is outside of functions."""
    assert sorted(_changed_lines(SOURCE)) == sorted(
        [
            'if  a < b and "key" in a:',
            'if not a >= b and "key" in a:',
            'if not a < b or "key" in a:',
            "if not a < b and 'key_' in a:",
            'if not a < b and "key" not in a:',
            'if not (not a < b and "key" in a):',
            "pass",
            'a.save("a text", flag=False)',
            "a['key_'] = b is (",
            'a["key"] = b is not (',
            "return None",
            'return g(a) if not (a) else "text"',
        ]
    )


def test_code_changes_after_wide_characters_are_in_place() -> None:
    assert _changed_lines('def f(a):\n    return "ü€" == a, 1\n') == [
        "return 'ü€_' == a, 1",
        "return None",
        'return "ü€" != a, 1',
        'return "ü€" == a, 2',
    ]


@pytest.mark.slow
def test_mutants_that_no_test_notices_survive(tmp_path: Path) -> None:
    """Of a small tree, in which ``is_more`` is tested and ``is_less`` is only called; a test that always fails says nothing."""
    files = {
        "pipeline/__init__.py": "",
        "pipeline/engine/__init__.py": "",
        "pipeline/engine/compared.py": (
            "def is_more(a, b):\n    return a > b\n\n\ndef is_less(a, b):\n    return a < b\n\n\n"
            "def is_unused(a, b):\n    return a == b\n"
        ),
        "tests/test_compared.py": (
            "from pipeline.engine.compared import is_less, is_more\n\n\n"
            "def test_more():\n    assert (is_more(2, 1), is_more(1, 2)) == (True, False)\n\n\n"
            "def test_less():\n    is_less(1, 2)\n\n\n"
            "def test_broken():\n    assert is_less(2, 1)\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path / "tree", check=True)
    report = tmp_path / "report.jsonl"
    command = [sys.executable, MUTANTS, "--tree", tmp_path / "tree", "--jobs", "1", "--report", report]

    done = subprocess.run(command, check=True, capture_output=True, text=True)

    lines = report.read_text(encoding="utf-8").splitlines()
    outcomes = {(each["line"], each["change"]): each["outcome"] for each in map(json.loads, lines)}
    assert outcomes == {
        (2, "return: a > b -> None"): "noticed",
        (2, "comparison: > -> <="): "noticed",
        (6, "return: a < b -> None"): "survived",
        (6, "comparison: < -> >="): "survived",
    }
    assert done.stdout.splitlines()[-1] == "4 of 4 mutants: 2 noticed, 2 survived"

    test = tmp_path / "tree" / "tests" / "test_compared.py"
    test.write_text(test.read_text(encoding="utf-8").replace(" == (True, False)", " is not None"), encoding="utf-8")
    again = [*command[:-2], "--new-map", "--replay", report]
    replayed = subprocess.run(again, check=False, capture_output=True, text=True)

    assert replayed.returncode == 1
    assert replayed.stdout.count("WAS NOTICED BEFORE") == 2
