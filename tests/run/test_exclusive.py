"""Two trainings at once in one process: the second is refused, and the first stays as it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pipeline
from pipeline import Brain, Context, ExperimentBase, GeneralTrainer, Stage, StartupBase, hookimpl
from pipeline.errors import ConcurrentRunError, ExitCode, StorageError

mse = nn.functional.mse_loss


def points() -> TensorDataset:
    """10 inputs [3], and a target [1] of each."""
    x = torch.linspace(-1, 1, 30).view(10, 3)
    return TensorDataset(x, x.sum(1, keepdim=True))


def network() -> nn.Module:
    """A model whose training draws from the random generator of torch."""
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))


def config(**runner: Any) -> dict[str, Any]:
    """A train runner of 2 epochs of 3 batches."""
    return {
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.1}},
        "dataset": [{"name": "data", "class_path": points, "batch_size": 4}],
        "runner": [{"name": "train", "class": "train", "device": "cpu", "epochs": 2, **runner}],
        "phase": [{"name": "line", "model": network, "loss": mse, "dataset_name": "data"}],
    }


def with_hook(act: Callable[[], object]) -> dict[str, Any]:
    """The config with a plugin that calls a function before the fourth batch."""

    class Acts:
        @hookimpl
        def before_batch(self, context: Context) -> None:
            if context["train_state"]["iteration"] == 3:
                act()

    return {**config(), "plugins": [{"name": "acts", "class_path": Acts}]}


def with_startup(act: Callable[[], object]) -> dict[str, Any]:
    """The config with a startup stage that calls a function."""

    class Startup(StartupBase):
        def startup(self, context: Context) -> None:
            act()

    return config(startup_class_path=Startup)


def weights_of(context: Context) -> list[Tensor]:
    return [parameter.detach() for parameter in context["model"]["line"].model.parameters()]


def weights_by_hand() -> list[Tensor]:
    """The weights that a plain loop ends with."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(points(), batch_size=4)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            mse(model(inputs), targets).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def in_thread(act: Callable[[], object]) -> BaseException | None:
    """Call a function in another thread; what it has raised."""
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return errors[0] if errors else None


class LineBrain(Brain):
    """The same model without a config."""

    def compute_forward(self, batch: Any, stage: Stage) -> Tensor:
        predictions: Tensor = self.modules.net(batch[0])
        return predictions

    def compute_objectives(self, predictions: Tensor, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


class LineExperiment(ExperimentBase):
    """The same model as an experiment."""

    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(points(), batch_size=4)

    def setup_model(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train_batch(self) -> None:
        x, y = self.read_batch()
        self.optimizer.zero_grad()
        mse(self.model(x), y).backward()
        self.optimizer.step()

    def valid(self) -> None:
        pass


def brain() -> LineBrain:
    """A Brain; building its model leaves the random generator as it was."""
    with torch.random.fork_rng():
        net = network()
    return LineBrain(
        {"net": net},
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        run_opts={"device": "cpu"},
    )


def run() -> None:
    GeneralTrainer(config()).run()


def fit() -> None:
    brain().fit(range(1), DataLoader(points(), batch_size=4), progressbar=False)


def evaluate() -> None:
    brain().evaluate(DataLoader(points(), batch_size=4), progressbar=False)


def experiment() -> None:
    args = SimpleNamespace(device="cpu", nprocs=1, output="experiment", checkpoint_path=None)
    asked = {"max_iteration": 3, "valid_interval": None, "save_interval": None}
    by_hand = LineExperiment({"training": asked}, args)
    by_hand.setup()
    by_hand.run()


def load() -> None:
    pipeline.load(next(Path("runs/config").glob("*-*")), "last")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("second", [run, fit, evaluate, experiment, load])
def test_second_in_a_thread_is_refused(second: Callable[[], None]) -> None:
    """Each of them draws random numbers that the first training needs."""
    run()
    errors: list[BaseException | None] = []
    context = GeneralTrainer(with_hook(lambda: errors.append(in_thread(second)))).run()
    [error] = errors
    assert isinstance(error, ConcurrentRunError)
    assert str(context["run_dir"].name) in str(error)
    assert f"{__file__}:" in str(error)
    assert equal(weights_of(context), weights_by_hand())


def test_predict_in_a_thread_leaves_the_run_as_it_is() -> None:
    """It only reads a model of its own."""
    run()
    trained = pipeline.load(next(Path("runs/config").glob("*-*")), "last")
    errors: list[BaseException | None] = []

    def predict() -> None:
        errors.append(in_thread(lambda: list(trained.predict([points().tensors[0]]))))

    context = GeneralTrainer(with_hook(predict)).run()
    assert errors == [None]
    assert equal(weights_of(context), weights_by_hand())


@pytest.mark.parametrize("within", [with_hook, with_startup], ids=["hook", "stage"])
def test_run_inside_a_run_is_refused(
    within: Callable[[Callable[[], object]], dict[str, Any]],
) -> None:
    trainer = GeneralTrainer(within(run))
    with pytest.raises(ConcurrentRunError):
        trainer.run()
    assert trainer.outcome == ExitCode.FAILED


def test_run_inside_a_fit_is_refused() -> None:
    """The run would seed the generators that the fit draws from."""

    class Runs(LineBrain):
        def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
            run()

    outer = Runs({"net": network()}, lambda own: torch.optim.SGD(own, 0.1), run_opts={"device": "cpu"})
    with pytest.raises(ConcurrentRunError):
        outer.fit(range(1), DataLoader(points(), batch_size=4), progressbar=False)


def test_fit_beside_a_fit_is_refused() -> None:
    errors: list[BaseException | None] = []

    class Fits(LineBrain):
        def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
            errors.append(in_thread(fit))

    outer = Fits({"net": network()}, lambda own: torch.optim.SGD(own, 0.1), run_opts={"device": "cpu"})
    outer.fit(range(1), DataLoader(points(), batch_size=4), progressbar=False)
    assert [type(error) for error in errors] == [ConcurrentRunError]


@pytest.mark.parametrize("inner", [fit, evaluate, experiment])
def test_fit_inside_a_stage_is_allowed(inner: Callable[[], None]) -> None:
    """In the thread of the run, its place in the order of all random numbers is fixed."""
    trainer = GeneralTrainer(with_startup(inner))
    trainer.run()
    assert trainer.outcome == ExitCode.DONE


def raises(error: type[BaseException]) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_run_that_failed_does_not_block_the_next(error: type[BaseException]) -> None:
    with pytest.raises(error):
        GeneralTrainer(with_hook(raises(error))).run()
    assert equal(weights_of(GeneralTrainer(config()).run()), weights_by_hand())


def test_run_without_a_directory_does_not_block_the_next() -> None:
    """The run ends before its first stage."""
    trainer = GeneralTrainer({**config(), "output_dir": "file"})
    Path("file").write_text("", encoding="utf-8")
    with pytest.raises(StorageError):
        trainer.run()
    run()


def test_run_in_a_forked_process_is_not_refused() -> None:
    """The process has random generators of its own."""
    codes = []

    def fork() -> None:
        process = os.fork()
        if not process:
            os._exit(3 if _raises(run) else 0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))

    GeneralTrainer(with_startup(fork)).run()
    assert codes == [0]


def _raises(act: Callable[[], object]) -> bool:
    try:
        act()
    except BaseException:
        return True
    return False
