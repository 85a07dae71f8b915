"""Each stage can be replaced, alone or with others, and what the trainer owns survives any of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch

from pipeline import Context, GeneralTrainer
from pipeline.stages.base import METHODS
from tests.conftest import RUN_FILES

Workspace = Callable[..., Path]
STAGES = tuple(METHODS)
SIZES = {2: pytest.mark.slow, 3: pytest.mark.release, 4: pytest.mark.slow}
SUBSETS = [
    pytest.param(subset, marks=SIZES.get(size, ())) for size in range(6) for subset in combinations(STAGES, size)
]
"""None, each alone, and all are quick."""

SUBCLASSES = """
from pipeline import stages

class Instance(stages.Instance):
    def instance(self, context):
        super().instance(context)
        context["instance_ran"] = context.get("instance_ran", 0) + 1

class Network(stages.Network):
    def build_network(self, context):
        super().build_network(context)
        context["network_ran"] = context.get("network_ran", 0) + 1

class Startup(stages.Startup):
    def startup(self, context):
        super().startup(context)
        context["startup_ran"] = context.get("startup_ran", 0) + 1

class Runner(stages.Runner):
    def run(self, context):
        super().run(context)
        context["runner_ran"] = context.get("runner_ran", 0) + 1

class Terminal(stages.Terminal):
    def terminal(self, context):
        super().terminal(context)
        context["terminal_ran"] = context.get("terminal_ran", 0) + 1
"""

BASES = """
import torch
from pipeline import Brain, InstanceBase, NetworkBase, RunnerBase, StartupBase, TerminalBase, Updater, stages
from pipeline.optim.schedules import Constant
from .data import Line

class Instance(InstanceBase):
    def instance(self, context):
        torch.manual_seed(0)

class LineBrain(Brain):
    def __init__(self):
        super().__init__({"line": torch.nn.Linear(1, 1)})
    def compute_forward(self, batch, stage):
        return self.modules.line(batch[0])
    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.mse_loss(predictions, batch[1])

class Network(NetworkBase):
    def build_network(self, context):
        context["dataset"] = {"train_data": torch.utils.data.DataLoader(Line(24), batch_size=4)}
        brain = LineBrain()
        optim_schedulers = {"main": Constant("SGD", {"lr": 0.1}, brain.modules, grad_clip=None)}
        entry = {"model": brain, "brain": brain, "optim_schedulers": optim_schedulers, "updater": Updater(brain)}
        context["model"] = {"line": entry}

class Startup(StartupBase):
    def startup(self, context):
        self.load(context)

class Runner(RunnerBase):
    def run(self, context):
        entry = context["model"]["line"]
        # Bound by whoever knows the run.
        for epoch in range(2):
            context["current_epoch"] = epoch
            for batch in context["dataset"]["train_data"]:
                loss = entry["updater"].update(batch)
            context["metrics"] = {"line": {"loss": loss.item()}}

class Terminal(TerminalBase):
    def terminal(self, context):
        print(context["metrics"])
"""


def expected() -> dict[str, torch.Tensor]:
    """The weights that a plain loop finds."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 24).unsqueeze(1)
    for batch in [*x.split(4), *x.split(4)]:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), 3 * batch - 1).backward()
        optimizer.step()
    return dict(model.state_dict())


def weights(context: Context) -> list[torch.Tensor]:
    brain = context["model"]["line"]["brain"]
    return [parameter.detach() for parameter in brain.modules.parameters()]


def replaced(config: Path, code: str, stages: tuple[str, ...]) -> Context:
    """Run the config with some stages taken from a workspace file."""
    (config.parent / "own.py").write_text(code, encoding="utf-8")
    return GeneralTrainer(
        config, [f"runner.train_runner.{stage}_class_path={{workspace}}/own.py" for stage in stages]
    ).run()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_any_subset_of_stages_replaced_by_subclasses_trains_to_the_same_weights(
    linear: Path, subset: tuple[str, ...]
) -> None:
    context = replaced(linear, SUBCLASSES, subset)
    for found, wanted in zip(weights(context), expected().values(), strict=True):
        assert torch.equal(found, wanted)
    assert {stage: dict.get(context, f"{stage}_ran", 0) for stage in STAGES} == {
        each: each in subset for each in STAGES
    }
    run = Path("runs/workspace/latest")
    assert {each.name for each in run.iterdir()} == RUN_FILES | {"workspace", "train_runner"}
    assert json.loads((run / "status.json").read_text())["state"] == "done"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_knows_only_its_base_works_with_the_default_rest(linear: Path, stage: str) -> None:
    context = replaced(linear, BASES, (stage,))
    for found, wanted in zip(weights(context), expected().values(), strict=True):
        assert torch.equal(found, wanted)
    assert context["current_epoch"] == 1
    assert list(context["metrics"]) == ["line"]


def test_all_five_stages_that_know_only_their_bases_work_together(linear: Path) -> None:
    bind = 'entry["brain"].bind("line", entry["optim_schedulers"], context)'
    context = replaced(linear, BASES.replace("# Bound by whoever knows the run.", bind), STAGES)
    for found, wanted in zip(weights(context), expected().values(), strict=True):
        assert torch.equal(found, wanted)


SEED = """
    runner:
      - name: train_runner
        class: single_train
        epochs: 2
        device: cpu
        instance_class_path: "{workspace}/your_instance.py"
        network_class_path: "{workspace}/your_network.py"
        startup_class_path: "{workspace}/your_startup.py"
        runner_class_path: "{workspace}/your_runner.py"
        terminal_class_path: "{workspace}/your_terminal.py"
        print_interval: 1
"""


@pytest.fixture
def seed(workspace: Workspace) -> Path:
    """The config of the seed system, and five files that each hold one stage, which prints its name."""
    files = {"config.yaml": SEED}
    for stage, (_, method) in METHODS.items():
        name = stage.capitalize()
        files[f"your_{stage}.py"] = (
            f"from pipeline import {name}Base\nclass {name}({name}Base):\n"
            f"    def {method}(self, context):\n        print('{stage}', context['status'])\n"
        )
    return workspace(files) / "config.yaml"


def test_the_config_of_the_seed_runs_as_written_without_dataset_and_phase(
    seed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = GeneralTrainer(seed).run()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "instance uninit",
        "network network_pass",
        "startup startup_pass",
        "runner train_pass",
        "terminal terminal_pass",
    ]
    assert (context["is_infer"], context["phases"], context["env"]["dataset"]) == (False, [], [])


def test_one_file_may_hold_several_stages_under_names_of_their_own(linear: Path) -> None:
    code = SUBCLASSES.replace("class Startup(", "class Mine(")
    (linear.parent / "own.py").write_text(code, encoding="utf-8")
    paths = ["startup_class_path={workspace}/own.py:Mine", "terminal_class_path={workspace}/own.py"]
    context = GeneralTrainer(linear, [f"runner.train_runner.{path}" for path in paths]).run()
    assert (context["startup_ran"], context["terminal_ran"]) == (1, 1)


TDM = """
    import torch
    from pipeline import EngineMode, StartupBase

    class Startup(StartupBase):
        def __init__(self, context):
            pass

        def startup(self, context):
            if context["engine"] == EngineMode.SINGLE:
                if context["is_infer"]:
                    self.load_tree(context, 3.0)
                else:
                    self.load_tree(context, 2.0)
            context["status"] = "train_pass"

        def load_tree(self, context, value):
            for phase in context["phases"]:
                model = context["model"][phase["name"]]["model"]
                torch.nn.init.constant_(model.weight, context["hyper_parameters"]["tree"] * value)
"""


@pytest.mark.parametrize(("mode", "value"), [("train", 4.0), ("infer", 6.0)])
def test_a_startup_written_as_the_seeds_tree_example_gives_the_first_weights(
    linear: Path, mode: str, value: float
) -> None:
    (linear.parent / "startup.py").write_text(TDM.replace("\n    ", "\n"))
    budget = {"train": ["epochs=1", "grad_clip=1e-30"], "infer": ["epochs=null"]}[mode]
    settings = ["startup_class_path={workspace}/startup.py", f"class={mode}", *budget]
    overrides = ["+hyper_parameters.tree=2.0", *(f"runner.train_runner.{each}" for each in settings)]
    context = GeneralTrainer(linear, overrides).run()
    assert context["model"]["line"]["model"].weight.item() == value


def test_replaced_stages_of_a_train_runner_serve_an_infer_runner_too(linear: Path) -> None:
    infer = "      - {name: infer_runner, class: infer, device: cpu}\n"
    linear.write_text(linear.read_text().replace("phase:\n", f"{infer.replace('      -', '  -')}phase:\n"))
    (linear.parent / "own.py").write_text(BASES, encoding="utf-8")
    trainer = GeneralTrainer(linear, ["runner.train_runner.instance_class_path={workspace}/own.py"])
    trainer.run()
    trained, judged = (trainer.contexts[name]["metrics"]["line"] for name in ("train_runner", "infer_runner"))
    assert judged["loss"] == trained["valid_loss"]


# The classes that PaddleRec's page on stages of one's own shows, with its signatures; what was paddle's is torch's.
PADDLEREC = """
import time
import torch
from pipeline import (
    Brain, EngineMode, InstanceBase, NetworkBase, RunnerBase, StartupBase, TerminalBase, Updater,
)
from pipeline.optim.schedules import Constant
from .data import Line

class Instance(InstanceBase):
    def __init__(self, context):
        pass

    def instance(self, context):
        torch.manual_seed(0)
        context["status"] = "network_pass"

class Model(Brain):
    def __init__(self):
        super().__init__({"line": torch.nn.Linear(1, 1)})

    def compute_forward(self, batch, stage):
        return self.modules.line(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.mse_loss(predictions, batch[1])

class Network(NetworkBase):
    def __init__(self, context):
        pass

    def build_network(self, context):
        context["model"], context["dataset"] = {}, {}
        for model_dict in context["env"]["phase"]:
            context["dataset"][model_dict["dataset_name"]] = torch.utils.data.DataLoader(Line(24), batch_size=4)
            model = Model()
            context["model"][model_dict["name"]] = {}
            context["model"][model_dict["name"]]["model"] = model
            context["model"][model_dict["name"]]["brain"] = model
            context["model"][model_dict["name"]]["optim_schedulers"] = {
                "main": Constant("SGD", {"lr": 0.1}, model.modules, grad_clip=None)
            }
            context["model"][model_dict["name"]]["updater"] = Updater(model)
        context["status"] = "startup_pass"

class Startup(StartupBase):
    def __init__(self, context):
        pass

    def startup(self, context):
        if context["engine"] == EngineMode.SINGLE:
            self._single_startup(context)
        else:
            self._cluster_startup(context)
        context["status"] = "train_pass"

    def _single_startup(self, context):
        self.load(context)

    def _cluster_startup(self, context):
        self.load(context, is_fleet=True, main_program=None)

class Runner(RunnerBase):
    def __init__(self, context):
        print("Running PSRunner.")
        pass

    def run(self, context):
        epochs = int(context["config"].get("runner." + context["runner_name"] + ".epochs"))
        model_dict = context["env"]["phase"][0]
        for epoch in range(epochs):
            begin_time = time.time()
            self._run(context, model_dict)
            end_time = time.time()
            seconds = end_time - begin_time
            print("epoch {} done, use time: {}".format(epoch, seconds))
            self.save(epoch, context, True)
        context["status"] = "terminal_pass"

class Terminal(TerminalBase):
    def __init__(self, context):
        pass

    def terminal(self, context):
        print("PaddleRec Finish")
"""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("subset", [*((stage,) for stage in STAGES), STAGES], ids="+".join)
def test_the_classes_that_paddlerec_shows_train_to_the_same_weights(linear: Path, subset: tuple[str, ...]) -> None:
    context = replaced(linear, PADDLEREC, subset)
    for found, wanted in zip(weights(context), expected().values(), strict=True):
        assert torch.equal(found, wanted)
    saved = [path.name for path in context["checkpointer"].all()]
    assert saved == ["step-000000000006", "step-000000000012"]


def test_a_pass_as_paddlerec_writes_it_is_validated_and_counted(linear: Path) -> None:
    context = replaced(linear, PADDLEREC, ("runner",))
    assert context["train_state"]["iteration"] == context["train_state"]["update"] == 12
    assert set(context["metrics"]["line"]) == {"loss", "valid_loss"}


def test_a_startup_as_paddlerec_writes_it_loads_the_first_weights(linear: Path) -> None:
    trained = replaced(linear, PADDLEREC, STAGES)
    infer = ["class=infer", "epochs=null", f"init_model_path={trained['run_dir']}"]
    paths = [f"{stage}_class_path={{workspace}}/own.py" for stage in ("network", "startup")]
    context = GeneralTrainer(linear, [f"runner.train_runner.{setting}" for setting in [*infer, *paths]]).run()
    assert weights(context) == weights(trained)


def test_a_startup_as_paddlerec_writes_it_evaluates_what_was_trained_before(linear: Path) -> None:
    judge = (
        f"  - {{name: judge, class: infer, device: cpu, startup_class_path: '{linear.parent / 'own.py'}'}}\nphase:\n"
    )
    linear.write_text(linear.read_text(encoding="utf-8").replace("phase:\n", judge), encoding="utf-8")
    context = replaced(linear, PADDLEREC, ("startup",))
    for found, wanted in zip(weights(context), expected().values(), strict=True):
        assert torch.equal(found, wanted)


def test_a_loop_as_paddlerec_writes_it_goes_on_after_a_stop(linear: Path) -> None:
    stop = "\n            if epoch == 0 and not context.resuming: context['is_exit'] = True\n            self.save("
    stopped = replaced(linear, PADDLEREC.replace("\n            self.save(", stop), STAGES)
    assert stopped["train_state"]["iteration"] == 6
    (linear.parent / "own.py").write_text(PADDLEREC, encoding="utf-8")
    paths = [f"runner.train_runner.{stage}_class_path={{workspace}}/own.py" for stage in STAGES]
    context = GeneralTrainer(linear, paths, resume="auto").run()
    for found, wanted in zip(weights(context), expected().values(), strict=True):
        assert torch.equal(found, wanted)
