"""``ema``: averages as torch's ``AveragedModel`` makes them by hand; who gets them, and who the training weights."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from pipeline_plugins.ema import Ema
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipeline import Context, GeneralTrainer, RunnerBase, UpdaterBase, hookimpl, stages
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import ConfigError
from pipeline.signals import StoppedError
from tests.training.conftest import Kill, KilledError, linear_config, mse, table

Weights = dict[str, Tensor]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def config(*plugins: Any, **runner: Any) -> dict[str, Any]:
    """3 epochs of 3 batches, each validated on one batch; the phase ``line``."""
    made = linear_config(**{"epochs": 3, **runner})
    made["phase"][0] |= {"model": network, "valid_dataset_name": "valid"}
    made["dataset"].append({"name": "valid", "class_path": lambda: table(10, seed=2), "batch_size": 10})
    made["plugins"] += plugins
    return made


class Epoch:
    """What the loop by hand has at the end of an epoch."""

    def __init__(self, network: nn.Module, average: nn.Module) -> None:
        self.training = {name: value.clone() for name, value in network.state_dict().items()}
        self.average = {name: value.clone() for name, value in average.state_dict().items()}
        average.eval()
        x, y = table(10, seed=2).tensors
        with torch.no_grad():
            self.loss = mse(average(x), y).item()
        average.train()


def by_hand(
    decay: float | None = None,
    *,
    every: int = 1,
    at_ends: bool = False,
    start_epoch: int = 0,
    use_buffers: bool = True,
    window: int = 1,
    discarded: Collection[int] = (),
) -> list[Epoch]:
    """The loop of a torch tutorial with an ``AveragedModel``; an equal average without a decay."""
    torch.manual_seed(0)
    model, (x, y) = network(), table(10).tensors
    ema: Any = get_ema_multi_avg_fn
    averaged = AveragedModel(model, multi_avg_fn=ema(decay) if decay else None, use_buffers=use_buffers)
    optimizer, epochs, step, updates = torch.optim.SGD(model.parameters(), lr=0.1), [], 0, 0
    for epoch in range(3):
        for number, indices in enumerate(torch.arange(10).split(4)):
            step += 1
            loss = mse(model(x[indices]), y[indices])
            if step in discarded:
                continue
            (loss * len(indices)).backward()
            if (number + 1) % window and number < 2:
                continue
            samples = sum([4, 4, 2][number // window * window : number + 1])
            for parameter in model.parameters():
                parameter.grad /= samples
            optimizer.step()
            optimizer.zero_grad()
            updates += epoch >= start_epoch
            if epoch >= start_epoch and not at_ends and updates % every == 0:
                averaged.update_parameters(model)
        if at_ends and epoch >= start_epoch:
            averaged.update_parameters(model)
        epochs.append(Epoch(model, averaged.module if averaged.n_averaged else model))
    return epochs


def run(config: dict[str, Any], **more: Any) -> Context:
    return GeneralTrainer({**config, **more.pop("keys", {})}, **more).run()


def same(one: Weights, other: Weights) -> bool:
    """Bit for bit; how many batches a BatchNorm has seen is nothing to average."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one if not name.endswith("num_batches_tracked"))


def saved(context: Context, iteration: int) -> Weights:
    return load_file(context["run_dir"] / "train" / "checkpoints" / f"step-{iteration:012d}" / "line.safetensors")


AVERAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"decay": 0.999}),
    ({"decay": 0.9}, {"decay": 0.9}),
    ({"decay": 0.9, "use_buffers": False}, {"decay": 0.9, "use_buffers": False}),
    ({"average": "equal"}, {}),
    ({"decay": 0.5, "every": 2}, {"decay": 0.5, "every": 2}),
    ({"decay": 0.5, "every": "4 updates", "start_epoch": 1}, {"decay": 0.5, "every": 4, "start_epoch": 1}),
    ({"average": "equal", "every": "1 epoch", "start_epoch": 1}, {"at_ends": True, "start_epoch": 1}),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("arguments", "hand"), AVERAGES)
def test_the_averages_are_those_of_torch_by_hand_bit_for_bit(arguments: dict[str, Any], hand: dict[str, Any]) -> None:
    numbers: list[float] = []

    class Numbers:
        @hookimpl
        def after_validation(self, metrics: dict[str, float]) -> None:
            numbers.append(metrics["loss"])

    context, epochs = run(config({"ema": arguments}, Numbers, save_inference_interval=1)), by_hand(**hand)
    for number, epoch in enumerate(epochs, 1):
        assert same(saved(context, number * 3), epoch.average)
        exported = f"line-{number * 3:012d}.safetensors"
        assert same(load_file(context["run_dir"] / "train" / "inference" / exported), epoch.average)
    assert same(context["model"]["line"].model.state_dict(), epochs[-1].average)
    assert numbers == pytest.approx([epoch.loss for epoch in epochs], rel=1e-6)


def test_training_never_has_the_averages() -> None:
    without, context = run(config()), run(config({"ema": {"decay": 0.9}}))
    assert context["metrics"]["line"]["loss"] == without["metrics"]["line"]["loss"]
    assert context["metrics"]["line"]["valid_loss"] != without["metrics"]["line"]["valid_loss"]
    path = context["checkpointer"].newest()
    state = read_checkpoint(path).training["recoverables"]["plugin:ema"]
    own = {name: value for name, value in saved(without, 9).items() if not name.endswith("tracked")}
    assert same(state["models"]["line"]["weights"], own)
    assert (state["models"]["line"]["averaged"], state["updates"]) == (9, {"line": 9})


def test_an_update_is_a_window_in_which_an_optimizer_has_stepped() -> None:
    context = run(config({"ema": {"decay": 0.9}}, accum_grad=2))
    assert same(saved(context, 9), by_hand(0.9, window=2)[-1].average)


class Steps(UpdaterBase):
    """Does not know which batch is the last: the end of the pass closes the window."""

    def __init__(self, model: nn.Module, optim_schedulers: Any) -> None:
        super().__init__()
        self.model, self.scheduler = model, optim_schedulers["main"]

    def update(self, batch: Any) -> None:
        self.scheduler.step(mse(self.model(batch[0]), batch[1]))


def test_an_update_that_the_end_of_a_pass_makes_counts() -> None:
    made = config({"ema": {"decay": 0.9}}, accum_grad=2)
    made["phase"][0]["updater"] = {"class_path": Steps}
    assert same(saved(run(made), 9), by_hand(0.9, window=2)[-1].average)


class Infinite(nn.Module):
    """A loss that is infinite in one batch of training."""

    calls = 0

    def forward(self, predictions: Tensor, target: Tensor) -> Tensor:
        loss = mse(predictions, target)
        if torch.is_grad_enabled():
            Infinite.calls += 1
            loss = loss * torch.inf if Infinite.calls == 5 else loss
        return loss


def test_a_discarded_window_is_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Infinite, "calls", 0)
    made = config({"ema": {"average": "equal"}})
    made["phase"][0]["loss"] = Infinite()
    assert same(saved(run(made), 9), by_hand(discarded=[5])[-1].average)


class Skips:
    """Leaves out one update."""

    @hookimpl
    def before_update(self, context: Context, optim_scheduler: Any) -> None:
        if context["train_state"]["iteration"] == 4:
            optim_scheduler.skip_update()


def test_an_update_that_a_plugin_has_skipped_is_none() -> None:
    assert same(saved(run(config({"ema": {"average": "equal"}}, Skips)), 9), by_hand(discarded=[5])[-1].average)


def sgd(part: str) -> dict[str, Any]:
    arguments = {"optim_type": "SGD", "optim_conf": {"lr": 0.1}, "updated_modules": part}
    return {"class": "constant", "args": arguments}


def test_several_optimizers_of_a_phase_make_one_update() -> None:
    made = config({"ema": {"decay": 0.9}})
    made["phase"][0]["optim_schedulers"] = {f"layer {layer}": sgd(f"model.{layer}") for layer in range(3)}
    del made["hyper_parameters"]
    assert same(saved(run(made), 9), by_hand(0.9)[-1].average)


def test_phases_that_share_a_model_have_one_average_and_others_their_own() -> None:
    made = config({"ema": {"average": "equal"}})
    line = made["phase"][0]
    made["phase"] += [
        {"name": "again", "model_of": "line", "dataset_name": "data"},
        {**line, "name": "other", "dataset_name": "valid"},
    ]
    path = run(made)["checkpointer"].newest()
    models = read_checkpoint(path).training["recoverables"]["plugin:ema"]["models"]
    assert {name: state["averaged"] for name, state in models.items()} == {"line": 18, "other": 3}


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3, 4, 7])
def test_a_run_that_was_killed_goes_on_bit_for_bit(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ema = {"decay": 0.9, "every": 2, "start_epoch": 1}
    made = {**config({"ema": ema}, Kill, save_interval="1 iteration"), "name": "killed"}
    monkeypatch.setattr(Kill, "at", -1)
    straight = run(made, keys={"output_dir": "straight"})
    monkeypatch.setattr(Kill, "at", at)
    with pytest.raises(KilledError):
        run(made)
    monkeypatch.setattr(Kill, "at", -1)
    resumed = run(made, resume="auto")
    for name in ("line", "training"):
        files = [run["checkpointer"].newest() / f"{name}.safetensors" for run in (straight, resumed)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert resumed["metrics"] == straight["metrics"]


def test_of_two_the_last_one_gives_its_averages_and_both_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [{"name": f"ema{decay}", "class_path": "ema", "args": {"decay": decay / 10}} for decay in (5, 9)]
    made = {**config(*both, Kill, save_interval="1 iteration"), "name": "two"}
    monkeypatch.setattr(Kill, "at", 5)
    with pytest.raises(KilledError):
        run(made)
    monkeypatch.setattr(Kill, "at", -1)
    context = run(made, resume="auto")
    assert same(saved(context, 9), by_hand(0.9)[-1].average)
    states = read_checkpoint(context["checkpointer"].newest()).training["recoverables"]
    kept = [states[f"plugin:ema{decay}"]["models"]["line"]["weights"] for decay in (5, 9)]
    hand = by_hand(0.5)[-1]
    for weights, expected in zip(kept, (hand.training, hand.average), strict=True):
        assert same(weights, {name: expected[name] for name in weights})


class Validated:
    """A metric; in one of its calls something happens."""

    at = 0
    calls = 0
    happens: Callable[[], None]

    def reset(self) -> None: ...

    def update(self, predictions: Tensor, target: Tensor) -> None:
        Validated.calls += 1
        if Validated.calls == Validated.at:
            Validated.happens()

    def compute(self) -> float:
        return 0.0


@pytest.fixture
def happens(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Has something happen in the middle of one of the validations."""

    def at(number: int, what: Callable[[], None]) -> None:
        monkeypatch.setattr(Validated, "calls", 0)
        monkeypatch.setattr(Validated, "at", number)
        monkeypatch.setattr(Validated, "happens", what, raising=False)

    return at


def judged(*plugins: Any, **runner: Any) -> dict[str, Any]:
    made = config(*plugins, **runner)
    made["phase"][0]["metrics"] = {"own": {"class": Validated}}
    return made


def test_a_signal_in_the_middle_of_a_validation_loses_nothing(happens: Callable[..., None]) -> None:
    made = {**judged({"ema": {"decay": 0.9}}), "name": "signalled"}
    happens(0, lambda: None)
    straight = run(made, keys={"output_dir": "straight"})
    happens(2, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedError):
        run(made)
    resumed = run(made, resume="auto")
    assert resumed["metrics"] == straight["metrics"]
    assert same(saved(resumed, 6), saved(straight, 6))
    files = [run["checkpointer"].newest() / "training.safetensors" for run in (straight, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def fail() -> None:
    raise ZeroDivisionError


def test_after_an_error_in_a_validation_the_training_weights_are_back(happens: Callable[..., None]) -> None:
    happens(2, fail)
    seen: list[Weights] = []

    class Terminal(stages.Terminal):
        def abort(self, context: Context, error: BaseException) -> None:
            seen.append(context["model"]["line"].model.state_dict())

    with pytest.raises(ZeroDivisionError):
        run(judged({"ema": {"decay": 0.9}}, terminal_class_path=Terminal))
    assert same(seen[0], by_hand(0.9)[1].training)


class Patient(RunnerBase):
    """Goes on where a validation fails."""

    def run(self, context: Context) -> None:
        for _ in context.epochs():
            for batch in context.batches("line"):
                context["model"]["line"].brain.fit_batch(batch)
                if context["train_state"]["iteration"] == 4:
                    with pytest.raises(ZeroDivisionError):
                        context.validate()


def test_a_loop_that_goes_on_after_an_error_in_a_validation_trains_on(happens: Callable[..., None]) -> None:
    happens(2, fail)
    context = run(judged({"ema": {"decay": 0.9}}, runner_class_path=Patient))
    assert same(saved(context, 9), by_hand(0.9)[-1].average)


def test_best_gives_the_averages_that_it_was_chosen_for_and_goes_on_with_the_training_weights() -> None:
    made = {**config({"ema": {"decay": 0.9}}, keep_best={"metric": "valid_loss", "mode": "min"}), "name": "best"}
    made["hyper_parameters"]["optimizer"] = {"class": "SGD", "lr": 0.1, "momentum": 0.9}
    made["runner"] += [
        {"name": "judge", "class": "infer", "device": "cpu", "init_model_path": "best"},
        {"name": "fine_tune", "class": "train", "device": "cpu", "epochs": 1, "init_model_path": "best"},
    ]
    trainer = GeneralTrainer({**made, "mode": ["train", "judge"]})
    trainer.run()
    train, judge = trainer.contexts["train"], trainer.contexts["judge"]
    best = train["best"]
    assert best is not None
    assert judge["metrics"]["line"]["loss"] == best["value"]
    path = train["checkpointer"].best("valid_loss", "min")
    assert path is not None
    straight = {name: (path.parent / "step-000000000009" / name).read_bytes() for name in FILES}
    resumed = run({**made, "mode": "train"}, resume=path.parent / "step-000000000003")
    assert {name: (resumed["checkpointer"].newest() / name).read_bytes() for name in FILES} == straight


@pytest.mark.parametrize("kind", ["train", "infer"])
def test_first_weights_from_another_run_are_its_averages(kind: str) -> None:
    first = run(config({"ema": {"decay": 0.9}}))
    other = config(init_model_path={"run": str(first["run_dir"]), "which": "last"}, **{"class": kind})
    if kind == "infer":
        del other["runner"][0]["epochs"], other["hyper_parameters"]
        assert run(other)["metrics"]["line"]["loss"] == pytest.approx(by_hand(0.9)[-1].loss, rel=1e-6)
    else:
        given = run(other | {"plugins": [*other["plugins"], First]})["given"]
        assert same(given, by_hand(0.9)[-1].average)


class First:
    """Keeps the weights with which the training begins."""

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        weights = context["model"]["line"]["model"].state_dict()
        context.setdefault("given", {name: value.clone() for name, value in weights.items()})


FILES = ("line.safetensors", "training.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"average": "mean"}, "average is 'mean'; write exponential or equal"),
     ({"decay": 1.0}, "decay is 1.0; write a number between 0 and 1"),
     ({"decay": 0.9, "average": "equal"}, "decay is 0.9, which an equal average does not have; leave it out"),
     ({"every": "2 second"}, "every is '2 second'; write a number of updates, or '1 epoch'"),
     ({"every": 0}, "every is 0; write a number of updates"), ({"start_epoch": -1}, "start_epoch is -1; write 0")],
)  # fmt: skip
def test_an_argument_out_of_range_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"ema: {message}"):
        Ema(**arguments)
