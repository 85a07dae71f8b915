"""Examples of the seed's documents as they stand there, but for the import, and a recipe with optimizers of its own."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from pipeline import Brain, GeneralTrainer, RunOptions, Stage
from pipeline.compute.trainable import trainable_of


class SimpleBrain(Brain):
    """Of SpeechBrain's documentation of Brain."""

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return torch.nn.functional.l1_loss(predictions, batch[0])


def test_the_example_of_the_brain_fits_as_a_loop_by_hand_does() -> None:
    model = torch.nn.Linear(in_features=10, out_features=10)
    weight, batch = model.weight.detach().clone().requires_grad_(), [torch.rand(10, 10), torch.rand(10, 10)]
    brain = SimpleBrain({"model": model}, opt_class=lambda x: SGD(x, 0.1))
    torch.nn.functional.l1_loss(torch.nn.functional.linear(batch[0], weight, model.bias.detach()), batch[0]).backward()
    brain.fit(range(1), (batch,))
    assert weight.grad is not None
    assert torch.allclose(model.weight, weight - 0.1 * weight.grad, rtol=0, atol=1e-7)
    assert trainable_of(brain).counters == {"iteration": 1, "update": 1, "epoch": 1, "samples": 1, "phase_index": 0}


def test_the_example_of_the_brain_evaluates_to_the_mean_loss() -> None:
    model = torch.nn.Linear(in_features=10, out_features=10)
    batch = [torch.rand(10, 10), torch.rand(10, 10)]
    brain = SimpleBrain({"model": model}, opt_class=lambda x: SGD(x, 0.1))
    mean = brain.evaluate((batch,))
    assert type(mean) is float
    assert mean == pytest.approx(torch.nn.functional.l1_loss(model(batch[0]), batch[0]).item(), rel=1e-6)


class GanBrain(Brain):
    """In the manner of SpeechBrain's recipes: two optimizers in attributes, stepped by its own ``fit_batch``."""

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.generator(batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage, optim_name: str = "") -> Any:
        real, fake = self.modules.discriminator(batch).mean(), self.modules.discriminator(predictions).mean()
        if optim_name == "generator":
            return (1 - fake).square()
        if optim_name == "discriminator":
            return (1 - real).square() + fake.square()
        return (predictions - batch).abs().mean()

    def fit_batch(self, batch: Any) -> Tensor:
        self.numbers.append(self.step)
        losses = []
        for name, optimizer in (("generator", self.g_optimizer), ("discriminator", self.d_optimizer)):
            optimizer.zero_grad()
            predictions = self.compute_forward(batch, Stage.TRAIN)
            losses.append(self.compute_objectives(predictions, batch, Stage.TRAIN, name))
            losses[-1].backward()
            optimizer.step()
        return losses[0].detach() + losses[1].detach()

    def init_optimizers(self) -> None:
        self.g_optimizer = self.hparams.g_opt_class(self.modules.generator.parameters())
        self.d_optimizer = self.hparams.d_opt_class(self.modules.discriminator.parameters())

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        if stage is Stage.TRAIN:
            self.numbers: list[int] = []

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.ends = [*getattr(self, "ends", []), (stage, stage_loss, epoch)]


GAN_OPTIMIZERS = {"g_opt_class": lambda x: SGD(x, 0.1), "d_opt_class": lambda x: SGD(x, 0.05)}
NOISY = [torch.full((3, 2), 0.5 * number) for number in range(1, 5)]


def gan() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"generator": nn.Linear(2, 2), "discriminator": nn.Linear(2, 1)}


def parameters_of(modules: dict[str, nn.Module]) -> list[Tensor]:
    return list(nn.ModuleDict(modules).parameters())


def gan_by_hand(modules: dict[str, nn.Module]) -> list[float]:
    """Train on NOISY once as GanBrain says; the sum of both losses for each batch."""
    generator, discriminator = modules["generator"], modules["discriminator"]
    of_generator, of_discriminator = SGD(generator.parameters(), 0.1), SGD(discriminator.parameters(), 0.05)
    sums = []
    for batch in NOISY:
        of_generator.zero_grad()
        fooled = (1 - discriminator(generator(batch)).mean()).square()
        fooled.backward()
        of_generator.step()
        of_discriminator.zero_grad()
        told = (1 - discriminator(batch).mean()).square() + discriminator(generator(batch)).mean().square()
        told.backward()
        of_discriminator.step()
        sums.append((fooled + told).item())
    return sums


def test_a_brain_whose_fit_batch_steps_two_optimizers_of_its_own_trains_as_by_hand_and_its_loss_is_reported() -> None:
    modules, expected = gan(), gan()
    brain = GanBrain(modules, hparams=GAN_OPTIMIZERS, run_opts={"device": "cpu"})
    brain.fit(range(1), iter_of(NOISY), iter_of(NOISY))
    sums = gan_by_hand(expected)
    assert all(map(torch.equal, parameters_of(modules), parameters_of(expected)))
    with torch.no_grad():
        validated = [(expected["generator"](batch) - batch).abs().mean().item() for batch in NOISY]
    assert brain.ends == [
        (Stage.TRAIN, pytest.approx(sum(sums) / 4, rel=1e-6), 0),
        (Stage.VALID, pytest.approx(sum(validated) / 4, rel=1e-6), 0),
    ]


def test_what_such_a_brain_did_is_counted_and_it_knows_the_number_of_its_batch() -> None:
    brain = GanBrain(gan(), hparams=GAN_OPTIMIZERS)
    brain.fit(range(2), iter_of(NOISY))
    assert brain.numbers == [1, 2, 3, 4]
    assert trainable_of(brain).counters == {"iteration": 8, "update": 8, "epoch": 2, "samples": 24, "phase_index": 0}


def iter_of(batches: list[Any]) -> Any:
    """A loader: it gives the batches in each pass, and cannot be indexed as a dataset can."""

    class Loader:
        def __iter__(self) -> Any:
            return iter(batches)

        def __len__(self) -> int:
            return len(batches)

    return Loader()


def test_two_optimizers_in_optimizers_dict_are_both_driven_by_the_loss() -> None:
    class Both(SimpleBrain):
        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return self.modules.second(self.modules.first(batch[0]))

        def init_optimizers(self) -> None:
            self.optimizers_dict = {
                "first": SGD(self.modules.first.parameters(), 0.1),
                "second": SGD(self.modules.second.parameters(), 0.2),
            }

    torch.manual_seed(0)
    modules, batch = {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)}, [torch.rand(4, 3)]
    expected = copy.deepcopy(modules)
    optimizers = [SGD(expected["first"].parameters(), 0.1), SGD(expected["second"].parameters(), 0.2)]
    nn.functional.l1_loss(expected["second"](expected["first"](batch[0])), batch[0]).backward()
    for optimizer in optimizers:
        optimizer.step()
    Both(modules).fit(range(1), iter_of([batch]))
    assert all(map(torch.equal, parameters_of(modules), parameters_of(expected)))


def test_an_evaluate_batch_of_its_own_gives_the_loss_of_validation_and_test() -> None:
    class Own(SimpleBrain):
        def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
            return batch[0].mean()

    brain, batches = Own({"model": nn.Linear(1, 1)}), [[torch.full((2, 1), 3.0)], [torch.full((6, 1), 7.0)]]
    assert brain.evaluate(iter_of(batches)) == pytest.approx((2 * 3 + 6 * 7) / 8)


def test_an_evaluate_batch_of_its_own_may_call_the_one_that_it_replaces() -> None:
    class Doubling(SimpleBrain):
        def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
            return 2 * super().evaluate_batch(batch, stage)

    modules, batches = {"model": nn.Linear(1, 1)}, [[torch.ones(2, 1)]]
    plain, doubled = SimpleBrain(modules).evaluate(iter_of(batches)), Doubling(modules).evaluate(iter_of(batches))
    assert doubled == pytest.approx(2 * plain)


def test_annealing_in_on_stage_end_changes_the_rate_that_is_used_afterwards() -> None:
    class Annealing(SimpleBrain):
        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            return self.modules.model.weight.sum()

        def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] /= 10

    model = nn.Linear(1, 1)
    before = model.weight.item()
    Annealing({"model": model}, opt_class=lambda x: SGD(x, 1.0)).fit(range(3), iter_of([[torch.ones(1, 1)]]))
    assert model.weight.item() == pytest.approx(before - 1.0 - 0.1 - 0.01)


def test_a_make_dataloader_of_its_own_makes_the_batches_of_every_pass() -> None:
    class Loading(SimpleBrain):
        def make_dataloader(
            self, dataset: Any, stage: Stage, ckpt_prefix: Any = "dataloader-", **loader_kwargs: Any
        ) -> Any:
            made.append((stage, loader_kwargs))
            return super().make_dataloader(dataset, stage, **{"batch_size": 2, **loader_kwargs})

    made: list[Any] = []
    data, brain = [[torch.ones(1)]] * 4, Loading({"model": nn.Linear(1, 1)}, opt_class=lambda x: SGD(x, 0.1))
    brain.fit(range(1), data, data, train_loader_kwargs={"batch_size": 4}, valid_loader_kwargs={"drop_last": True})
    brain.evaluate(data, test_loader_kwargs={"num_workers": 0})
    assert [stage for stage, _ in made] == [Stage.TRAIN, Stage.VALID, Stage.TEST]
    assert [given for _, given in made] == [{"batch_size": 4}, {"drop_last": True}, {"num_workers": 0}]
    assert trainable_of(brain).counters["iteration"] == 1


OF_SPEECHBRAIN = {
    "avg_train_loss", "check_gradients", "check_loss_isfinite", "checkpointer", "compute_forward", "compute_objectives", "device_type",
    "evaluate", "evaluate_batch", "evaluation_ctx", "fit", "fit_batch", "freeze_optimizers", "hparams", "init_optimizers",
    "make_dataloader", "modules", "no_sync", "nonfinite_count", "on_evaluate_start", "on_fit_batch_end", "on_fit_batch_start",
    "on_fit_start", "on_stage_end", "on_stage_start", "opt_class", "optimizer", "optimizer_step", "optimizers_dict",
    "optimizers_step", "print_trainable_parameters", "raw_modules", "scaler", "step", "train_sampler", "training_ctx",
    "update_average", "zero_grad",
}  # fmt: skip
"""What its Brain has, beside the options of a run."""
OURS = {"bind", "count_samples", "log", "readable", "target"}
ONCE_OURS = (
    "train_loss", "logged", "train_state", "counts_batches", "options", "optim_schedulers", "look", "total", "reads", "prepare",
    "evaluated", "configure", "begin_pass", "end_pass", "samples_of", "in_run", "metrics",
)  # fmt: skip


class Recipe(SimpleBrain):
    """Keeps the loss of each pass, as recipes of SpeechBrain do in ``train_loss``, under whatever name."""

    def __init__(self, modules: Any, names: tuple[str, ...] = (), **keywords: Any) -> None:
        super().__init__(modules, **keywords)
        self.names = names

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return (predictions - 1).abs().mean()

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        self.losses = [*vars(self).get("losses", ()), (stage.name, stage_loss)]
        vars(self).update(dict.fromkeys(self.names, stage_loss))


@pytest.mark.parametrize("names", [("train_loss",), ONCE_OURS, tuple(OURS)])
def test_a_recipe_may_give_its_attributes_any_name_that_speechbrain_does_not_use(names: tuple[str, ...]) -> None:
    ended = []
    for given in ((), names):
        torch.manual_seed(0)
        brain = Recipe({"model": nn.Linear(3, 3)}, given, opt_class=lambda x: SGD(x, 0.1))
        batches = [[torch.rand(4, 3)], [torch.rand(2, 3)]]
        brain.fit(range(3), iter_of(batches), iter_of(batches))
        brain.evaluate(iter_of(batches))
        ended.append((brain.losses, brain.modules.model.weight.tolist()))
    assert ended[0] == ended[1]
    assert [stage for stage, _ in ended[1][0]] == ["TRAIN", "VALID"] * 3 + ["TEST"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("names", [("train_loss",), ONCE_OURS, tuple(OURS)])
def test_so_it_may_in_a_run(config: Any, make_table: Any, names: tuple[str, ...]) -> None:
    ended = []
    for given in ((), names):
        chosen = config(epochs=3, valid_interval=[2, "1 epoch"], save_interval=2)
        model = partial(lambda names: Recipe({"model": nn.Linear(3, 1)}, names), given)
        data = {"dataset_name": "data", "valid_dataset_name": "data", "metrics": {"mae": {"class": "MAE"}}}
        context = GeneralTrainer({**chosen, "phase": [{"name": "line", "model": model, **data}]}).run()
        ended.append((context["model"]["line"]["brain"].losses, context["metrics"]))
    assert ended[0] == ended[1]
    assert ended[1][0][-2:] == [
        (stage, ended[1][1]["line"][name]) for stage, name in (("TRAIN", "loss"), ("VALID", "valid_loss"))
    ]


def test_every_other_name_of_ours_begins_with_an_underscore() -> None:
    brain = SimpleBrain({"model": nn.Linear(3, 3)}, opt_class=lambda x: SGD(x, 0.1))
    brain.fit(range(1), iter_of([[torch.rand(4, 3)]]))
    options = set(RunOptions.model_fields)
    assert {name for name in dir(brain) if not name.startswith("_")} - options == OF_SPEECHBRAIN | OURS


def test_options_and_hyperparameters_are_attributes() -> None:
    brain = SimpleBrain(hparams={"width": 3, "max_grad_norm": 2.0, "debug": True}, run_opts={"debug": False})
    assert (brain.hparams.width, brain.max_grad_norm, brain.debug, brain.debug_batches) == (3, 2.0, False, 2)
    assert brain.precision == "fp32"
