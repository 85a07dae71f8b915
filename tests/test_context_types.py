"""The types of the context are those of its table; ``python tests/test_context_types.py`` writes its overloads anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline import context
from pipeline.context import KEYS

FILE = Path(str(context.__file__))


def overloads(method: str) -> Iterator[str]:
    """The overloads of ``__getitem__`` or ``get``: one for the keys of each type, and one for those of a workspace."""
    default, missing = (", default: D = ...", " | D") if method == "get" else ("", "")
    for kind in dict.fromkeys(key.type for key in KEYS):
        names = ", ".join(f'"{key.name}"' for key in KEYS if key.type == kind)
        optional = " | None" if kind.endswith(" | None") else ""
        value = f"{kind.removesuffix(optional)}{missing}{optional}"
        yield f"@overload\ndef {method}(self, key: Literal[{names}]{default}) -> {value}: ..."
    default = ", default: Any = None" if method == "get" else ""
    yield f"@overload\ndef {method}(self, key: str{default}) -> Any: ..."


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


if __name__ == "__main__":
    FILE.write_text(with_overloads(FILE.read_text(encoding="utf-8")), encoding="utf-8")
