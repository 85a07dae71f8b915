"""The types of the context are those of its table; ``python tests/test_context_types.py`` writes its overloads anew."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline import context
from pipeline.context import KEYS

FILE = Path(str(context.__file__))
REPOSITORY = Path(__file__).parents[1]
SAMPLES = sorted(REPOSITORY.glob("tests/typed_stages/*.py"))


def overloads(method: str) -> Iterator[str]:
    """The overloads of ``__getitem__`` or ``get``: one for the keys of each type, and one for those of a workspace.

    ``get`` has those of the keys that may be missing: the trainer writes the others before the first stage.
    """
    default, missing = (", default: D = ...", " | D") if method == "get" else ("", "")
    keys = [key for key in KEYS if method != "get" or key.writer != "trainer" or key.name == "error"]
    for kind in dict.fromkeys(key.type for key in keys):
        names = ", ".join(f'"{key.name}"' for key in keys if key.type == kind)
        optional = " | None" if kind.endswith(" | None") else ""
        value = f"{kind.removesuffix(optional)}{missing}{optional}"
        yield f"@overload\ndef {method}(self, key: Literal[{names}]{default}) -> {value}: ..."
    default = ", default: Any = None" if method == "get" else ""
    yield f"@overload\ndef {method}(self, key: Own{default}) -> Any: ..."


def with_overloads(source: str) -> str:
    """The source of context.py, formatted, with the overloads of the table before the methods."""
    for method in ("__getitem__", "get"):
        before, body = source.split(f"\n    def {method}(self, key: str", 1)
        if before.endswith("...\n"):
            before = before[: before.rindex("    if TYPE_CHECKING:\n")]
        block = "\n".join(overloads(method)).replace("\n", "\n        ")
        source = f"{before}    if TYPE_CHECKING:\n        {block}\n\n    def {method}(self, key: str{body}"
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def test_the_overloads_are_those_of_the_table() -> None:
    source = FILE.read_text(encoding="utf-8")
    assert source == with_overloads(source), "run `python tests/test_context_types.py` to write them anew"


def test_the_samples_say_the_type_of_every_key() -> None:
    sample = (REPOSITORY / "tests/typed_stages/keys.py").read_text(encoding="utf-8")
    assert set(re.findall(r'assert_type\(context\["(\w+)"\]', sample)) == {key.name for key in KEYS} | {"tree"}


Place = tuple[str, int]
Tool = Callable[[Path], set[Place]]


def mypy(cache: Path) -> set[Place]:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}"]
    command += ["--explicit-package-bases", "--follow-imports=silent", *map(str, SAMPLES)]
    path = {"MYPYPATH": str(REPOSITORY)}
    said = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=False).stdout
    return {(Path(file).name, int(line)) for file, line in re.findall(r"(\S+):(\d+): error", said)}


def pyright(_: Path) -> set[Place]:
    command = [sys.executable, "-m", "pyright", "--outputjson", f"--pythonpath={sys.executable}", *map(str, SAMPLES)]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    return {
        (Path(fault["file"]).name, fault["range"]["start"]["line"] + 1)
        for fault in json.loads(said)["generalDiagnostics"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("tool", [mypy, pyright])
def test_static_tools_know_the_types_that_users_see(tool: Tool, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    # Its cache is kept, since torch takes it ten seconds.
    kept = getattr(pytestconfig, "cache", None)
    wrong = {
        (file.name, number)
        for file in SAMPLES
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if line.endswith("# error")
    }
    assert tool(kept.mkdir("mypy") if kept else tmp_path) == wrong


if __name__ == "__main__":
    FILE.write_text(with_overloads(FILE.read_text(encoding="utf-8")), encoding="utf-8")
