"""Whether the ``updater`` of a phase can be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.check.checker import check

OWN = """\
from pipeline import UpdaterBase

class Updater(UpdaterBase):
    def __init__(self, brain, loader, rate: float = 0.5, *, steps: int): super().__init__()
    def update(self, batch): ...

class Simple(UpdaterBase):
    def update(self, batch): ...

class Nothing: ...
"""
FILE = "class_path: '{workspace}/own.py'"


def messages(config: Path, updater: str) -> list[str]:
    (config.parent / "own.py").write_text(OWN, encoding="utf-8")
    config.write_text(config.read_text(encoding="utf-8") + f"    updater: {updater}\n", encoding="utf-8")
    line = len(config.read_text(encoding="utf-8").splitlines())
    found = check(config)
    assert {fault.line for fault in found} <= {line}
    return [f"{fault.column}: {fault.address}: {fault.message}".replace(str(config.parent), "{ws}") for fault in found]


@pytest.mark.parametrize(
    "updater",
    [
        f"{{{FILE}, args: {{steps: 3}}}}",
        f"{{{FILE}, args: {{steps: 3, rate: 1}}}}",
        "{class_path: '{workspace}/own.py:Simple'}",
        "{class_path: pipeline.Updater}",
        "null",
    ],
)
def test_an_updater_that_can_be_built_is_no_fault(linear: Path, updater: str) -> None:
    assert messages(linear, updater) == []


@pytest.mark.parametrize(
    ("updater", "fault"),
    [
        (f"{{{FILE}, args: {{stesp: 3, steps: 1}}}}",
         "56: phase.line.updater.args.stesp: Updater has no argument 'stesp'; did you mean 'steps'?"),
        (f"{{{FILE}}}", "27: phase.line.updater.args: Updater needs the argument steps; add it"),
        (f"{{{FILE}, args: {{steps: 3, rate: high}}}}",
         "66: phase.line.updater.args.rate: Updater's argument rate is 'high', a string; write a number (own.py:4: rate: float)"),
        (f"{{{FILE}, args: {{steps: 3, brain: 1}}}}",
         "66: phase.line.updater.args.brain: an updater is given 'brain' where its constructor names it; take it out"),
        (f"{{{FILE}, args: {{steps: 3, model: 1}}}}",
         "66: phase.line.updater.args.model: an updater is given 'model' where its constructor names it; take it out"),
        ("{class_path: '{workspace}/own.py:Nothing'}", "27: phase.line.updater.class_path: '{ws}/own.py:Nothing': Nothing does not derive "
         "from pipeline.updater.updater:UpdaterBase; write `class Nothing(UpdaterBase)` in own.py:10"),
        ("{class_path: '{workspace}/own.py:Updatr'}", "27: phase.line.updater.class_path: '{ws}/own.py:Updatr': own.py defines no 'Updatr'; "
         "it defines Updater, Simple, Nothing; did you mean 'Updater'?"),
        ("{class_path: '{workspace}/own.py:Simple', arsg: {}}", "56: phase.line.updater.arsg: unknown key; did you mean 'args'?"),
        ("{args: {}}", "14: phase.line.updater.class_path: required key is missing; add `class_path:`"),
    ],
)  # fmt: skip
def test_an_updater_that_cannot_be_built_is_told(linear: Path, updater: str, fault: str) -> None:
    assert messages(linear, updater) == [fault]
