"""A Brain whose fit goes on from the checkpoints of an earlier one, against one fit that was never interrupted."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from pipeline import Brain, Checkpointer, Stage
from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.compute.trainable import trainable_of
from pipeline.errors import CheckpointError, DataError


def data() -> list[list[Tensor]]:
    """Three batches."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)] for _ in range(3)]


class Batches:
    """The same batches in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data())


class Dropping(Brain):
    """A model with dropout, so that its weights depend on the random generator, and Adam, which has a state."""

    def __init__(self, folder: str | Path | Checkpointer, **options: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        checkpointer = folder if isinstance(folder, Checkpointer) else Checkpointer(folder)
        super().__init__({"net": net}, lambda each: Adam(each, 0.05), run_opts=options, checkpointer=checkpointer)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.mse_loss(predictions, batch[1])


class Counter:
    """An epoch counter that counts by itself, as SpeechBrain's."""

    def __init__(self, limit: int) -> None:
        self.current, self.limit = 0, limit

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        if self.current >= self.limit:
            raise StopIteration
        self.current += 1
        return self.current


def state_of(brain: Brain) -> dict[str, Any]:
    """All that a fit changes."""
    return {
        "weights": brain.modules.state_dict(),
        "optimizers": {name: each.state_dict() for name, each in brain.optimizers_dict.items()},
        "counters": dict(trainable_of(brain).counters),
        "generator": torch.get_rng_state(),
    }


def unbroken(folder: Path, epochs: int = 4, **options: Any) -> dict[str, Any]:
    brain = Dropping(folder / "unbroken", **options)
    brain.fit(range(epochs), Batches(), Batches())
    return state_of(brain)


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted(folder.glob("step-*"))]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("counter", [range, lambda epochs: list(range(epochs)), Counter])
@pytest.mark.parametrize("anew", [False, True])
def test_two_fits_are_one_in_a_process_and_in_two(tmp_path: Path, counter: Any, anew: bool) -> None:
    brain = Dropping(tmp_path / "own")
    brain.fit(counter(2), Batches(), Batches())
    torch.randn(7)
    brain = Dropping(tmp_path / "own") if anew else brain
    brain.fit(epochs := counter(4), Batches(), Batches())
    assert not list(differences(unbroken(tmp_path), state_of(brain)))
    assert getattr(epochs, "current", 4) == 4


class Interrupted(Dropping):
    """Ends once, before its fifth batch."""

    at = 5

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        self.at -= 1
        if not self.at:
            raise KeyboardInterrupt


def test_a_fit_interrupted_in_a_window_goes_on_without_its_gradients(tmp_path: Path) -> None:
    brain = Interrupted(tmp_path / "own", grad_accumulation_factor=2)
    with pytest.raises(KeyboardInterrupt):
        brain.fit(range(4), Batches(), Batches())
    assert any(each.grad is not None for each in brain.modules.parameters())
    brain.fit(range(4), Batches(), Batches())
    assert not list(differences(unbroken(tmp_path, grad_accumulation_factor=2), state_of(brain)))


def test_the_folder_of_the_checkpoints_may_be_text(tmp_path: Path) -> None:
    Dropping(f"{tmp_path}/own").fit(range(2), Batches())
    assert steps(tmp_path / "own") == [3, 6]


def test_no_checkpoint_of_an_earlier_fit_is_written_again(tmp_path: Path) -> None:
    Dropping(tmp_path).fit(range(2), Batches())
    before = contents(tmp_path)
    Dropping(tmp_path).fit(range(3), Batches())
    assert steps(tmp_path) == [3, 6, 9]
    assert before.items() <= contents(tmp_path).items()


class Killed(Dropping):
    """Its process ends at once after so many batches."""

    left: int

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        if not self.left:
            os._exit(9)
        self.left -= 1


def fit_and_be_killed(folder: Path, iteration: int) -> int:
    """What a process leaves with that is forked to fit, and killed after so many batches."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        brain = Killed(Checkpointer(folder, keep_last=2), ckpt_interval_steps=1)
        brain.left = iteration
        brain.fit(range(4), Batches(), Batches())
    finally:
        os._exit(1)


class Counting(Dropping):
    """Counts the batches that it trains on."""

    batches = 0

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        self.batches += 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("iteration", [2, 3, 8])
def test_a_fit_killed_within_an_epoch_goes_on_from_its_newest_checkpoint(tmp_path: Path, iteration: int) -> None:
    own = tmp_path / "own"
    assert fit_and_be_killed(own, iteration) == 9
    brain = Counting(own)
    brain.fit(range(4), Batches(), Batches())
    assert not list(differences(unbroken(tmp_path), state_of(brain)))
    assert brain.batches == 12 - iteration


def test_a_checkpoint_within_an_epoch_has_no_numbers_of_the_one_before(tmp_path: Path) -> None:
    fit_and_be_killed(tmp_path, 4)
    brain = Interrupted(tmp_path, ckpt_interval_steps=1)
    brain.at = 2
    with pytest.raises(KeyboardInterrupt):
        brain.fit(range(4), Batches(), Batches())
    first, *_, last = [read_checkpoint(tmp_path / f"step-{step:012d}") for step in (3, 4, 5)]
    assert first.iterations == {"brain": {"loss": 3, "valid_loss": 3}}
    assert last.metrics == {"brain": {}}
    assert Checkpointer(tmp_path).best("valid_loss", "min") == first.path


class SamplesInValidation(Dropping):
    """Adds noise in each validation batch, and is interrupted in one of them."""

    at, count = 0, 0

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        if stage is Stage.VALID:
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
            batch = [batch[0] + torch.randn(batch[0].shape), *batch[1:]]
        return super().compute_forward(batch, stage)


def test_a_fit_interrupted_in_a_validation_continues_as_one_that_was_not(tmp_path: Path) -> None:
    whole = SamplesInValidation(tmp_path / "whole")
    whole.fit(range(4), Batches(), Batches())
    first = SamplesInValidation(tmp_path / "parts")
    first.at = 5
    with pytest.raises(KeyboardInterrupt):
        first.fit(range(4), Batches(), Batches())
    second = SamplesInValidation(tmp_path / "parts")
    second.fit(range(4), Batches(), Batches())
    assert torch.equal(second.modules.net[0].weight, whole.modules.net[0].weight)


def test_numbers_of_epochs_may_be_tensors(tmp_path: Path) -> None:
    for epochs in (2, 3):
        brain = Dropping(tmp_path)
        brain.fit(torch.arange(epochs), Batches())
    assert trainable_of(brain).counters["epoch"] == 3


def test_a_fit_that_goes_on_within_an_epoch_is_refused_where_another_epoch_would_be_next(tmp_path: Path) -> None:
    fit_and_be_killed(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"the checkpoint was saved in the middle of epoch 1, and epoch 7 would"):
        Dropping(tmp_path).fit([0, 7], Batches())


def test_a_fit_does_not_go_on_within_an_epoch_with_other_batches(tmp_path: Path) -> None:
    samples = [(x, y) for batch in data() for x, y in zip(*batch, strict=True)]
    brain = Interrupted(tmp_path, ckpt_interval_steps=1)
    with pytest.raises(KeyboardInterrupt):
        brain.fit(range(2), samples, train_loader_kwargs={"batch_size": 2})
    with pytest.raises(DataError, match=r"make_dataloader.batch_size: 2 -> 3: has changed in the middle of an epoch"):
        Dropping(tmp_path).fit(range(2), samples, train_loader_kwargs={"batch_size": 3})


def test_a_fit_whose_order_is_drawn_is_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    samples = TensorDataset(*map(torch.cat, zip(*data(), strict=True)))

    def fitted(brain: Dropping) -> Dropping:
        torch.manual_seed(2)
        brain.fit(range(2), DataLoader(samples, batch_size=2, shuffle=True))
        return brain

    expected = state_of(fitted(Dropping(tmp_path / "unbroken")))
    brain = Interrupted(tmp_path / "own", ckpt_interval_steps=1)
    with pytest.raises(KeyboardInterrupt):
        fitted(brain)
    assert not list(differences(expected, state_of(fitted(Dropping(tmp_path / "own")))))


def test_a_fit_with_nothing_left_to_do_says_so_and_has_the_weights(tmp_path: Path, log_lines: list[str]) -> None:
    Dropping(tmp_path / "own").fit(range(2), Batches())
    again = Dropping(tmp_path / "own")
    nn.init.zeros_(again.modules.net[0].weight)
    again.fit(range(2), Batches())
    assert "INFO fit: nothing is left to train; 2 epochs and 6 updates are done\n" in log_lines
    assert not list(differences(unbroken(tmp_path, 2), state_of(again)))


@pytest.mark.parametrize("options", [{"optimizer_step_limit": 6}, {"debug": True, "debug_persistently": True}])
def test_a_fit_that_has_reached_its_limit_trains_nothing_more(tmp_path: Path, options: dict[str, Any]) -> None:
    for _ in range(2):
        brain = Dropping(tmp_path, **options)
        brain.fit(count(), Batches())
        assert trainable_of(brain).counters["epoch"] == 2


@pytest.mark.parametrize(
    ("first", "second", "trained"), [([7], [8], [8]), ([0], [0, 0, 1], [0, 1]), (range(2), range(1, 4), [2, 3])]
)
def test_of_each_number_so_many_epochs_are_skipped_as_are_done(
    tmp_path: Path, first: Any, second: Any, trained: list[int]
) -> None:
    class Telling(Dropping):
        def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
            numbers.append(epoch)

    numbers: list[int | None] = []
    Dropping(tmp_path).fit(first, Batches())
    Telling(tmp_path).fit(second, Batches())
    assert numbers == trained


def test_what_on_fit_start_adds_goes_on_from_its_state_after_it(tmp_path: Path) -> None:
    class Averaging(Dropping):
        def on_fit_start(self) -> None:
            super().on_fit_start()
            self.mean = nn.Linear(1, 1)
            nn.init.zeros_(self.mean.weight)
            assert self.checkpointer
            self.checkpointer.add_recoverable("mean", self.mean)

        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            nn.init.constant_(self.mean.weight, self.mean.weight.item() + 1)

    first, second = Averaging(tmp_path), Averaging(tmp_path)
    for epochs, brain in enumerate((first, first, second), 1):
        brain.fit(range(epochs), Batches())
    assert second.mean.weight.item() == 3


def test_the_rate_that_the_brain_now_has_wins_and_one_that_it_has_set_itself_stays(tmp_path: Path) -> None:
    class Annealed(Dropping):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            self.optimizer.param_groups[0]["lr"] /= 2

    rates = []
    for rate, epochs in ((0.08, 1), (0.08, 2), (0.01, 2)):
        brain = Annealed(tmp_path)
        brain.opt_class = partial(Adam, lr=rate)
        brain.fit(range(epochs), Batches())
        rates.append(brain.optimizer.param_groups[0]["lr"])
    assert rates == [0.04, 0.02, 0.01]


def test_optimizers_that_a_brain_steps_itself_go_on_from_their_state(tmp_path: Path) -> None:
    class Own(Dropping):
        def init_optimizers(self) -> None:
            self.own = SGD(self.modules.parameters(), 0.01, momentum=0.9)

        def fit_batch(self, batch: Any) -> Tensor:
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
            loss.backward()
            self.own.step()
            self.own.zero_grad()
            return loss.detach()

    def fitted(folder: Path, epochs: int) -> dict[str, Any]:
        brain = Own(folder)
        brain.fit(range(epochs), Batches())
        return brain.own.state_dict()

    whole, _, second = fitted(tmp_path / "whole", 4), fitted(tmp_path / "own", 2), fitted(tmp_path / "own", 4)
    assert not list(differences(whole, second))


def test_generators_of_loaders_and_attributes_go_on_where_they_were(tmp_path: Path) -> None:
    class Drawing(Dropping):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.drawn, self.own = list[float](), random.Random(3)

        def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
            self.drawn.append(self.own.random())

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            self.drawn.append(batch[0].sum().item())
            return super().compute_objectives(predictions, batch, stage)

    def fitted(folder: Path, epochs: int) -> list[float]:
        brain = Drawing(folder)
        rows = [row for batch in data() for row in zip(*batch, strict=True)]
        generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        train, valid = (DataLoader(rows, 4, shuffle=True, generator=each) for each in generators)  # type: ignore[arg-type]
        brain.fit(range(epochs), train, valid)
        return brain.drawn

    whole = fitted(tmp_path / "whole", 4)
    assert fitted(tmp_path / "own", 2) + fitted(tmp_path / "own", 4) == whole
    # Each order is another.
    assert len({*whole}) == len(whole)


def test_a_brain_with_other_optimizers_of_its_own_is_refused(tmp_path: Path) -> None:
    class Own(Dropping):
        def init_optimizers(self) -> None:
            super().init_optimizers()
            self.own = SGD(self.modules.parameters(), 0.01)

    Own(tmp_path).fit(range(1), Batches())
    with pytest.raises(
        CheckpointError, match=r"the state of phase.brain.brain.own, and the run has none such; make it in"
    ):
        Dropping(tmp_path).fit(range(2), Batches())


def test_evaluate_judges_what_was_trained_after_a_debug_fit_too(tmp_path: Path) -> None:
    Dropping(tmp_path).fit(range(3), Batches(), Batches())
    brain = Dropping(tmp_path, debug=True, debug_batches=3)
    brain.fit(range(2), Batches(), Batches())
    trained = {name: each.clone() for name, each in brain.modules.state_dict().items()}
    for key in ({}, {"min_key": "valid_loss"}, {"max_key": "valid_loss"}):
        brain.evaluate(Batches(), **key)
    brain.evaluate(Batches())
    assert not list(differences(trained, dict(brain.modules.state_dict())))
    assert steps(tmp_path) == [3, 6, 9]


def test_checkpoints_of_a_run_are_left_alone(tmp_path: Path) -> None:
    counters = {"iteration": 5, "update": 5, "epoch": 0, "samples": 20, "phase_index": 0}
    checkpointer, models = Checkpointer(tmp_path), {"ctr": {"model": nn.Linear(1, 1)}}
    checkpointer.save(models, counters, {}, checkpointer.store.capture(models, metrics={}).to_tree())
    with pytest.raises(
        CheckpointError, match=r"step-000000000005: was not saved by a fit of a Brain; .*another folder"
    ):
        Dropping(tmp_path).fit(range(1), Batches())
    assert steps(tmp_path) == [5]
