"""A Brain that saves by SpeechBrain's calls: interrupted, killed and evaluated, against one fit that was not interrupted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader

from pipeline import Brain, Checkpointer, Stage
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.compute.trainable import trainable_of
from pipeline.errors import CheckpointError, ConfigError
from tests.training.test_fit_again import Batches, Counter, data


class Epochs(Counter):
    """Keeps its state too, as SpeechBrain's epoch counter does."""

    def save(self, path: Path) -> None:
        path.write_text(str(self.current), encoding="utf-8")

    def load(self, path: Path, end_of_epoch: bool) -> None:
        self.current = int(path.read_text(encoding="utf-8")) - (not end_of_epoch)

    save._speechbrain_saver = True  # type: ignore[attr-defined]
    load._speechbrain_loader = True  # type: ignore[attr-defined]


class Halving:
    """Halves the rate where the loss has not fallen by a tenth; keeps its state as SpeechBrain's schedules do."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def __call__(self, optimizer: Adam, loss: float) -> None:
        if self.losses and loss > 0.9 * self.losses[-1]:
            optimizer.param_groups[0]["lr"] /= 2
        self.losses.append(loss)

    def save(self, path: Path) -> None:
        torch.save({"losses": self.losses}, path)

    def load(self, path: Path, end_of_epoch: bool) -> None:
        self.losses = torch.load(path)["losses"]

    save._speechbrain_saver = True  # type: ignore[attr-defined]
    load._speechbrain_loader = True  # type: ignore[attr-defined]


class Recipe(Brain):
    """Written as a recipe of SpeechBrain's is: it anneals and saves at the end of a validation."""

    batches_left = 10**9
    optimizer: Adam
    checkpointer: Checkpointer

    def __init__(self, folder: Path, limit: int = 4, **options: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        own = {"epochs": Epochs(limit), "annealing": Halving()}
        checkpointer = Checkpointer(checkpoints_dir=folder, recoverables={"model": nn.ModuleList([net]), **own})
        super().__init__({"net": net}, lambda each: Adam(each, 0.05), own, options, checkpointer)

    def init_optimizers(self) -> None:
        super().init_optimizers()
        self.checkpointer.add_recoverable("optimizer", self.optimizer)

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        if not self.batches_left:
            os._exit(9)
        self.batches_left -= 1

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.mse_loss(predictions, batch[1])

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        if stage == Stage.VALID:
            self.hparams.annealing(self.optimizer, stage_loss)
            self.checkpointer.save_and_keep_only({"loss": stage_loss, "epoch": epoch}, min_keys=["loss"])

    def train(self) -> Recipe:
        self.fit(self.hparams.epochs, Batches(), Batches())
        return self

    def state(self) -> dict[str, Any]:
        """All that a fit changes."""
        return {
            "weights": dict(self.modules.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "counters": dict(trainable_of(self).counters),
            "random": torch.get_rng_state(),
            "epoch": self.hparams.epochs.current,
            "losses": list(self.hparams.annealing.losses),
        }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return Recipe(tmp_path_factory.mktemp("unbroken")).train().state()


def names(brain: Brain) -> list[str]:
    assert brain.checkpointer
    return [each.path.name.lstrip("step-0") for each in brain.checkpointer.list_checkpoints()][::-1]


def test_two_epochs_and_two_are_four_bit_for_bit(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    Recipe(tmp_path, 2).train()
    torch.randn(7)
    assert not list(differences(unbroken, Recipe(tmp_path, 4).train().state()))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("iteration", [1, 3, 5, 8, 11])
def test_killed_within_an_epoch_it_goes_on_bit_for_bit(
    tmp_path: Path, unbroken: dict[str, Any], iteration: int
) -> None:
    pid = os.fork()
    if not pid:
        try:
            brain = Recipe(tmp_path, ckpt_interval_steps=1)
            brain.batches_left = iteration
            brain.train()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    brain = Recipe(tmp_path)
    brain.batches_left = 12 - iteration
    assert not list(differences(unbroken, brain.train().state()))


class Smoothing:
    """The mean of all losses, by which a recipe scales its next ones."""

    def __init__(self) -> None:
        self.mean = 1.0

    def state_dict(self) -> float:
        return self.mean

    def load_state_dict(self, state: float) -> None:
        self.mean = state


class Scaling(Recipe):
    """Holds two objects with a state, of which the Checkpointer knows one."""

    def __init__(self, folder: Path, limit: int = 4) -> None:
        super().__init__(folder, limit)
        self.hparams.first = Smoothing()
        self.second = Smoothing()
        self.checkpointer.add_recoverable("second", self.second)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        loss = super().compute_objectives(predictions, batch, stage)
        scale = self.hparams.first.mean * self.second.mean
        self.hparams.first.mean = 0.9 * self.hparams.first.mean + 0.1 * loss.item()
        self.second.mean = 0.8 * self.second.mean + 0.2 * loss.item()
        return loss * scale


def test_objects_with_state_are_saved_once_and_resumed(tmp_path: Path) -> None:
    unbroken = Scaling(tmp_path / "unbroken").train()
    Scaling(tmp_path / "resumed", 2).train()
    resumed = Scaling(tmp_path / "resumed").train()

    assert not list(differences(unbroken.state(), resumed.state()))
    training = read_checkpoint(resumed.checkpointer.list_checkpoints()[0].path).training
    assert training["objects"] == {"phase.brain.brain.hparams.first": resumed.hparams.first.mean,
                                   "phase.brain.brain.second": None}  # fmt: skip
    assert training["recoverables"]["second"] == resumed.second.mean


def test_an_epoch_has_one_checkpoint_that_has_all(tmp_path: Path) -> None:
    brain = Recipe(tmp_path).train()
    assert names(brain) == ["9", "12"]
    checkpoint = brain.checkpointer.list_checkpoints()[0]
    assert checkpoint.meta == {
        "loss": brain.hparams.annealing.losses[-1],
        "epoch": 4,
        "end-of-epoch": True,
        "unixtime": checkpoint.meta["unixtime"],
    }
    read = read_checkpoint(checkpoint.path)
    assert read.training["engine"]["outer"][0]["epochs"] == [1, 2, 3, 4]
    weights = {f"0.{name}": value for name, value in brain.modules.net.state_dict().items()}
    assert not list(differences(weights, dict(read.training["recoverables"]["model"])))
    # As a file, for what averages the weights of several.
    assert not list(differences(weights, dict(torch.load(checkpoint.paramfiles["model"]))))


def test_an_evaluation_takes_the_best_by_what_the_recipe_has_said(tmp_path: Path) -> None:
    class Later(Recipe):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            if stage == Stage.VALID:
                self.hparams.annealing.losses.append(stage_loss)
                self.checkpointer.save_and_keep_only({"score": abs(epoch - 2)}, min_keys=["score"])

    brain = Later(tmp_path).train()
    assert names(brain) == ["6", "9", "12"]
    assert brain.evaluate(Batches(), min_key="score") == brain.hparams.annealing.losses[1]
    assert (brain.hparams.epochs.current, len(brain.hparams.annealing.losses)) == (2, 2)
    best = brain.checkpointer.find_checkpoint(min_key="score")
    assert best
    assert not list(differences(read_checkpoint(best.path).weights["brain"], dict(brain.modules.state_dict())))
    # A number that fit reports.
    assert brain.evaluate(Batches(), max_key="valid_loss") is not None
    with pytest.raises(CheckpointError, match="no checkpoint knows 'other'"):
        brain.evaluate(Batches(), min_key="other")


def test_what_a_recipe_keeps_and_what_fit_saves_by_itself_do_not_go_with_each_other(tmp_path: Path) -> None:
    class Sometimes(Recipe):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            if stage == Stage.VALID and epoch in {1, 2}:
                self.checkpointer.save_and_keep_only({"score": epoch}, min_keys=["score"], keep_recent=False)

    brain = Sometimes(tmp_path, 6, ckpt_interval_steps=2).train()
    assert names(brain) == ["3", "6", "16", "18"]
    assert [each.asked for each in brain.checkpointer.list_checkpoints()] == [False, False, True, True]


def test_what_is_asked_for_in_a_batch_is_saved_after_it_and_training_goes_on_from_it(
    tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    class Often(Recipe):
        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
            if trainable_of(self).counters["iteration"] in {3, 5}:
                assert self.checkpointer.save_checkpoint({"batch": self.step}, end_of_epoch=False) is None
            if trainable_of(self).counters["iteration"] == 7:
                raise KeyboardInterrupt

    first = Often(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert names(first) == ["4", "6"]
    metas = [each.meta for each in first.checkpointer.list_checkpoints()]
    of_batch, of_epoch = (1, None, False), (3, 2, True)
    assert [(own.get("batch"), own.get("epoch"), own["end-of-epoch"]) for own in metas] == [of_epoch, of_batch]
    brain = Recipe(tmp_path)
    brain.batches_left = 6
    assert not list(differences(unbroken, brain.train().state()))


def test_a_name_is_that_of_the_checkpoint_of_the_epoch(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    class Named(Recipe):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            if stage == Stage.VALID:
                self.hparams.annealing(self.optimizer, stage_loss)
                self.checkpointer.save_checkpoint({"loss": stage_loss}, name=f"epoch_{epoch}")

    Named(tmp_path, 2).train()
    brain = Named(tmp_path).train()
    assert names(brain) == [f"{3 * epoch}+epoch_{epoch}" for epoch in (1, 2, 3, 4)]
    assert not list(differences(unbroken, brain.state()))


def test_what_a_test_saves_has_the_weights_that_it_judged_and_training_goes_on_as_if_it_were_not_there(
    tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    class Averaging(Recipe):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            super().on_stage_end(stage, stage_loss, epoch)
            if stage == Stage.TEST:
                nn.init.zeros_(self.modules.net[0].weight)
                self.checkpointer.save_and_keep_only({"loss": -1.0}, min_keys=["loss"])

    brain = Averaging(tmp_path, 2).train()
    for _ in range(3):
        brain.evaluate(Batches(), min_key="loss")
    assert names(brain) == ["3", "6", "6@3", "6@4"]
    other = Recipe(tmp_path)
    other.evaluate(Batches(), min_key="loss")
    assert not other.modules.net[0].weight.any()
    assert not list(differences(unbroken, Recipe(tmp_path).train().state()))


def test_an_evaluation_within_a_fit_does_not_end_what_calls_ask_for(tmp_path: Path) -> None:
    class Testing(Recipe):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            if stage == Stage.VALID:
                self.checkpointer.save_checkpoint({"epoch": epoch})
                if epoch == 2:
                    self.evaluate(Batches())
                self.checkpointer.save_checkpoint({"more": epoch})

    brain = Testing(tmp_path)
    brain.fit([1, 2, 3], Batches(), Batches())
    assert [(each.meta["epoch"], each.meta["more"]) for each in brain.checkpointer.list_checkpoints()] == [
        (3, 3),
        (2, 2),
        (1, 1),
    ]


@pytest.mark.parametrize("key", [{}, {"min_key": "loss"}])
def test_an_evaluation_within_a_fit_is_given_weights_alone_and_what_counts_the_epochs_goes_on(
    tmp_path: Path, key: dict[str, str]
) -> None:
    class Testing(Recipe):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            super().on_stage_end(stage, stage_loss, epoch)
            if stage == Stage.VALID and epoch == 3:
                before = self.hparams.epochs.current, self.hparams.annealing.losses[:], self.optimizer.state_dict()
                self.evaluate(Batches(), **key)
                after = self.hparams.epochs.current, self.hparams.annealing.losses[:], self.optimizer.state_dict()
                assert not list(differences(before, after))
                assert self.checkpointer.recoverables.keys() == {"model", "epochs", "annealing", "optimizer"}

    brain = Testing(tmp_path).train()
    assert (brain.hparams.epochs.current, len(brain.hparams.annealing.losses)) == (4, 4)
    assert names(brain)[-1] == "12"


def test_what_was_asked_for_before_a_fit_failed_is_not_saved_later(tmp_path: Path) -> None:
    class Failing(Recipe):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            super().on_stage_end(stage, stage_loss, epoch)
            if stage == Stage.VALID and epoch == 2:
                raise KeyError(epoch)

    brain = Failing(tmp_path)
    with pytest.raises(KeyError):
        brain.train()
    brain.checkpointer.save_checkpoint({"mine": 1})
    assert [each.meta.get("epoch") for each in brain.checkpointer.list_checkpoints()] == [None, 1]


def test_a_debug_fit_saves_elsewhere_with_the_same_recoverables(tmp_path: Path) -> None:
    brain = Recipe(tmp_path, debug=True, debug_batches=3).train()
    assert names(brain) == []
    losses = brain.hparams.annealing.losses[:]
    assert brain.evaluate(Batches(), min_key="loss") == min(losses)


def test_another_object_than_a_checkpointer_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"RunCheckpointer; write pipeline.Checkpointer, in YAML !new:pipeline.Checkp"
    ):
        Brain(checkpointer=RunCheckpointer(CheckpointStore(tmp_path)))  # type: ignore[arg-type]


def test_where_another_has_the_optimizer_or_the_model_their_state_is_found(tmp_path: Path) -> None:
    brain = Recipe(tmp_path).train()
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = Adam(net.parameters(), 1.0)
    Checkpointer(tmp_path, {"model": nn.ModuleList([net]), "optimizer": optimizer}).recover_if_possible(max_key="epoch")
    assert not list(differences(dict(brain.modules.net.state_dict()), dict(net.state_dict())))
    assert not list(differences(brain.optimizer.state_dict()["state"], optimizer.state_dict()["state"]))
    assert optimizer.param_groups[0]["lr"] == brain.optimizer.param_groups[0]["lr"]


class Plain(Brain):
    """As a Recipe, without calls of its own."""

    def __init__(self, checkpointer: Checkpointer, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        super().__init__({"net": nn.Linear(3, 1)}, lambda each: Adam(each, 0.05), None, options, checkpointer)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.mse_loss(predictions, batch[1])


def test_of_two_brains_with_one_checkpointer_the_one_that_is_evaluated_is_restored(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    first, second = Plain(checkpointer), Plain(checkpointer, seed=1)
    before = second.modules.net.weight.tolist()
    first.fit(range(1), Batches())
    trained = first.modules.net.weight.tolist()
    nn.init.zeros_(first.modules.net.weight)
    first.evaluate(Batches())
    assert (first.modules.net.weight.tolist(), second.modules.net.weight.tolist()) == (trained, before)


def test_a_script_that_saves_in_the_folder_of_a_fit_leaves_the_newest_two_of_it(tmp_path: Path) -> None:
    Plain(Checkpointer(tmp_path)).fit(range(3), Batches())
    script = Checkpointer(tmp_path, {"epochs": Epochs(1)})
    for _ in range(4):
        script.save_and_keep_only()
    names = [each.path.name for each in script.list_checkpoints()]
    assert names == [f"step-{number:012}" for number in (13, 12, 9, 6)]
    with pytest.raises(CheckpointError, match="was not saved by a fit of a Brain; give the Brain a Checkp"):
        Plain(Checkpointer(tmp_path)).fit(range(4), Batches())


def test_what_a_fit_would_go_on_without_is_an_error(tmp_path: Path) -> None:
    Plain(Checkpointer(tmp_path)).fit(range(1), Batches())
    with pytest.raises(CheckpointError, match="has no state of 'epochs'; use another, or give add_recoverable opt"):
        Plain(Checkpointer(tmp_path, {"epochs": Epochs(1)})).fit(range(2), Batches())
    Plain(Checkpointer(tmp_path, {"epochs": Epochs(1)}, allow_partial_load=True)).fit(range(2), Batches())


def test_an_epoch_has_one_checkpoint_and_one_name(tmp_path: Path) -> None:
    class Two(Plain):
        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            assert self.checkpointer
            self.checkpointer.save_checkpoint(name="a")
            self.checkpointer.save_checkpoint({"loss": 1}, name="a")
            self.checkpointer.save_checkpoint(name="b")

    with pytest.raises(ConfigError, match="fit saves one checkpoint now, and it is to be named 'a' and 'b'; give it"):
        Two(Checkpointer(tmp_path)).fit(range(1), Batches())


def test_the_end_of_an_epoch_goes_where_its_last_batch_has_asked_for_a_checkpoint(tmp_path: Path) -> None:
    class Asking(Plain):
        validations = 0

        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
            assert self.checkpointer
            if self.step == 3:
                self.checkpointer.save_checkpoint({"step": self.step}, name="last")

        def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
            self.validations += stage is Stage.VALID

    checkpointer = Checkpointer(tmp_path)
    Asking(checkpointer).fit(range(1), Batches(), Batches())
    (checkpoint,) = checkpointer.list_checkpoints()
    assert (checkpoint.path.name, checkpoint.meta["step"]) == ("step-000000000003+last", 3)
    assert checkpoint.meta["end-of-epoch"]
    again = Asking(Checkpointer(tmp_path))
    again.fit(range(1), Batches(), Batches())
    assert again.validations == 0


def test_a_save_in_a_batch_of_a_shuffled_loader_is_made_after_that_batch(tmp_path: Path) -> None:
    class Asking(Plain):
        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
            assert self.checkpointer
            self.checkpointer.save_checkpoint({"step": self.step})

    rows = [row for batch in data() for row in zip(*batch, strict=True)]
    checkpointer = Checkpointer(tmp_path)
    Asking(checkpointer).fit(range(2), DataLoader(rows, 4, shuffle=True))  # type: ignore[arg-type]
    assert sorted(each.meta["step"] for each in checkpointer.list_checkpoints()) == [1, 1, 2, 2, 3, 3]


def test_what_is_added_in_a_fit_stays(tmp_path: Path) -> None:
    brain = Recipe(tmp_path)
    brain.fit(brain.hparams.epochs, Batches(), Batches())
    assert {*brain.checkpointer.recoverables} == {"model", "epochs", "annealing", "optimizer"}
    assert brain.checkpointer.recover_if_possible(min_key="loss")


def test_a_debug_fit_has_the_functions_for_files_too(tmp_path: Path) -> None:
    class Adding(Plain):
        def init_optimizers(self) -> None:
            super().init_optimizers()
            assert self.checkpointer
            self.checkpointer.add_recoverable("own", object())

    hooks = {"own": lambda own, path: path.write_text("1")}, {"own": lambda own, path, over: None}
    Adding(Checkpointer(tmp_path, None, hooks[1], hooks[0]), debug=True).fit(range(1), Batches())
    assert not [*tmp_path.glob("step-*")]
