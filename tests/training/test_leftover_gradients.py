"""Gradients that other code leaves behind are no part of the next update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeline import Brain, ExperimentBase, GeneralTrainer, RunnerBase, Stage, hookimpl, optimize
from pipeline.context import Context

mse = nn.functional.mse_loss
Config = dict[str, Any]
Run = Callable[[Config], Context]

RARE = (
    "before_epoch",
    "before_phase",
    "before_pass",
    "on_print_interval",
    "extend_metrics",
    "before_validation",
    "after_validation",
    "after_pass",
    "after_phase",
    "before_checkpoint_saved",
    "after_checkpoint_captured",
    "after_checkpoint_saved",
    "after_epoch",
)


def probe(model: nn.Module) -> None:
    """Leave gradients behind, as saliency maps and gradient probes do."""
    with torch.enable_grad():
        torch.autograd.backward([5 * own.to_dense().sum() for own in model.parameters()])


def plugin(*hooks: str) -> type:
    """A plugin that leaves gradients behind in some hooks."""

    def method(self: Any, context: Context) -> None:
        probe(context["model"]["line"].brain.modules)

    return type("Probe", (), {hook: hookimpl(method) for hook in hooks})


def config_of(config: Callable[..., Config], make_table: Any, *plugins: type, **runner: Any) -> Config:
    """10 samples in batches of 2; validated, printed and saved after every third batch, within a window of two."""
    chosen = config(valid_interval=3, print_interval=3, save_interval=3, **runner)
    chosen["dataset"][0] |= {"class_path": lambda: make_table(10), "batch_size": 2}
    chosen["phase"][0]["valid_dataset_name"] = "data"
    chosen["plugins"] = [*chosen["plugins"], *plugins]
    return chosen


def by_hand(samples: TensorDataset, accum_grad: int = 1, epochs: int = 2) -> list[Tensor]:
    """The weights after descending the mean over each window of batches of two; a window ends with its epoch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, target = samples.tensors
    for _ in range(epochs):
        for x, y in zip(inputs.split(2 * accum_grad), target.split(2 * accum_grad), strict=True):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
    return list(model.parameters())


def weights(context: Context) -> list[Tensor]:
    trained = context["model"]["line"].brain.modules.parameters()
    return list(trained)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("hook", "accum_grad"), [*((hook, 2) for hook in RARE), ("after_validation", 1)])
def test_hook_not_per_batch_leaves_no_gradient(
    hook: str, accum_grad: int, config: Any, run: Run, make_table: Any
) -> None:
    """With windows of two, the hooks are called within a window as well as between windows."""
    context = run(config_of(config, make_table, plugin(hook), accum_grad=accum_grad))
    torch.testing.assert_close(weights(context), by_hand(make_table(10), accum_grad))


@pytest.mark.parametrize("hook", ["before_batch", "after_batch", "after_update"])
def test_hook_per_batch_leaves_none_for_a_new_window(hook: str, config: Any, run: Run, make_table: Any) -> None:
    context = run(config_of(config, make_table, plugin(hook)))
    torch.testing.assert_close(weights(context), by_hand(make_table(10)))


RAISING = """
from pipeline import hookimpl


class Raising:
    @hookimpl
    def after_validation(self, context):
        for parameter in context["model"]["line"].model.parameters():
            parameter.sum().backward()
        raise ValueError
"""


def test_hook_that_raises_puts_gradients_back(config: Any, run: Run, make_table: Any, tmp_path: Path) -> None:
    """With ``on_error: warn`` the run goes on, in the middle of a window."""
    file = tmp_path / "raising.py"
    file.write_text(RAISING)
    chosen = config_of(config, make_table, accum_grad=2)
    chosen["plugins"].append({"name": "raising", "class_path": f"{file}:Raising", "on_error": "warn"})
    torch.testing.assert_close(weights(run(chosen)), by_hand(make_table(10), 2))


def test_debug_names_a_hook_that_leaves_a_gradient(
    config: Any, run: Run, make_table: Any, log_lines: list[str]
) -> None:
    run(config_of(config, make_table, plugin("after_batch", "after_pass"), debug=True))
    warnings = [line for line in log_lines if "left a gradient" in line]
    assert len(warnings) == 1
    assert "plugin 'Probe', hook after_batch" in warnings[0]
    assert "line.weight" in warnings[0]


class Saliency(Brain):
    """Goes backward in each validation too."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__({"line": nn.Linear(3, 1)}, **keywords)

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        predictions: Tensor = self.modules.line(batch[0])
        return predictions

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        if stage is Stage.VALID:
            probe(self.modules.line)
        return mse(predictions, batch[1])


@pytest.mark.parametrize("accum_grad", [1, 2])
def test_brain_backward_in_validation_changes_nothing(accum_grad: int, config: Any, run: Run, make_table: Any) -> None:
    chosen = config_of(config, make_table, accum_grad=accum_grad)
    chosen["phase"][0] |= {"model": Saliency}
    del chosen["phase"][0]["loss"]
    context = run(chosen)
    torch.testing.assert_close(weights(context), by_hand(make_table(10), accum_grad))


def test_brain_fit_backward_in_validation_changes_nothing(make_table: Any) -> None:
    torch.manual_seed(0)
    options = {"max_grad_norm": None, "device": "cpu"}
    brain = Saliency(opt_class=lambda parameters: torch.optim.SGD(parameters, 0.1), run_opts=options)
    keywords = {"batch_size": 2}
    brain.fit(
        range(2), make_table(10), make_table(10), progressbar=False,
        train_loader_kwargs=keywords, valid_loader_kwargs=keywords,
    )  # fmt: skip
    torch.testing.assert_close(list(brain.modules.parameters()), by_hand(make_table(10)))


class GatheringByHand(Brain):
    """Steps by itself once for two batches, as recipes of SpeechBrain do."""

    def __init__(self) -> None:
        super().__init__({"line": nn.Linear(3, 1)})

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        predictions: Tensor = self.modules.line(batch[0])
        return predictions

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])

    def fit_batch(self, batch: Any) -> Tensor:
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        (loss / 2).backward()
        if self.step % 2 == 0:
            self.optimizers_step()
        return loss.detach()


def test_own_fit_batch_keeps_what_it_gathers(config: Any, run: Run, make_table: Any) -> None:
    """A validation comes between the two batches of a window, which only the Brain knows of."""
    chosen = config_of(config, make_table, plugin(*RARE))
    chosen["dataset"][0]["class_path"] = lambda: make_table(8)
    chosen["phase"][0] |= {"model": GatheringByHand}
    del chosen["phase"][0]["loss"]
    torch.testing.assert_close(weights(run(chosen)), by_hand(make_table(8), 2))


class Loop(RunnerBase):
    """A custom loop that leaves gradients behind after each update, and validates in the body."""

    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        for _ in context.epochs():
            for inputs, target in context.batches("line"):
                context.validate("line")
                optimize(mse(phase.model(inputs), target), phase.optim_schedulers)
                probe(phase.model)


class LoopByHand(RunnerBase):
    """A custom loop that calls ``backward`` itself; the last of two batches steps."""

    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        optimizer = phase.optim_schedulers["main"].optimizer
        probe(phase.model)
        for _ in context.epochs():
            batches = context.batches("line")
            for inputs, target in batches:
                (mse(phase.model(inputs), target) / 2).backward()
                closes = batches.done % 2 == 1
                context.validate("line")
                if closes:
                    optimizer.step()
                    optimizer.zero_grad()


class LoopWithTerm(RunnerBase):
    """A custom loop in whose body half of the loss goes backward by itself."""

    def run(self, context: Context) -> None:
        phase = context["model"]["line"]
        for _ in context.epochs():
            for inputs, target in context.batches("line"):
                (mse(phase.model(inputs), target) / 2).backward()
                optimize(mse(phase.model(inputs), target) / 2, phase.optim_schedulers)


@pytest.mark.parametrize(("loop", "window"), [(Loop, 1), (LoopByHand, 2), (LoopWithTerm, 1)])
def test_custom_loop_trains_as_by_hand(loop: type, window: int, config: Any, run: Run, make_table: Any) -> None:
    chosen = config_of(config, make_table, plugin(*RARE), runner_class_path=loop)
    chosen["dataset"][0]["class_path"] = lambda: make_table(8)
    main = {"class": "constant", "args": {"optim_type": "SGD", "optim_conf": {"lr": 0.1}}}
    chosen["phase"][0]["optim_schedulers"] = {"main": main}
    del chosen["hyper_parameters"]
    torch.testing.assert_close(weights(run(chosen)), by_hand(make_table(8), window))


class Embedded(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 1, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.rows(ids)
        return scores


def test_sparse_gradient_left_behind_changes_nothing(config: Any, run: Run) -> None:
    ids = torch.tensor([0, 1, 2, 1, 0, 4])
    target = torch.linspace(-1, 1, 6)[:, None]

    class Lookup:
        """Goes backward through a row that no batch uses, and through one that each uses."""

        @hookimpl
        def after_validation(self, context: Context) -> None:
            context["model"]["line"].model(torch.tensor([1, 3])).sum().backward()

    chosen = config_of(config, lambda _: TensorDataset(ids, target), Lookup, accum_grad=2)
    chosen["phase"][0]["model"] = lambda: Embedded(sparse=True)
    [trained] = weights(run(chosen))
    torch.manual_seed(0)
    model = Embedded(sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for rows in (slice(0, 4), slice(4, 6)):
            optimizer.zero_grad()
            mse(model(ids[rows]), target[rows]).backward()
            optimizer.step()
    torch.testing.assert_close(trained, model.rows.weight)


class Experiment(ExperimentBase):
    """Steps once for two batches, and goes backward in its validation, also through a module of its own."""

    def setup_dataloader(self) -> None:
        inputs, target = table().tensors
        self.train_loader = list(zip(inputs.split(2), target.split(2), strict=True))
        self.valid_loader = None

    def setup_model(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.second = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(self.second.weight)
        parameters = [*self.model.parameters(), *self.second.parameters()]
        self.optimizer = torch.optim.SGD(parameters, 0.1)

    def train_batch(self) -> None:
        inputs, target = self.read_batch()
        (mse(self.model(inputs) + self.second(inputs), target) / 2).backward()
        if self.iteration % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def valid(self) -> None:
        probe(self.model)
        probe(self.second)
        if self.iteration == 3:
            self.save()


def table() -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 3, generator=random)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def experiment_by_hand(updates: int) -> list[Tensor]:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 1), nn.Linear(3, 1, bias=False)
    nn.init.zeros_(second.weight)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    inputs, target = table().tensors
    for number in range(updates):
        rows = slice(4 * (number % 2), 4 * (number % 2) + 4)
        optimizer.zero_grad()
        mse(first(inputs[rows]) + second(inputs[rows]), target[rows]).backward()
        optimizer.step()
    return parameters


def trained_by(experiment: Any) -> list[Tensor]:
    return [*experiment.model.parameters(), *experiment.second.parameters()]


def alone(folder: Path, steps: int, checkpoint: Any = None) -> Any:
    training = {"max_iteration": steps, "valid_interval": 1, "save_interval": None}
    arguments = {"device": "cpu", "nprocs": 1, "output": str(folder), "checkpoint_path": checkpoint}
    experiment = Experiment({"training": training}, arguments)
    experiment.setup()
    experiment.run()
    return experiment


def test_experiment_backward_in_valid_changes_nothing(tmp_path: Path) -> None:
    """What is saved within ``valid`` has the gradients of the open window, too."""
    torch.testing.assert_close(trained_by(alone(tmp_path / "a", 8)), experiment_by_hand(4))
    middle = str(tmp_path / "a" / "checkpoints" / "step-000000000003")
    resumed = alone(tmp_path / "b", 8, middle)
    torch.testing.assert_close(trained_by(resumed), experiment_by_hand(4))


def test_experiment_plugin_leaves_no_gradient(config: Any) -> None:
    experiments: list[Experiment] = []

    class Kept(Experiment):
        def setup_model(self) -> None:
            super().setup_model()
            experiments.append(self)

    class Probe:
        @hookimpl
        def after_validation(self, context: Context) -> None:
            for module in (experiments[0].model, experiments[0].second):
                probe(module)

    runner = {"name": "train", "class": "train", "device": "cpu", "max_steps": 8, "runner_class_path": Kept}
    plugins: Iterable[Any] = [{"progress_bar": False}, {"metric_log": False}, Probe]
    GeneralTrainer({"plugins": list(plugins), "runner": [{**runner, "valid_interval": 1}]}).run()
    torch.testing.assert_close(trained_by(experiments[0]), experiment_by_hand(4))
