"""What a checkpoint keeps beside weights and optimizers: resumed runs against unbroken ones, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Brain, Context, GeneralTrainer, Stage, Updater, UpdaterBase, hookimpl, stages
from pipeline.checkpoint.comparison import differences
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import CheckpointError
from pipeline.stages.base import RunnerBase
from tests.training.conftest import Kill, KilledError, mse, table

AT = 5
Options = dict[str, Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def config(runner: Options | None = None, **phase: Any) -> Options:
    """Three epochs of 3 batches, saved after each."""
    settings = {"epochs": 3, "save_interval": 1, **(runner or {})}
    return {
        "name": "state",
        "plugins": [{"progress_bar": False}, Kill],
        "hyper_parameters": {"optimizer": {"class": "Adam", "lr": 0.1}},
        "dataset": [{"name": "d", "class_path": lambda: table(12), "batch_size": 4, "shuffle": True}],
        "runner": [{"name": "t", "class": "train", "device": "cpu", **settings}],
        "phase": [{"name": "p", "model": net, "loss": mse, "dataset_name": "d", **phase}],
    }


def both(monkeypatch: pytest.MonkeyPatch, chosen: Options) -> tuple[Context, Context]:
    """The contexts of a run that nothing interrupts, and of one that is killed and resumed."""
    monkeypatch.setattr(Kill, "at", -1)
    unbroken = GeneralTrainer(chosen).run()
    monkeypatch.setattr(Kill, "at", AT)
    with pytest.raises(KilledError):
        GeneralTrainer(chosen).run()
    monkeypatch.setattr(Kill, "at", -1)
    return unbroken, GeneralTrainer(chosen, resume="auto").run()


def end(context: Context) -> Options:
    """Weights, optimizers and numbers."""
    entry = context["model"]["p"]
    lines = (context["run_dir"] / "t" / "metrics.jsonl").read_text(encoding="utf-8")
    schedulers = {name: each.state_dict() for name, each in entry["optim_schedulers"].items()}
    return {"weights": entry["brain"].modules.state_dict(), "optim_schedulers": schedulers, "lines": lines}


def unlike(contexts: tuple[Context, Context]) -> list[str]:
    return [str(each) for each in differences(*map(end, contexts))]


class Fresh(Brain):
    """Begins each fit with weights and counters of its own."""

    def __init__(self) -> None:
        super().__init__({"net": net()})
        self.begins = 0

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.begins += 1
        with torch.no_grad():
            self.modules.net[0].bias.fill_(0.5)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


def test_what_on_fit_start_sets_is_taken_back_by_a_resumed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = both(monkeypatch, config(model=Fresh, loss=None))
    assert unlike(contexts) == []
    assert [each["model"]["p"]["brain"].begins for each in contexts] == [1, 1]


class OwnRunner(RunnerBase):
    """Trains by itself, and saves after each batch."""

    def run(self, context: Context) -> None:
        entry, state = context["model"]["p"], context["train_state"]
        for batch in list(context["dataset"]["d"]) * 3:
            if state["iteration"] == Kill.at:
                raise KilledError
            if state["iteration"] < 9:
                entry["brain"].fit_batch(batch)
                state["iteration"] += 1
                context["checkpointer"].save(context["model"], state, {})
        context["current_epoch"], context["metrics"] = 0, {}


def test_on_fit_start_comes_before_a_runner_of_ones_own_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = {"runner_class_path": OwnRunner}
    for context in both(monkeypatch, config(runner, model=Fresh, loss=None)):
        assert context["model"]["p"]["brain"].begins == 1
        assert not torch.all(context["model"]["p"]["brain"].modules.net[0].bias == 0.5)


class Centred(nn.Module):
    """A loss with a running centre, as DINO's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))
        self.centre: Tensor

    def forward(self, predictions: Tensor, target: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * predictions.detach().mean(0)
        return mse(predictions - self.centre, target)


def test_a_loss_that_is_a_module_is_resumed_with_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unlike(both(monkeypatch, config(loss=Centred))) == []


class Teacher(Fresh):
    """Keeps modules beside those that it trains: one follows them, one is among its hparams."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = net().requires_grad_(False)
        self.hparams.norm = nn.BatchNorm1d(3, affine=False)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net(self.hparams.norm(batch[0])) + self.teacher(batch[0])

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        for own, other in zip(self.teacher.parameters(), self.modules.parameters(), strict=True):
            own.lerp_(other.detach(), 0.1)


def test_modules_that_a_brain_keeps_beside_its_own_are_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unlike(both(monkeypatch, config(model=Teacher, loss=None))) == []


class Alternating(UpdaterBase):
    """Steps optimizers of its own, one of them at a falling rate."""

    def __init__(self, brain: Brain, optim_schedulers: Any, lr: float = 0.1) -> None:
        super().__init__()
        self.brain, self.schedulers = brain, optim_schedulers
        first, last = brain.modules["model"][0], brain.modules["model"][2]
        self.first = torch.optim.Adam(first.parameters(), lr)
        self.others = {"last": torch.optim.SGD(last.parameters(), lr, momentum=0.9)}
        self.falling = torch.optim.lr_scheduler.ExponentialLR(self.first, 0.9)

    def update(self, batch: Any) -> Tensor:
        loss = mse(self.brain.modules["model"](batch[0]), batch[1])
        torch.autograd.backward(loss)
        for each in (self.first, self.others["last"]):
            each.step()
            each.zero_grad()
        self.falling.step()
        return loss


class Momentum:
    """Steps parameters by the mean of their gradients, ever less. It is no optimizer of torch's, but keeps its state."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self.means = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for parameter, mean in zip(self.parameters, self.means, strict=True):
            mean.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.1 / self.steps * mean)
            parameter.grad = None

    def state_dict(self) -> Options:
        return {"means": self.means, "steps": self.steps}

    def load_state_dict(self, state: Options) -> None:
        self.steps = state["steps"]
        for mean, saved in zip(self.means, state["means"], strict=True):
            mean.copy_(saved)


class Stepping(UpdaterBase):
    """Steps by objects of its own: in an attribute, in a list, in a dict, and within one that saves it."""

    def __init__(self, brain: Brain, optim_schedulers: Any) -> None:
        super().__init__()
        self.brain = brain
        parameters = [*brain.modules.parameters()]
        self.first = Momentum(parameters[:1])
        self.listed = [Momentum(parameters[1:2])]
        self.named = {"third": Momentum(parameters[2:3])}
        self.kit = SavingKit(Momentum(parameters[3:]))

    def update(self, batch: Any) -> Tensor:
        loss = mse(self.brain.modules["model"](batch[0]), batch[1])
        torch.autograd.backward(loss)
        for momentum in (self.first, *self.listed, self.named["third"], self.kit.deep["list"][0]):
            momentum.step()
        return loss


class Kit:
    """An object of the user that holds another one deep in itself."""

    __slots__ = ("deep",)

    def __init__(self, held: Any) -> None:
        self.deep = {"list": [held]}


class SavingKit(Kit):
    """The same, which saves it."""

    def state_dict(self) -> Options:
        return {"held": self.deep["list"][0].state_dict()}

    def load_state_dict(self, state: Options) -> None:
        self.deep["list"][0].load_state_dict(state["held"])


class Covering(Alternating):
    """The same, with the state of one of them in its own."""

    def state_dict(self) -> Options:
        return {**super().state_dict(), "first": self.first.state_dict()}

    def set_state_dict(self, state_dict: Any) -> None:
        super().set_state_dict(state_dict)
        self.first.load_state_dict(state_dict["first"])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("updater", [Alternating, Stepping, Covering])
def test_optimizers_and_other_objects_of_an_updater_are_resumed(updater: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken, resumed = both(monkeypatch, config(updater={"class_path": updater}))
    assert unlike((unbroken, resumed)) == []
    kept = [read_checkpoint(each["checkpointer"].newest()).training["parts"] for each in (unbroken, resumed)]
    assert [place for place, state in kept[0].items() if state is None] == (
        ["phase.p.updater.first"] if updater is Covering else []
    )
    assert not any(differences(*kept))


class Nested(Alternating):
    """Keeps an optimizer deep in an object that does not save it."""

    def __init__(self, brain: Brain, optim_schedulers: Any) -> None:
        super().__init__(brain, optim_schedulers)
        self.kit = Kit(torch.optim.Adam(brain.modules.parameters(), 0.1))
        self.kits = {"other": Kit(self.others["last"])}


class Scaling(UpdaterBase):
    """Trains a scale of its own, on the gradients of two batches each."""

    def __init__(self, brain: Brain, optim_schedulers: Any) -> None:
        super().__init__()
        self.model, self.scale = brain.modules["model"], nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.scale.parameters()], 0.1)
        self.batches = 0

    def update(self, batch: Any) -> Tensor:
        loss = mse(self.scale(self.model(batch[0])), batch[1])
        torch.autograd.backward(loss)
        self.batches += 1
        if self.batches % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def state_dict(self) -> Options:
        return {**super().state_dict(), "batches": self.batches}

    def set_state_dict(self, state: Options) -> None:
        self.batches = state["batches"]
        super().set_state_dict({name: value for name, value in state.items() if name != "batches"})


def test_open_gradients_of_a_module_that_an_updater_holds_are_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config({"save_interval": "1 iteration"}, updater={"class_path": Scaling})
    unbroken, resumed = both(monkeypatch, chosen)
    assert unlike((unbroken, resumed)) == []
    scales = [context["model"]["p"]["updater"].scale.state_dict() for context in (unbroken, resumed)]
    assert list(differences(*scales)) == []


def test_deeper_optimizer_is_named_once(log_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", -1)
    context = GeneralTrainer(config({"save_interval": "1 iteration"}, updater={"class_path": Nested})).run()

    warnings = [line for line in log_lines if line.startswith("WARNING") and "do not find" in line]
    assert len(warnings) == 1
    assert "phase.p.updater.kit.deep.list.0 (Adam)" in warnings[0]
    assert "add_recoverable(name, object)" in warnings[0]
    # It is saved, and stands elsewhere too.
    assert "kits" not in warnings[0]
    saved = read_checkpoint(context["checkpointer"].newest()).training["parts"]
    assert saved.keys() == {"phase.p.updater.first", "phase.p.updater.others.last", "phase.p.updater.falling"}


class Registering(stages.Runner):
    """Saves an object of the updater under a name too."""

    def run(self, context: Context) -> None:
        context["checkpointer"].add_recoverable("first", context["model"]["p"]["updater"].first)
        super().run(context)


def test_object_that_a_runner_registers_is_saved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config({"runner_class_path": Registering}, updater={"class_path": Stepping})
    contexts = both(monkeypatch, chosen)

    assert unlike(contexts) == []
    for context in contexts:
        saved = read_checkpoint(context["checkpointer"].newest()).training
        assert saved["objects"]["phase.p.updater.first"] is None
        assert saved["recoverables"]["first"].keys() == {"means", "steps"}


class Unsaveable(Updater):
    """Has an object whose state is no plain data."""

    def __init__(self, brain: Brain) -> None:
        super().__init__(brain)
        self.own = Momentum([])
        self.own.means = {1, 2}  # type: ignore[assignment]


def test_state_that_is_no_plain_data_is_named_by_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"\['objects'\]\['phase\.p\.updater\.own'\]\['means'\]: is a set"):
        GeneralTrainer(config({"max_steps": 1}, updater={"class_path": Unsaveable})).run()


def test_a_save_asks_an_updater_for_its_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Asked(Alternating):
        def state_dict(self) -> Options:
            asked.append(self.state.iteration)
            return super().state_dict()

    monkeypatch.setattr(Kill, "at", -1)
    GeneralTrainer(config(updater={"class_path": Asked})).run()
    # After each iteration, and at the end.
    assert asked == [*range(1, 10), 9]


def test_an_updaters_own_optimizer_goes_on_at_the_rate_that_the_config_now_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at(lr: float) -> Options:
        return config(updater={"class_path": Alternating, "args": {"lr": lr}})

    with pytest.raises(KilledError):
        GeneralTrainer(at(0.1)).run()
    monkeypatch.setattr(Kill, "at", -1)
    updater = GeneralTrainer(at(0.05), resume="auto").run()["model"]["p"]["updater"]
    assert updater.others["last"].param_groups[0]["lr"] == 0.05
    assert updater.first.param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**9)


class Unfreeze:
    """A plugin that has what was frozen trained from the fifth batch on."""

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == 4:
            context["model"]["p"]["model"].requires_grad_(True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_what_a_plugin_has_unfrozen_stays_so(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config({"freeze": ["0"], "grad_clip": clip})
    chosen["plugins"].append(Unfreeze)
    contexts = both(monkeypatch, chosen)
    assert unlike(contexts) == []
    assert not torch.equal(contexts[1]["model"]["p"]["model"][0].weight, net()[0].weight)


def test_what_the_config_freezes_of_a_resumed_run_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KilledError):
        GeneralTrainer(config({"freeze": ["0"]})).run()
    monkeypatch.setattr(Kill, "at", -1)
    model = GeneralTrainer(config({"freeze": ["2"]}), resume="auto").run()["model"]["p"]["model"]
    assert [each.requires_grad for each in model.parameters()] == [True, True, False, False]


class Late(Updater):
    """Makes an optimizer with the first batch."""

    def update(self, batch: Any) -> Tensor:
        self.first = torch.optim.Adam(self.brain.modules.parameters(), 0.1)
        return super().update(batch)


class Grow:
    """A plugin that gives the optimizer more to train."""

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if not context["train_state"]["iteration"]:
            optimizer = context["model"]["p"]["optim_schedulers"]["main"].optimizer
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_what_a_resumed_run_could_not_be_given_is_told_by_the_first_save() -> None:
    with pytest.raises(
        CheckpointError, match=r"phase.p.updater.first was made after the training had begun: a resumed"
    ):
        GeneralTrainer(config(updater={"class_path": Late})).run()
    chosen = config()
    chosen["plugins"].append(Grow)
    with pytest.raises(
        CheckpointError, match=r"main had parameter groups of \[4\] when .* and has of \[4, 1\]: a resumed"
    ):
        GeneralTrainer(chosen).run()


class Odd(nn.Module):
    """A model with what few have; a subclass adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.add()

    def add(self) -> None:
        """What is odd of it."""

    def factor(self, x: Tensor) -> Any:
        """What comes of it."""
        return 1.0

    def forward(self, x: Tensor) -> Any:
        return self.net(x) * self.factor(x)


class Lazy(Odd):
    def add(self) -> None:
        self.net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))


class Expanded(Odd):
    def add(self) -> None:
        self.register_buffer("scale", torch.ones(1).expand(3))
        self.scale: Tensor

    def factor(self, x: Tensor) -> Any:
        return self.scale.mean()


class NoneAtFirst(Odd):
    seen: Tensor | None

    def add(self) -> None:
        self.register_buffer("seen", None)

    def factor(self, x: Tensor) -> Any:
        self.seen = x.mean() + 1 if self.seen is None else 0.9 * self.seen + 0.1 * x.mean()
        return self.seen


class Growing(Odd):
    seen: Tensor
    start = 0

    def add(self) -> None:
        self.register_buffer("seen", torch.zeros(self.start, 3))

    def factor(self, x: Tensor) -> Any:
        self.seen = torch.cat([self.seen, x.detach().mean(0, keepdim=True)])
        return 1 + self.seen.mean()


class GrowingFromOne(Growing):
    start = 1


class Vanishing(Odd):
    seen: Tensor | None

    def add(self) -> None:
        self.register_buffer("seen", torch.ones(2))

    def factor(self, x: Tensor) -> Any:
        self.seen, had = None, self.seen
        return 1.0 if had is None else had.mean() + 1


class Metadata(Odd):
    def add(self) -> None:
        self.register_buffer("__metadata__", torch.zeros(1))

    def factor(self, x: Tensor) -> Any:
        return 1 + self.get_buffer("__metadata__").add_(0.1)


class Sparse(Odd):
    def add(self) -> None:
        self.register_buffer("seen", torch.eye(3).to_sparse())
        self.seen: Tensor

    def factor(self, x: Tensor) -> Any:
        self.seen = self.seen * 1.1
        return self.seen.to_dense().mean()


class Extra(Odd):
    """Counts where torch asks for what is no tensor."""

    def add(self) -> None:
        self.count, self.kept = 0, nn.Module()

    def factor(self, x: Tensor) -> Any:
        self.count += 1
        return 1 + self.count / 10

    def get_extra_state(self) -> Any:
        return {"count": self.count, "tensor": torch.tensor([self.count])}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Number(Extra):
    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


ODD = [Lazy, Expanded, NoneAtFirst, Growing, GrowingFromOne, Vanishing, Metadata, Sparse, Extra, Number]


@pytest.mark.slow
@pytest.mark.parametrize("model", ODD)
def test_a_model_is_resumed_whatever_its_state_is_made_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unlike(both(monkeypatch, config(model=model))) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", [Lazy, NoneAtFirst, Growing, Metadata, Extra])
def test_it_is_evaluated_too(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kill, "at", -1)
    chosen = config(model=model)
    infer = {"name": "i", "class": "infer", "device": "cpu"}
    trainer = GeneralTrainer({**chosen, "runner": [*chosen["runner"], infer]})
    weights = trainer.run()["model"]["p"]["model"].state_dict()
    assert weights.keys() == trainer.contexts["t"]["model"]["p"]["model"].state_dict().keys()


class Resized(Odd):
    """Has a longer vector after the first batch."""

    def add(self) -> None:
        self.own = nn.Parameter(torch.ones(2))

    def factor(self, x: Tensor) -> Any:
        self.own.data = torch.ones(3)
        return self.own.sum()


class Added(Odd):
    """Has another part after the first batch."""

    def factor(self, x: Tensor) -> Any:
        self.more = nn.Linear(1, 1)
        return 1.0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Resized,
            r"phase 'p': 'own' was float32 \[2\] when the training began, and is float32 \[3\]: a resumed run could not",
        ),
        (
            Added,
            r"phase 'p': 'more.weight' was not there when the training began, and is float32 \[1, 1\]: a resumed run",
        ),
    ],
)
def test_a_model_that_no_new_one_can_be_made_like_is_told_by_the_first_save(model: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        GeneralTrainer(config({"max_steps": 1}, model=model)).run()


class Words(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.words((x[:, :2].abs() * 3).long()).mean(1))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("optimizer", [{"class": "SGD"}, {"class": "Adam", "lazy_mode": True, "amsgrad": True}])
def test_sparse_gradients_of_an_open_window_are_kept(
    optimizer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config({"accum_grad": 3, "save_interval": 1, "grad_clip": 0.1}, model=Words)
    chosen["hyper_parameters"] = {"optimizer": {**optimizer, "lr": 0.1}}
    chosen["dataset"][0]["class_path"] = lambda: table(16)
    assert unlike(both(monkeypatch, chosen)) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Adam"])
@pytest.mark.slow
def test_the_state_of_an_optimizer_keeps_its_types(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(predictions: Tensor, target: Tensor) -> Tensor:
        return mse(predictions.float(), target)

    class Typed(Odd):
        def forward(self, x: Tensor) -> Any:
            return self.net(x.to(dtype))

    chosen = config(model=lambda: Typed().to(dtype), loss=loss)
    chosen["hyper_parameters"] = {"optimizer": {"class": kind, "lr": 0.01}}
    assert unlike(both(monkeypatch, chosen)) == []
