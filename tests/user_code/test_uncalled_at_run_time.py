"""Classes whose base the source names under a condition: what nobody calls is found when they are loaded."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from pipeline import GeneralTrainer
from pipeline.check.checker import check
from pipeline.errors import PipelineError

HEAD = """\
import torch
try:
    from pipeline import {name} as Base
except ImportError:
    from fallback import {name} as Base
"""
TRAINER = "class Trainer(Base):\n    def startup(self, context): pass\n"
BRAIN = """\
class Model(Base):
    def __init__(self): super().__init__({"net": torch.nn.Linear(1, 1)})
    def compute_forward(self, batch, stage): return self.modules.net(batch[0])
    def compute_objectives(self, predictions, batch, stage): return predictions.mean()
    def _fit_valid(self, valid_set, epoch, enable): pass
"""
UPDATER = """\
class Updater(Base):
    def read_batch(self): return None
"""
PLACES = {
    "GeneralTrainer": (TRAINER, ["runner.train_runner.trainer_class=P"], "Trainer.startup"),
    "Brain": (BRAIN, ["phase.line.model=P", "phase.line.model_args={}", "phase.line.loss=null"], "Model._fit_valid"),
    "StandardUpdater": (
        UPDATER,
        [
            "phase.line.updater={class_path: P}",
            "phase.line.loss=null",
            "phase.line.model=Q",
            "phase.line.model_args={}",
        ],
        "Updater.read_batch",
    ),
}
OWN_LOSS = """\
class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def forward(self, x, y): return (self.net(x) - y).square().mean()
"""


@pytest.mark.parametrize("name", PLACES)
def test_uncalled_method_of_a_conditional_base_is_refused(linear: Path, name: str) -> None:
    source, overrides, method = PLACES[name]
    (linear.parent / "own.py").write_text(HEAD.format(name=name) + source + OWN_LOSS, encoding="utf-8")
    path = f"'{{workspace}}/own.py:{method.partition('.')[0]}'"
    overrides = [text.replace("=P", f"={path}").replace(": P", f": {path}") for text in overrides]
    overrides = [text.replace("=Q", "='{workspace}/own.py:Line'") for text in overrides]
    assert check(linear, overrides) == []
    with pytest.raises(PipelineError, match=rf"{method} \(own.py:\d+\) is called by nobody"):
        GeneralTrainer(linear, overrides).run()


PLUGIN = """\
from pipeline import hookimpl

class Plugin:
    @hookimpl
    def before_epoch(self, context):
        context["model"]["line"]["brain"]._fit_valid(None, 0, True)
"""


@pytest.mark.parametrize("base", ["Base", "Brain"])
def test_method_that_a_plugin_calls_is_accepted(linear: Path, base: str) -> None:
    """The plugin is in another file, and the base is named under a condition, or plainly."""
    brain = BRAIN.replace("(Base)", f"({base})")
    head = HEAD.format(name="Brain") if base == "Base" else "import torch\nfrom pipeline import Brain\n"
    (linear.parent / "own.py").write_text(head + brain, encoding="utf-8")
    (linear.parent / "watch.py").write_text(PLUGIN, encoding="utf-8")
    overrides = [text.replace("=P", "='{workspace}/own.py:Model'") for text in PLACES["Brain"][1]]
    overrides += ["plugins=['{workspace}/watch.py']", "runner.train_runner.epochs=1"]
    assert GeneralTrainer(linear, overrides).run()["current_epoch"] == 0


def test_brain_of_a_conditional_base_is_refused_by_fit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    fit = "Model().fit(range(1), [(torch.ones(1, 1), torch.ones(1, 1))])\n"
    script.write_text(HEAD.format(name="Brain") + BRAIN + fit, encoding="utf-8")
    with pytest.raises(PipelineError, match=r"Model._fit_valid \(script.py:\d+\) is called by nobody"):
        runpy.run_path(str(script))


def test_trainer_that_is_defined_under_a_condition_is_refused(tmp_path: Path, linear: Path) -> None:
    script = tmp_path / "script.py"
    both = "if True:\n    class Mine(GeneralTrainer):\n        def startup(self, context): pass\n"
    both += "else:\n    class Mine(GeneralTrainer):\n        def runner(self, context): pass\n"
    script.write_text(f"from pipeline import GeneralTrainer\n{both}Mine({str(linear)!r})\n", encoding="utf-8")
    with pytest.raises(PipelineError, match=r"Mine.startup \(script.py:4\) is called by nobody"):
        runpy.run_path(str(script))
