"""What reaches the context past the stages: Brains, plugins, trainers, patches. What runs has no fault."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pipeline import Context, GeneralTrainer
from pipeline.check.checker import check
from pipeline.errors import ConfigError
from pipeline.run.session import RunnerSession
from pipeline.stages.startup import Startup

RUNNER = "runner.train_runner"
TERMINAL = (
    "from pipeline import TerminalBase\nclass Terminal(TerminalBase):\n    def terminal(self, context): context['x']\n"
)
BRAIN = """
import torch
from pipeline import Brain
class {name}(Brain):
    def __init__(self):
        super().__init__({{"line": torch.nn.Linear(1, 1)}})
    def compute_forward(self, batch, stage): return self.modules.line(batch[0])
    def compute_objectives(self, predictions, batch, stage):
        {does}
        return torch.nn.functional.mse_loss(predictions, batch[1])
"""
BIND = """
    def bind(self, phase, optim_schedulers, context, patience=0):
        super().bind(phase, optim_schedulers, context, patience)
        self.mine = context
"""
WRITES = "self._run_context['x'] = 1"
NETWORK = "from pipeline import stages\nclass Network(stages.Network):\n    def build_model(self, phase, context): return Mine()\n"
PLUGIN = "from pipeline import hookimpl\nclass Plugin:\n    @hookimpl\n    def {hook}(self, context): {does}\n"
MODEL = ["phase.line.model={workspace}/model.py", "phase.line.model_args={}", "phase.line.loss=null"]
PLUGINS = ["plugins=['{workspace}/plugin.py']"]
INSTANCE = "class Instance(InstanceBase):\n    def instance(self, context): pass\n"
Files = dict[str, str]

CASES: dict[str, tuple[Files, list[str]]] = {
    "a Brain writes": ({"model": BRAIN.format(name="Model", does=WRITES)}, MODEL),
    "a Brain keeps it": ({"model": BRAIN.format(name="Model", does="self.mine['x'] = 1") + BIND}, MODEL),
    "a base writes": ({"base": BRAIN.format(name="Base", does=WRITES), "model": "from .base import Base\nclass Model(Base): pass"}, MODEL),
    "a function makes it": ({"model": BRAIN.format(name="Mine", does=WRITES) + "def Model(): return Mine()"}, MODEL),
    "a network makes it": ({"network": BRAIN.format(name="Mine", does=WRITES) + NETWORK}, []),
    "a plugin writes": ({"plugin": PLUGIN.format(hook="after_epoch", does="context['x'] = 1")}, PLUGINS),
    "a plugin's key is not known": ({"plugin": PLUGIN.format(hook="after_epoch", does="context[chr(120)] = 1")}, PLUGINS),
    "a plugin keeps it": ({"plugin": PLUGIN.format(hook="before_pipeline", does="self.kept = context")
                           + "    @hookimpl\n    def after_epoch(self): self.kept['x'] = 1\n"}, PLUGINS),
    "a plugin's base writes": ({"plugin": PLUGIN.format(hook="after_epoch", does="context['x'] = 1").replace("Plugin", "Base")
                                + "class Plugin(Base): pass\n"}, PLUGINS),
    "a plugin jumps": ({"plugin": PLUGIN.format(hook="before_pipeline", does="context['is_exit'] = True"),
                        "runner": "from pipeline import RunnerBase\nclass Runner(RunnerBase):\n    def run(self, context): context['y']\n",
                        "terminal": TERMINAL.replace("context['x']", "pass")}, PLUGINS),
    "a file patches a default stage": ({"instance": "import pipeline.stages.startup as s\nfrom pipeline import InstanceBase\n"
                                        "s.Startup.startup = lambda self, context: context.update(x=1)\n" + INSTANCE}, []),
    "a file patches its neighbour": ({"startup": "from pipeline import StartupBase\nclass Startup(StartupBase):\n"
                                      "    def startup(self, context): pass\n",
                                      "instance": "from . import startup\nfrom pipeline import InstanceBase\n"
                                      "startup.Startup.startup = lambda self, context: context.update(x=1)\n" + INSTANCE}, []),
    "a trainer writes": ({"mine": "from pipeline import GeneralTrainer\nclass Trainer(GeneralTrainer):\n    def enter(self, stage, runner):\n"
                          "        runner.context['x'] = 1\n        return super().enter(stage, runner)\n"},
                         [f"{RUNNER}.trainer_class={{workspace}}/mine.py"]),
    "a default stage is called": ({"runner": "from pipeline import RunnerBase, stages\nclass Runner(RunnerBase):\n"
                                   "    def run(self, context): stages.Runner(context).run(context)\n",
                                   "terminal": TERMINAL.replace("'x'", "'metrics'")}, []),
    "our loop is called": ({"runner": "from pipeline import RunnerBase\nfrom pipeline.training.loop import TrainLoop\n"
                            "class Runner(RunnerBase):\n    def run(self, context): TrainLoop(context).run()\n",
                            "terminal": TERMINAL.replace("'x'", "'current_epoch'")}, []),
    "a subclass declares less than its base": ({"runner": "from pipeline import stages\nclass Runner(stages.Runner):\n    writes = ('y',)\n"
                                                "    def run(self, context):\n        super().run(context)\n        context['y'] = 1\n",
                                                "terminal": TERMINAL.replace("'x'", "'metrics'")}, []),
}  # fmt: skip


def overrides(config: Path, files: Files, more: list[str]) -> list[str]:
    """Write the files, and name those that are stages; the terminal stage reads ``x``."""
    files = {"terminal": TERMINAL, **files}
    for name, text in files.items():
        (config.parent / f"{name}.py").write_text(textwrap.dedent(text))
    stages = [each for each in files if each in {"instance", "network", "startup", "runner", "terminal"}]
    return [*(f"{RUNNER}.{each}_class_path={{workspace}}/{each}.py" for each in stages), *more]


@pytest.mark.parametrize(("files", "more"), CASES.values(), ids=CASES)
def test_what_somebody_else_writes_is_not_missing(
    linear: Path, monkeypatch: pytest.MonkeyPatch, files: Files, more: list[str]
) -> None:
    # One of the files patches our class, for this test alone.
    monkeypatch.setattr(Startup, "startup", Startup.startup)
    given = overrides(linear, files, more)
    assert check(linear, given) == []
    GeneralTrainer(linear, given).run()


@pytest.mark.parametrize(
    ("files", "more"),
    [
        ({}, []),
        ({"model": BRAIN.format(name="Model", does="pass")}, MODEL),
        ({"network": BRAIN.format(name="Mine", does="pass") + NETWORK}, []),
        ({"plugin": PLUGIN.format(hook="after_epoch", does="context['y'] = 1")}, PLUGINS),
        ({"instance": "import torch\nfrom pipeline import InstanceBase\ntorch.backends.cudnn.benchmark = True\n" + INSTANCE}, []),
    ],
)  # fmt: skip
def test_what_nobody_writes_is_missing(linear: Path, files: Files, more: list[str]) -> None:
    (fault,) = check(linear, overrides(linear, files, more))
    assert fault.message.startswith("terminal (terminal.py:3) reads context['x']; no earlier stage writes it")


class Own(GeneralTrainer):
    """A trainer of which the config knows nothing."""

    def enter(self, stage: str, runner: RunnerSession) -> bool:
        runner.context["x"] = 1
        return super().enter(stage, runner)


def test_a_trainer_of_the_users_own_is_not_held_to_the_defaults_order(linear: Path) -> None:
    given = overrides(linear, {}, [])
    with pytest.raises(ConfigError, match=r"reads context\['x'\]; no earlier stage writes it"):
        GeneralTrainer(linear, given)
    context: Context = Own(linear, given).run()
    assert context["x"] == 1
