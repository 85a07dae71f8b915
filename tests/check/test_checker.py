"""Every fault of a config, from source alone: wrong classes, wrong arguments, and phases that do not hold together."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from example_needs import runnable_examples

from pipeline import GeneralTrainer, testing
from pipeline.check.checker import check
from pipeline.errors import ConfigError
from pipeline.stages.startup import Startup
from pipeline.user_code.plugins import offered
from pipeline.workspaces import package_name

Workspace = Callable[..., Path]

EXAMPLES = [folder / "config.yaml" for folder in runnable_examples("**/config.yaml")]
STAGE = "from pipeline import StartupBase, stages\nclass Startup(StartupBase):\n    def startup(self, context): pass\n"
RUNNER = "runner.train_runner"
LATER = "  - {name: later, class: infer, device: cpu, startup_class_path: 'nowhere_at.all:S'}\nphase:\n"


@contextmanager
def unprivileged() -> Iterator[None]:
    """A block in which root, who may read everything, is somebody else."""
    own = os.geteuid()
    try:
        if own == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(own)


def messages(config: Path, *overrides: str) -> list[str]:
    return [f"{fault.address}: {fault.message}" for fault in check(config, overrides)]


def with_startup(config: Path, text: str, path: str = "{workspace}/startup.py", arguments: str = "{}") -> list[str]:
    """What is wrong when the startup stage is the class in ``text``."""
    (config.parent / "startup.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return messages(config, f"{RUNNER}.startup_class_path='{path}'", f"{RUNNER}.startup_args={arguments}")


@pytest.mark.slow
@pytest.mark.parametrize("config", EXAMPLES, ids=[each.parent.name for each in EXAMPLES])
def test_an_example_has_no_faults(config: Path) -> None:
    assert check(config) == []


PATHS = [
    ("{workspace}/zz.py", "no such file: {ws}/zz.py; known: data.py, startup.py"),
    ("{workspace}", "'workspace' is not a .py file"),
    ("{workspace}/../startup.py", "no such file: {up}/startup.py; there is no .py file there"),
    (
        "{workspace}/startup.py:Q",
        "startup.py defines no 'Q'; it defines Startup; write ':Startup' after the file, or name",
    ),
    ("{workspace}/startup.py:A.B", "'A.B' is no class name; write '{workspace}/startup.py:Name'"),
    (
        "{workspace}/data.py:Line",
        "Line does not derive from pipeline.stages.base:StartupBase; write `class Line(StartupBase)`",
    ),
    ("startup", "'startup' is no class path; write '{workspace}/file.py', '{workspace}/file.py:Name' or"),
    ("pipeline.stages.startup:A.B", "'pipeline.stages.startup:A.B' is no class path; write"),
    ("torch.nn:Linaer", "torch.nn has no 'Linaer'; did you mean 'Linear'?"),
    ("torch.nn:Linear", "Linear does not derive from pipeline.stages.base:StartupBase; write"),
    ("json:loads", "'json:loads' is a function, not a class; name a subclass of pipeline.stages.base:StartupBase"),
    ("pipeline:StartupBase", "StartupBase does not define startup; define it, spelt exactly so"),
    ("pipeline.stages.runner:Runner", "Runner does not derive from pipeline.stages.base:StartupBase; write"),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("path", "message"), PATHS)
def test_a_wrong_class_path_is_a_fault_that_says_what_to_do(linear: Path, path: str, message: str) -> None:
    expected = message.replace("{ws}", str(linear.parent)).replace("{up}", str(linear.parents[1]))
    (found,) = with_startup(linear, STAGE, path)
    assert found.startswith(f"{RUNNER}.startup_class_path: ")
    assert expected in found


FILES = [
    ("class Strtup: pass", "startup.py defines no 'Startup'; it defines Strtup; did you mean 'Strtup'?"),
    ("", "startup.py defines no 'Startup'; it defines no class; define Startup in it"),
    (STAGE.replace("StartupBase", "RunnerBase"), "Startup does not derive from pipeline.stages.base:StartupBase"),
    ("from .data import Line as Startup", "Line does not derive from pipeline.stages.base:StartupBase; write"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_file_without_the_class_is_a_fault_that_says_what_to_do(linear: Path, text: str, message: str) -> None:
    (found,) = with_startup(linear, text)
    assert message.replace("{ws}", str(linear.parent)) in found


def test_a_file_that_is_no_text_is_a_fault(linear: Path) -> None:
    (linear.parent / "latin.py").write_bytes(f"{STAGE}# one\n# \xe9".encode("latin-1"))
    (found,) = with_startup(linear, STAGE, "{workspace}/latin.py")
    assert f"{linear.parent}/latin.py: 'utf-8' codec can't decode byte 0xe9" in found
    assert found.endswith("; mend the file")


INIT = "    def __init__(self, context, path, *, part='all'): pass\n"
ARGUMENTS = [
    (STAGE + INIT, "{pth: 1}", ["startup_args.pth: Startup has no argument 'pth'; did you mean 'path'?",
                                "startup_args: Startup needs the argument path; add it"]),
    (STAGE + INIT, "{path: 1, zz: 2}", ["startup_args.zz: Startup has no argument 'zz'; known: part, path"]),
    (STAGE + INIT, "{path: 1, context: 2}", ["startup_args.context: Startup has no argument 'context'; known: part, path"]),
    (STAGE + INIT.replace("part='all'", "part"), "{}", ["startup_args: Startup needs the arguments path, part; add them"]),
    (STAGE + INIT, "{path: 1, part: x}", []),
    (STAGE + "    def __init__(self, context, **others): pass", "{anything: 1}", []),
    (STAGE + "    def __init__(self, *args, path): pass", "{path: 1}", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arguments", "expected"), ARGUMENTS)
def test_the_arguments_of_a_stage_are_held_against_its_signature(
    linear: Path, text: str, arguments: str, expected: list[str]
) -> None:
    assert with_startup(linear, text, arguments=arguments) == [f"{RUNNER}.{each}" for each in expected]


def test_a_default_stage_takes_no_arguments(linear: Path) -> None:
    expected = f"{RUNNER}.terminal_args.best: Terminal has no argument 'best'; it takes no arguments"
    assert messages(linear, f"{RUNNER}.terminal_args={{best: true}}") == [expected]


def test_nothing_of_the_users_is_imported(linear: Path) -> None:
    canary = f"open({str(linear.parent / 'canary')!r}, 'w').close()\n"
    for name in ("startup", "data", "plugin", "__init__"):
        file = linear.parent / f"{name}.py"
        file.write_text(canary + (file.read_text() if file.exists() else STAGE))
    assert messages(linear, f"{RUNNER}.startup_class_path={{workspace}}/startup.py") == []
    assert not (linear.parent / "canary").exists()
    package = package_name(linear.parent)
    assert not [name for name in sys.modules if name.startswith(package)]


def test_a_fault_points_at_its_line(linear: Path) -> None:
    linear.write_text(linear.read_text().replace("{size: 24}", "{sise: 24}"))
    first = next(fault for fault in check(linear) if "no argument" in fault.message)
    assert "args: {sise: 24}" in first.source
    assert str(first).splitlines()[1][first.column + 3 :].startswith("sise")
    assert f"{linear}:{first.line}:{first.column}: dataset.train_data.args.sise: Line has no argument 'sise'" in str(
        first
    )


def test_all_faults_are_reported_at_once_and_nothing_is_run(linear: Path) -> None:
    overrides = [f"{RUNNER}.startup_class_path={{workspace}}/s.py", f"{RUNNER}.epoch=2", "phase.line.loss=torch.nn.Lss"]
    with pytest.raises(ConfigError) as caught:
        GeneralTrainer(linear, overrides=overrides)
    assert {fault.address for fault in caught.value.faults} == {
        f"{RUNNER}.epoch",
        f"{RUNNER}.startup_class_path",
        "phase.line.loss",
    }
    assert not Path("runs").exists()


def test_every_runner_of_mode_is_checked_and_no_other(linear: Path) -> None:
    linear.write_text(linear.read_text().replace("phase:\n", LATER, 1))
    assert any(each.startswith("runner.later.startup_class_path: ") for each in messages(linear))
    assert messages(linear, "mode=train_runner") == []


MODEL = """
    from pipeline import Brain
    from torch import nn
    class Model(Brain):
        def __init__(self, width, depth=2): super().__init__()
        def compute_forward(self, batch, stage): pass
        def compute_objectives(self, predictions, batch, stage): pass
    class Plain(nn.Module): pass
    class Nothing: pass
    def make(width): pass
"""
OURS = ["phase.line.model={workspace}/model.py", "phase.line.model_args={width: 1}"]
PHASES: list[tuple[list[str], list[str]]] = [
    (["phase.line.model=null"], ["phase.line.model: required key is missing; add `model:`, the class of the model"]),
    (["phase.line.model=torch.nn.Linaer"], ["phase.line.model: 'torch.nn.Linaer': torch.nn has no 'Linaer'; did you mean 'Linear'?"]),
    (["phase.line.model_args={in_featurs: 1, out_features: 1}"],
     ["phase.line.model_args.in_featurs: Linear has no argument 'in_featurs'; did you mean 'in_features'?",
      "phase.line.model_args: Linear needs the argument in_features; add it"]),
    (["phase.line.model_args={in_features: 1}", "+hyper_parameters.out_features=1"], []),
    (["phase.line.loss=null"], ["phase.line.loss: required key is missing; Linear is a plain module: add `loss: torch.nn.functional.…`, or `loss: model` if it returns its own"]),
    (["phase.line.loss=torch.nn.functional.mse_los"],
     ["phase.line.loss: 'torch.nn.functional.mse_los': torch.nn.functional has no 'mse_los'; did you mean 'mse_loss'?"]),
    (["phase.line.loss=torch.nn.MSELoss"], []),
    (OURS, ["phase.line.loss: would be ignored: Model is a Brain and computes its own; remove it"]),
    ([*OURS, "phase.line.loss=null"], []),
    ([*OURS, "phase.line.loss=null", "phase.line.model_args={}"], ["phase.line.model_args: Model needs the argument width; add it"]),
    ([*OURS, "phase.line.loss=null", "phase.line.model_args={}", "+hyper_parameters.width=3"], []),
    (["phase.line.model={workspace}/model.py:Plain", "phase.line.model_args={}"], []),
    (["phase.line.model={workspace}/model.py:Nothing", "phase.line.model_args={}"],
     ["phase.line.model: Nothing is neither a torch.nn.Module nor a Brain; write `class Nothing(torch.nn.Module)`"]),
    (["phase.line.model={workspace}/model.py:make", "phase.line.model_args={widht: 1}"],
     ["phase.line.model_args.widht: make has no argument 'widht'; did you mean 'width'?",
      "phase.line.model_args: make needs the argument width; add it"]),
    (["phase.line.dataset_name=train_dat"],
     ["phase.line.dataset_name: there is no dataset 'train_dat'; did you mean 'train_data'?"]),
    (["phase.line.dataset_name=null"], ["phase.line.dataset_name: required key is missing; add `dataset_name:`, one of `dataset:`"]),
    (["phase.line.valid_dataset_name=valid"], ["phase.line.valid_dataset_name: there is no dataset 'valid'; there are train_data"]),
    (["dataset.train_data.args={sise: 1}"],
     ["dataset.train_data.args.sise: Line has no argument 'sise'; did you mean 'size'?",
      "dataset.train_data.args: Line needs the argument size; add it"]),
    (["dataset.train_data.collate_fn={workspace}/data.py:Lime"],
     ["dataset.train_data.collate_fn: '{ws}/data.py:Lime': data.py defines no 'Lime'; it defines Line; did you mean 'Line'?"]),
    (["phase.line.metrics={a: {class: AUCC}}"],
     ["phase.line.metrics.a.class: 'AUCC': pipeline.metrics has no 'AUCC'; did you mean 'AUC'?"]),
    (["phase.line.metrics={a: {class: LogLoss, args: {from_logit: true}}}"],
     ["phase.line.metrics.a.args.from_logit: LogLoss has no argument 'from_logit'; did you mean 'from_logits'?"]),
    (["phase.line.metrics={a: {class: Accuracy, args: {top: 1}}}"],
     ["phase.line.metrics.a.args.top: Accuracy has no argument 'top'; it takes no arguments"]),
    (["phase.line.metrics={a: {}}"], ["phase.line.metrics.a: has no class; write {class: AUC} or {class: …, args: {…}}"]),
    (["phase.line.metrics={a: {class: AUC, arsg: {}}}"], ["phase.line.metrics.a.arsg: unknown key; did you mean 'args'?"]),
    (["phase.line.metrics={a: {class: 3}}"],
     ["phase.line.metrics.a.class: is 3; write the name of a class in pipeline.metrics, or a class path"]),
    (["hyper_parameters.optimizer.class=SDG"], ["hyper_parameters.optimizer.class: 'SDG': torch.optim has no 'SDG'; did you mean 'SGD'?"]),
    (["hyper_parameters.optimizer.class=3"],
     ["hyper_parameters.optimizer.class: is 3; write the name of a class in torch.optim, or a class path"]),
    (["hyper_parameters.optimizer.class=ADAM"], []),
    (["hyper_parameters.optimizer.class=torch.optim.AdamW"], []),
    (["hyper_parameters.optimizer.momentm=0.9"],
     ["hyper_parameters.optimizer.momentm: SGD has no argument 'momentm'; did you mean 'momentum'?"]),
    (["hyper_parameters.optimizer={class: SGD, learning_rate: 0.1, lr: 0.2}"],
     ["hyper_parameters.optimizer.lr: means the same as 'learning_rate', which is set too; keep one"]),
    (["hyper_parameters={}"],
     ["hyper_parameters.optimizer: training needs an optimizer; add `optimizer: {class: Adam, lr: 0.001}` to hyper_parameters"]),
    (["hyper_parameters.optimizer=Adam"],
     ["hyper_parameters.optimizer: is 'Adam', a string; write a mapping, such as {class: Adam, lr: 0.001}"]),
    (["hyper_parameters.optimizer={name: Adam}"],
     ["hyper_parameters.optimizer: has no key `class`, which names the optimizer; add it, as in {class: Adam, lr: 0.001}"]),
]  # fmt: skip


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(("overrides", "expected"), PHASES)
def test_a_phase_has_to_hold_together(linear: Path, overrides: list[str], expected: list[str]) -> None:
    (linear.parent / "model.py").write_text(textwrap.dedent(MODEL))
    assert messages(linear, *overrides) == [each.replace("{ws}", str(linear.parent)) for each in expected]


INFER = [f"{RUNNER}.class=infer", f"{RUNNER}.epochs=null"]
NO_WEIGHTS = f"{RUNNER}: has no weights to evaluate; add `init_model_path:`, or name a train runner before it in `mode`"
RUNNERS: list[tuple[list[str], list[str]]] = [
    ([f"{RUNNER}.epochs=null"], [f"{RUNNER}: does not say how long to train; add `epochs:` or `max_steps:`"]),
    ([f"{RUNNER}.epochs=null", f"{RUNNER}.max_steps=3"], []),
    ([f"{RUNNER}.write_predictions=true"],
     [f"{RUNNER}.predictions: would be ignored: a train runner writes no predictions; remove it"]),
    ([*INFER, f"{RUNNER}.grad_clip=3", f"{RUNNER}.init_model_path={{workspace}}/weights.safetensors"],
     [f"{RUNNER}.grad_clip: would be ignored: an infer runner makes one pass; remove it"]),
    (["dataset.train_data.timeout=5"],
     ["dataset.train_data.timeout: would be ignored: there are no workers; remove it, or set num_workers"]),
    (["dataset.train_data.multiprocessing_context=spawn"],
     [("dataset.train_data.multiprocessing_context: would be ignored: there are no workers; "
       "remove it, or set num_workers")]),
    (["output_dir={ws}/own.py/runs"],
     ["output_dir: '{ws}/own.py/runs' lies below {ws}/own.py, which is a file; name a folder"]),
    (["output_dir={ws}/own.py"], ["output_dir: '{ws}/own.py' is a file; name a folder"]),
    (["output_dir={ws}/new/runs", f"{RUNNER}.save_checkpoint_path={{ws}}/new"], []),
    ([f"{RUNNER}.save_checkpoint_path={{workspace}}/own.py/a/b"],
     [f"{RUNNER}.save_checkpoint_path: '{{ws}}/own.py/a/b' lies below {{ws}}/own.py, which is a file; name a folder"]),
    ([f"{RUNNER}.save_inference_interval=1", f"{RUNNER}.save_inference_path={{workspace}}/own.py"],
     [f"{RUNNER}.save_inference_path: '{{ws}}/own.py' is a file; name a folder"]),
    (INFER, [NO_WEIGHTS]),
    ([f"{RUNNER}.init_model_path={{workspace}}/gone.safetensors"],
     [f"{RUNNER}.init_model_path: no such checkpoint: {{ws}}/gone.safetensors; check the path"]),
    ([f"{RUNNER}.init_model_path={{workspace}}/gone.safetensors", f"{RUNNER}.startup_class_path={{workspace}}/own.py"], []),
    ([*INFER, f"{RUNNER}.init_model_path={{workspace}}/weights.safetensors", "hyper_parameters={}"], []),
    ([*INFER, f"{RUNNER}.epochs=2", f"{RUNNER}.init_model_path={{workspace}}/weights.safetensors"],
     [f"{RUNNER}.epochs: would be ignored: an infer runner makes one pass; remove it"]),
    ([*INFER, f"{RUNNER}.startup_class_path={{workspace}}/own.py"], []),
    ([f"{RUNNER}.phases=[lime]"], [f"{RUNNER}.phases: there is no phase 'lime'; did you mean 'line'?"]),
    (["mode=[train_runer]"], ["mode: there is no runner 'train_runer'; did you mean 'train_runner'?"]),
    ([f"{RUNNER}.trainer_class={{workspace}}/own.py:Startup"],
     [(f"{RUNNER}.trainer_class: '{{ws}}/own.py:Startup': Startup does not derive from pipeline.trainer:GeneralTrainer; "
      "write `class Startup(GeneralTrainer)` in own.py:2, in the place of StartupBase")]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), RUNNERS)
def test_a_runner_has_what_its_class_needs(linear: Path, overrides: list[str], expected: list[str]) -> None:
    (linear.parent / "own.py").write_text(STAGE)
    (linear.parent / "weights.safetensors").touch()
    given = [each.replace("{ws}", str(linear.parent)) for each in overrides]
    assert messages(linear, *given) == [each.replace("{ws}", str(linear.parent)) for each in expected]


def own_stages(names: Sequence[str]) -> str:
    methods = {"network": "build_network", "runner": "run"}
    classes = [
        f"{name.capitalize()}(pipeline.{name.capitalize()}Base):\n    def {methods[name]}(self, c): pass"
        for name in names
    ]
    return "\n".join(["import pipeline", *(f"class {each}" for each in classes)])


@pytest.mark.parametrize(
    ("replaced", "needy"),
    [
        (["network", "runner"], None),
        (["network"], "runner needs"),
        (["runner"], "network needs"),
        ([], "network and runner need"),
    ],
)
def test_a_phase_is_needed_unless_network_and_runner_are_replaced(
    workspace: Workspace, replaced: list[str], needy: str | None
) -> None:
    folder = workspace({"own.py": own_stages(replaced)})
    paths = {f"{name}_class_path": "{workspace}/own.py" for name in replaced}
    runner = {"name": "r", "class": "train", "device": "cpu", "epochs": 1, **paths}
    faults = [fault.message for fault in check({"workspace": str(folder), "runner": [runner]})]
    # That a stage leaves out what the next one reads is another fault.
    own = [each.split(";")[0] for each in faults if " reads context[" not in each]
    assert own == ([f"the default {needy} a phase"] if needy else [])


def test_a_class_from_python_is_left_to_the_trainer(linear: Path) -> None:
    config = {
        "runner": [{"name": "r", "class": "train", "epochs": 1, "startup_class_path": Startup, "network_class_path": 3}]
    }
    faults = [fault.address for fault in check(config)]
    assert "runner.r.network_class_path" in faults
    assert "runner.r.startup_class_path" not in faults


LEGAL_STAGES = [
    STAGE,
    "import pipeline\nclass Startup(pipeline.StartupBase):\n    def startup(self, context): pass",
    "from pipeline.stages.base import StartupBase as B\nclass Startup(B):\n    def startup(self, context): pass",
    "import pipeline.stages.base as b\nclass Startup(b.StartupBase):\n    def startup(self, context): pass",
    "from pipeline import stages\nclass Startup(stages.Startup): pass",
    "from pipeline.stages import Startup as Default\nclass Startup(Default): pass",
    "from pipeline.stages.startup import Startup",
    "from pipeline.stages.startup import Startup\nclass Startup(Startup): pass",
    "from pipeline.stages.startup import *",
    "from .lib import Startup",
    "from .lib import *",
    "from .lib import Base\nclass Startup(Base): pass",
    "from . import lib\nclass Startup(lib.Base): pass",
    "from .lib import make\nStartup = make()",
    "from .lib import mark, Base\n@mark\nclass Startup(Base): pass",
    "from .lib import Mixin\nfrom pipeline import stages\nclass Startup(Mixin, stages.Startup): pass",
    "from .lib import Logging\nfrom pipeline import stages\nclass Startup(Logging, stages.Startup): pass",
    ("from typing import Generic, TypeVar\nfrom pipeline import StartupBase\nT = TypeVar('T')\n"
    "class Base(StartupBase, Generic[T]):\n    def startup(self, context): pass\nclass Startup(Base[int]): pass"),
    "try:\n    import nowhere_at_all\nexcept ImportError:\n    nowhere_at_all = None\nfrom .lib import Startup",
    "try:\n    from nowhere_at_all import Base\nexcept ImportError:\n    from .lib import Base\nclass Startup(Base): pass",
    "import sys\nfrom .lib import Base\nif sys.platform == 'none':\n    class Startup: pass\nelse:\n    class Startup(Base): pass",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\nfrom .lib import Startup",
    "from pipeline import StartupBase\nclass Startup(StartupBase):\n    import os\n    startup = lambda self, context: None",
    "from pipeline import StartupBase\nclass Startup(StartupBase):\n    @staticmethod\n    def startup(context): pass",
    "from .lib import Base\nglobals()['Startup'] = type('Startup', (Base,), {})",
    "from .lib import Base\nfor Startup in [Base]: pass",
    "import importlib\nStartup = importlib.import_module('pipeline.stages.startup').Startup",
    "from .lib import Base\nStartup = type('Startup', (Base,), {})",
    "def __getattr__(name):\n    from .lib import Base\n    if name == 'Startup': return Base\n    raise AttributeError(name)",
    "from abc import ABC\nfrom pipeline import StartupBase\nclass Startup(StartupBase, ABC):\n    def startup(self, context): pass",
    ("from pipeline import StartupBase\nclass Startup(StartupBase):\n    def __init__(self, context, *, a=1): pass\n"
    "    def startup(self, context, **more): pass"),
    ("from dataclasses import dataclass\nfrom typing import Any\nfrom pipeline import StartupBase\n@dataclass\n"
    "class Startup(StartupBase):\n    context: Any\n    def startup(self, context): pass"),
    "from .lib import Meta, Base\nclass Startup(Base, metaclass=Meta): pass",
]  # fmt: skip
LIB = """
    from abc import ABCMeta
    from pipeline import StartupBase
    class Meta(ABCMeta): pass
    class Base(StartupBase):
        def startup(self, context): pass
    class Startup(Base): pass
    class Mixin:
        def startup(self, context): super().startup(context)
    class Logging(StartupBase):
        def log(self): pass
    def make(): return Startup
    def mark(cls): return cls
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", LEGAL_STAGES)
def test_a_stage_that_runs_has_no_faults(linear: Path, text: str) -> None:
    (linear.parent / "lib.py").write_text(textwrap.dedent(LIB))
    assert with_startup(linear, text) == []
    override = f"{RUNNER}.startup_class_path={{workspace}}/startup.py"
    GeneralTrainer(linear, overrides=[override, f"{RUNNER}.max_steps=1", "phase.line.valid_dataset_name=null"]).run()


LEGAL_MODELS = [
    "from torch import nn\nclass Model(nn.Linear):\n    pass",
    "from torch import nn\nclass Model(nn.Sequential):\n    def __init__(self, in_features, **others): super().__init__(nn.Linear(1, 1))",
    "from torch.nn import Linear as Model",
    "import torch\nclass Model(torch.nn.modules.linear.Linear): pass",
    "from torch import nn\ndef Model(in_features, out_features=1): return nn.Linear(in_features, out_features)",
    "import functools\nfrom torch import nn\nModel = functools.partial(nn.Linear, bias=False)",
    "from torch import nn\nclass Own(nn.Module): pass\nclass Model(Own, nn.Linear): pass",
]  # fmt: skip


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("text", LEGAL_MODELS)
def test_a_model_that_runs_has_no_faults(linear: Path, text: str) -> None:
    (linear.parent / "model.py").write_text(text)
    overrides = ["phase.line.model={workspace}/model.py", f"{RUNNER}.max_steps=1"]
    assert messages(linear, *overrides) == []
    GeneralTrainer(linear, overrides=overrides).run()


SAMPLES = "    def __len__(self): return 8\n    def __getitem__(self, i): return torch.ones(1), torch.ones(1)\n"
LEGAL_DATASETS = [
    f"import torch\nclass Data:\n    def __init__(self, size): pass\n{SAMPLES}",
    f"import torch\nclass Data(torch.utils.data.Dataset):\n    def __init__(self, **args): pass\n{SAMPLES}",
    f"import torch\nfrom dataclasses import dataclass\n@dataclass\nclass Data:\n    size: int = 3\n{SAMPLES}",
    f"import torch\nfrom typing import NamedTuple\nclass Base:\n    def __init__(self, size=1): pass\nclass Data(Base):\n{SAMPLES}",
    "import torch\ndef Data(size): return torch.utils.data.TensorDataset(torch.ones(size, 1), torch.ones(size, 1))",
    ("import torch\nfrom torch.utils.data import IterableDataset\nclass Data(IterableDataset):\n    def __init__(self, size): pass\n"
    "    def __iter__(self): return iter([(torch.ones(1), torch.ones(1))] * 8)"),
]  # fmt: skip


@pytest.mark.parametrize("text", LEGAL_DATASETS)
def test_a_dataset_that_runs_has_no_faults(linear: Path, text: str) -> None:
    (linear.parent / "legal.py").write_text(text)
    overrides = ["dataset.train_data.class_path={workspace}/legal.py:Data", f"{RUNNER}.max_steps=1"]
    assert messages(linear, *overrides) == []
    GeneralTrainer(linear, overrides=overrides).run()


@pytest.mark.parametrize(
    "override",
    ["phase.line.loss={workspace}/sub/loss.py:square", "phase.line.metrics={m: {class: '{workspace}/sub/loss.py'}}",
     "phase.line.metrics={m: {class: '{workspace}/sub/loss.py:Metric'}}",
     "hyper_parameters.optimizer.class={workspace}/sub/loss.py:Slow"],
)  # fmt: skip
def test_loss_metric_and_optimizer_may_be_the_workspaces_own(linear: Path, override: str) -> None:
    (linear.parent / "sub").mkdir()
    (linear.parent / "sub/loss.py").write_text(
        "import torch\nfrom ..data import Line\nfrom pipeline.metrics import RMSE as Metric\n"
        "def square(a, b): return ((a - b) ** 2).mean()\nclass Slow(torch.optim.SGD): pass\n"
    )
    assert messages(linear, override) == []
    GeneralTrainer(linear, overrides=[override, f"{RUNNER}.max_steps=1"]).run()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "from pipeline.stages.startup import Startup\nclass Mine(Startup): pass",
            "own.py only imports 'Startup', and derives Mine from it; write ':Mine' after the file, or ':Startup' if",
        ),
        (
            "from pipeline.stages.startup import Startup\nclass Startup(Startup): pass",
            None,
        ),
    ],
)
def test_a_file_that_derives_a_class_from_the_one_that_its_path_implies_must_say_which(
    linear: Path, text: str, message: str | None
) -> None:
    (linear.parent / "own.py").write_text(text)
    faults = check(linear, ["runner.train_runner.startup_class_path={workspace}/own.py"])
    assert [message in fault.message for fault in faults if message] == ([True] if message else [])
    assert check(linear, ["runner.train_runner.startup_class_path={workspace}/own.py:Startup"]) == []


def test_a_misspelt_model_argument_is_compared_with_those_that_hyper_parameters_fill_too(linear: Path) -> None:
    (linear.parent / "own.py").write_text("class Model:\n    def __init__(self, width): pass\n")
    overrides = ["phase.line.model={workspace}/own.py", "+hyper_parameters.width=3", "phase.line.model_args={widht: 4}"]
    found = [fault.message for fault in check(linear, overrides) if fault.address.endswith("widht")]
    assert found == ["Model has no argument 'widht'; did you mean 'width'?"]


@pytest.mark.parametrize("name", ["startup.py", "part.py"])
def test_a_file_that_may_not_be_read_is_a_fault(linear: Path, name: str) -> None:
    files = {"config.yaml": linear.read_text(), "data.py": (linear.parent / "data.py").read_text(),
             "startup.py": f"from .part import *\n{STAGE}", "part.py": ""}  # fmt: skip
    with unprivileged(), TemporaryDirectory() as folder:
        for file, text in files.items():
            Path(folder, file).write_text(text, encoding="utf-8")
            Path(folder, file).chmod(0 if file == name else 0o644)
        (found,) = messages(Path(folder, "config.yaml"), f"{RUNNER}.startup_class_path={{workspace}}/startup.py")
        assert found.endswith(f"startup.py': {folder}/{name}: cannot be read: Permission denied; make it readable")


def test_a_config_that_may_not_be_read_is_a_fault(linear: Path) -> None:
    text = linear.read_text()
    with unprivileged(), TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(text, encoding="utf-8")
        config.chmod(0)
        assert messages(config) == [": cannot be read: Permission denied; make it readable"]


@pytest.mark.parametrize(("section", "wrong"), [("runner", "runer"), ("dataset", "datasets"), ("phase", "phases")])
def test_of_a_section_whose_name_is_misspelt_all_faults_come_at_once(linear: Path, section: str, wrong: str) -> None:
    text = linear.read_text().replace("epochs: 2", "epochz: 2").replace("batch_size:", "batch_sise:")
    linear.write_text(text.replace("loss:", "los:").replace("{workspace}/model.py", "{workspace}/none.py"))
    expected = messages(linear)
    assert {f"{part}: unknown key" in " ".join(expected) for part in ("epochz", "batch_sise", "los")} == {True}
    linear.write_text(linear.read_text().replace(f"\n{section}:", f"\n{wrong}:"))
    assert sorted(messages(linear)) == sorted([*expected, f"{wrong}: unknown key; did you mean '{section}'?"])


RULE = """
def check(inspection):
    for runner in inspection.settings("runner").values():
        if runner["epochs"].value > {most}:
            runner["epochs"].fault("is more than we pay for; write {most}")
"""


@pytest.fixture
def install_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a package that offers a check: its source."""
    site = tmp_path / "site"

    def write(source: str) -> None:
        entries = "[pipeline.checks]\nbudget = house_rules:check\n"
        files = {"METADATA": "Metadata-Version: 2.1\nName: house-rules\nVersion: 1.0\n", "entry_points.txt": entries}
        testing.write_files(site, {f"house_rules-1.0.dist-info/{name}": text for name, text in files.items()})
        testing.write_files(site, {"house_rules.py": source})
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, "house_rules", raising=False)
        offered.cache_clear()

    yield write
    offered.cache_clear()


def test_a_package_may_check_a_config_too(linear: Path, install_check: Callable[[str], None]) -> None:
    install_check(RULE.format(most=1))
    [fault] = check(linear)
    assert "runner.train_runner.epochs: is more than we pay for; write 1" in str(fault)
    install_check(RULE.format(most=10))
    assert check(linear) == []


def test_what_such_a_check_raises_names_it(linear: Path, install_check: Callable[[str], None]) -> None:
    install_check("def check(inspection):\n    inspection.nothing_of_that_name\n")
    with pytest.raises(AttributeError) as raised:
        check(linear)
    assert raised.value.__notes__ == ["check budget of the entry-point group pipeline.checks"]
