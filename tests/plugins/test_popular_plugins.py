"""Plugins that users of Lightning, Keras and Hugging Face write most, in at most 30 lines of the public interface.

Each is held against a loop by hand, and against itself in a run that was killed.
"""

from __future__ import annotations

import ast
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeline import Context, GeneralTrainer, hookimpl

Events = dict[str, Callable[..., object]]
# So fast that the loss rises now and then.
SGD = {"class": "SGD", "lr": 0.2, "momentum": 0.9}
LAYERS = ("encoder", "head")


class Unfreeze:
    """BackboneFinetuning: the head learns alone, and the encoder with it from an epoch on."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        for phase in context["model"].values():
            phase.model.encoder.requires_grad_(context["current_epoch"] >= self.epoch)


class SamplePredictions:
    """What the model says of the first samples after each validation."""

    def __init__(self, count: int) -> None:
        self.count, self.rows = count, list[Any]()

    @hookimpl
    def after_validation(self, context: Context, phase: str) -> None:
        model, (inputs, _) = context["model"][phase].model, context["dataset"]["data"].dataset[: self.count]
        model.eval()
        with torch.no_grad():
            self.rows.append(model(inputs.to(context["device"])).flatten().tolist())
        path = context["run_dir"] / context["runner_name"] / "predictions.json"
        path.write_text(json.dumps(self.rows), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class GradientNoise:
    """Noise on each gradient (Neelakantan et al., 2015)."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @hookimpl
    def after_backward(self, context: Context) -> None:
        for phase in context["model"].values():
            for parameter in phase.model.parameters():
                parameter.grad += self.scale * torch.randn_like(parameter)


class LayerwiseRates:
    """A lower learning rate for each layer further from the end, as in fine-tuning BERT."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @hookimpl
    def after_stage(self, name: str, context: Context) -> None:
        if name != "network":
            return
        for phase in context["model"].values():
            layers = [list(layer.parameters()) for layer in phase.model.children() if [*layer.parameters()]]
            for scheduler in phase.optim_schedulers.values():
                (group,) = scheduler.optimizer.param_groups
                own = {key: value for key, value in group.items() if key != "params"}
                rates = [own["lr"] * self.decay**depth for depth in reversed(range(len(layers)))]
                scheduler.optimizer.param_groups[:] = [
                    {**own, "params": layer, "lr": rate} for layer, rate in zip(layers, rates, strict=True)
                ]


class AccumulationSchedule:
    """GradientAccumulationScheduler: the batch of an update grows with the epochs."""

    def __init__(self, batches: dict[str, int]) -> None:
        # The keys of a config are text.
        self.batches = {int(epoch): length for epoch, length in batches.items()}

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        if length := self.batches.get(context["current_epoch"]):
            for phase in context["model"].values():
                for scheduler in phase.optim_schedulers.values():
                    scheduler.accum_grad = length


class ReduceOnPlateau:
    """ReduceLROnPlateau: a lower rate once the validation has not improved for some epochs, under any schedule."""

    def __init__(self, factor: float, patience: int) -> None:
        self.factor, self.patience = factor, patience
        self.best, self.waited, self.share = float("inf"), 0, 1.0

    @hookimpl
    def after_validation(self, metrics: dict[str, float]) -> None:
        self.waited = 0 if metrics["loss"] < self.best else self.waited + 1
        self.best = min(self.best, metrics["loss"])
        if self.waited > self.patience:
            self.share, self.waited = self.share * self.factor, 0

    @hookimpl
    def before_update(self, optim_scheduler: Any) -> None:
        for group in optim_scheduler.optimizer.param_groups:
            group["lr"] *= self.share

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "share": self.share}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.share = state["best"], state["waited"], state["share"]


class Timer:
    """Ends the training after so many seconds, those before a resume included."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.before, self.began = seconds, 0.0, time.monotonic()

    @hookimpl
    def after_batch(self, context: Context) -> None:
        if self.before + time.monotonic() - self.began >= self.seconds:
            context.stop(f"{self.seconds} seconds are over")

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.before + time.monotonic() - self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before, self.began = state["seconds"], time.monotonic()


class Notification:
    """Tells a web hook how a runner has ended."""

    def __init__(self, url: str) -> None:
        self.url = url

    @hookimpl
    def after_pipeline(self, context: Context) -> None:
        text = {
            "runner": context["runner_name"],
            "error": str(context.get("error", "")),
            "metrics": context.get("metrics"),
        }
        with urlopen(Request(self.url, json.dumps(text).encode())):
            pass


class MaxNorm:
    """Keras' constraint: no row of a weight is longer than a limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    @hookimpl
    def after_update(self, optim_scheduler: Any) -> None:
        for parameter in optim_scheduler.parameters:
            with torch.no_grad():
                parameter.copy_(parameter.view(len(parameter), -1).renorm(2, 0, self.limit).view_as(parameter))


class GradientStatistics:
    """The norm of the gradients of each layer, beside the loss in all logs."""

    @hookimpl
    def after_backward(self, context: Context) -> None:
        self.norms = {
            f"gradient_norm_{name}": nn.utils.get_total_norm([own.grad for own in layer.parameters()])
            for phase in context["model"].values()
            for name, layer in phase.model.named_children()
            if [*layer.parameters()]
        }

    @hookimpl
    def extend_metrics(self, context: Context, metrics: dict[str, float]) -> dict[str, Any] | None:
        return self.norms if "learning_rate" in metrics else None


class DropoutSchedule:
    """Less dropout with each epoch (curriculum dropout, the other way round)."""

    def __init__(self, start: float, epochs: int) -> None:
        self.start, self.epochs = start, epochs

    @hookimpl
    def before_epoch(self, context: Context) -> None:
        self.set(context)

    @hookimpl
    def on_resume(self, context: Context) -> None:
        self.set(context)

    def set(self, context: Context) -> None:
        for module in (module for phase in context["model"].values() for module in phase.model.modules()):
            if isinstance(module, nn.Dropout):
                module.p = max(0.0, self.start * (1 - context["current_epoch"] / self.epochs))


def network() -> nn.Module:
    layers = [nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1)]
    return nn.Sequential(OrderedDict(zip(["encoder", "bend", "drop", "head"], layers, strict=True)))


def table() -> TensorDataset:
    """12 samples: three batches of four in an epoch."""
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def config(*plugins: Any, **runner: Any) -> dict[str, Any]:
    phase = {"name": "line", "model": network, "loss": nn.functional.mse_loss, "dataset_name": "data"}
    settings = {"epochs": 4, "print_interval": 1, "save_interval": "2 iteration", **runner}
    return {
        "name": "popular",
        "plugins": [{"progress_bar": False}, *plugins],
        "hyper_parameters": {"optimizer": SGD},
        "dataset": [{"name": "data", "class_path": table, "batch_size": 4}],
        "runner": [{"name": "train", "class": "train", "device": "cpu", **settings}],
        "phase": [{**phase, "valid_dataset_name": "data"}],
    }


def item(cls: type, **arguments: Any) -> dict[str, Any]:
    return {"class_path": cls, "args": arguments}


def weights(context: Context) -> dict[str, Tensor]:
    state: dict[str, Tensor] = context["model"]["line"].model.state_dict()
    return state


def by_hand(
    epochs: int = 4, group: Callable[[nn.Module], Any] = nn.Module.parameters, **events: Any
) -> dict[str, Tensor]:
    """The weights that a loop ends with which calls ``epoch``, ``backward``, ``step`` and ``validated`` at these moments."""
    torch.manual_seed(0)
    model, loader = network(), DataLoader(table(), batch_size=4)
    optimizer = torch.optim.SGD(group(model), lr=0.2, momentum=0.9)
    act = {name: lambda *_: None for name in ("epoch", "backward", "step", "validated")} | events
    for epoch in range(epochs):
        act["epoch"](model, optimizer, epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            act["backward"](model)
            optimizer.step()
            act["step"](model)
        model.eval()
        # A validation draws no numbers of the training; a torch DataLoader draws one when it begins.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            loss = sum(float(nn.functional.mse_loss(model(inputs), targets)) for inputs, targets in loader) / 3
        act["validated"](model, optimizer, loss)
    return model.state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def run(*plugins: Any, **runner: Any) -> Context:
    return GeneralTrainer(config(*plugins, **runner)).run()


def test_an_encoder_is_frozen_until_its_epoch() -> None:
    def freeze(model: Any, optimizer: Any, epoch: int) -> None:
        model.encoder.requires_grad_(epoch >= 2)

    expected = by_hand(epoch=freeze)
    assert same(weights(run(item(Unfreeze, epoch=2))), expected)
    assert not same(expected, by_hand())


def test_predictions_of_samples_are_kept_per_epoch() -> None:
    rows: list[Any] = []

    def predict(model: Any, *_: Any) -> None:
        with torch.no_grad():
            rows.append(model(table().tensors[0][:2]).flatten().tolist())

    by_hand(validated=predict)
    context = run(item(SamplePredictions, count=2))
    assert json.loads((context["run_dir"] / "train" / "predictions.json").read_text(encoding="utf-8")) == rows


def test_gradients_get_noise() -> None:
    def noise(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.1 * torch.randn_like(parameter)

    assert same(weights(run(item(GradientNoise, scale=0.1))), by_hand(backward=noise))


def test_each_layer_has_its_rate() -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        return [{"params": model.encoder.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.2}]

    assert same(weights(run(item(LayerwiseRates, decay=0.5))), by_hand(group=groups))


def test_each_layer_has_its_rate_under_a_schedule() -> None:
    """Three updates of warm-up, and a straight line to zero at the 20th."""
    steps = iter(range(1, 20))

    def groups(model: Any) -> list[dict[str, Any]]:
        return [{"params": model.encoder.parameters(), "lr": 0.1}, {"params": model.head.parameters(), "lr": 0.2}]

    def schedule(model: Any) -> None:
        step = next(steps)
        share = min(step / 3, 1 - (step - 3) / 17)
        for group, rate in zip(optimizers[0].param_groups, (0.1, 0.2), strict=True):
            group["lr"] = share * rate

    optimizers: list[torch.optim.Optimizer] = []
    expected = by_hand(group=groups, epoch=lambda _, optimizer, __: optimizers.append(optimizer), backward=schedule)
    own = weights(GeneralTrainer(scheduled(item(LayerwiseRates, decay=0.5))).run())
    assert all(torch.allclose(value, expected[name], atol=1e-6) for name, value in own.items())


def scheduled(*plugins: Any) -> dict[str, Any]:
    chosen = config(*plugins)
    own = {"optim_type": "SGD", "optim_conf": {"lr": 0.2, "momentum": 0.9}, "total_steps": 20, "warmup_steps": 3}
    chosen["phase"][0]["optim_schedulers"] = {"main": {"class": "WarmupLinear", "args": own}}
    del chosen["hyper_parameters"]
    return chosen


def test_the_batch_of_an_update_grows_with_the_epochs() -> None:
    context = run(item(AccumulationSchedule, batches={"1": 3}))
    torch.manual_seed(0)
    model, (x, y) = network(), table().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for inputs, targets in [*zip(x.split(4), y.split(4), strict=True), *[(x, y)] * 3]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert all(torch.allclose(value, model.state_dict()[name], atol=1e-6) for name, value in weights(context).items())
    assert context["train_state"]["update"] == 6


def test_the_rate_falls_on_a_plateau_as_torch_says() -> None:
    schedules: list[Any] = []

    def lower(model: Any, optimizer: Any, loss: float) -> None:
        schedules[0].step(loss)

    def begin(model: Any, optimizer: Any, epoch: int) -> None:
        if not epoch:
            schedules[:] = [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0)]

    expected = by_hand(12, epoch=begin, validated=lower)
    assert same(weights(run(item(ReduceOnPlateau, factor=0.5, patience=0), epochs=12)), expected)
    assert schedules[0].optimizer.param_groups[0]["lr"] < 0.2


def test_a_timer_ends_the_training_after_its_step() -> None:
    context = run(item(Timer, seconds=0.0))
    assert (context["train_state"]["iteration"], context.stop_reason) == (1, "0.0 seconds are over")
    assert run(item(Timer, seconds=1000.0))["train_state"]["iteration"] == 12


def test_a_web_hook_is_told_of_the_end_and_of_a_failure() -> None:
    received: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    class Failing:
        @hookimpl
        def before_batch(self) -> None:
            raise RuntimeError("out of luck")

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        Thread(target=lambda: [server.handle_request() for _ in range(2)], daemon=True).start()
        notification = item(Notification, url=f"http://127.0.0.1:{server.server_port}/")
        metrics = run(notification)["metrics"]
        with pytest.raises(RuntimeError):
            run(notification, Failing)
    assert received[0] == {"runner": "train", "error": "", "metrics": metrics}
    assert (received[1]["runner"], received[1]["error"]) == ("train", "out of luck")


def test_rows_of_weights_stay_below_a_norm() -> None:
    def limit(model: nn.Module) -> None:
        for parameter in model.parameters():
            rows = parameter.data.view(len(parameter), -1)
            rows *= (0.3 / rows.norm(dim=1, keepdim=True)).clamp(max=1)

    limited = by_hand(step=limit)
    assert all(
        torch.allclose(value, limited[name], atol=1e-6)
        for name, value in weights(run(item(MaxNorm, limit=0.3))).items()
    )
    assert not same(limited, by_hand())


def test_the_norms_of_layers_are_in_the_log_of_metrics() -> None:
    norms: list[dict[str, float]] = []

    def measure(model: Any) -> None:
        own = {name: [p.grad for p in getattr(model, name).parameters()] for name in LAYERS}
        norms.append({f"gradient_norm_{name}": float(nn.utils.get_total_norm(grads)) for name, grads in own.items()})

    by_hand(backward=measure)
    context = run(GradientStatistics)
    lines = (context["run_dir"] / "train" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    written = [line for line in map(json.loads, lines) if line["event"] == "train"]
    assert [{name: line[name] for name in norms[0]} for line in written] == [pytest.approx(own) for own in norms]


def test_dropout_falls_with_the_epochs() -> None:
    def schedule(model: Any, optimizer: Any, epoch: int) -> None:
        model.drop.p = 0.5 * (1 - epoch / 4)

    assert same(weights(run(item(DropoutSchedule, start=0.5, epochs=4))), by_hand(epoch=schedule))


class Killed(BaseException):
    """Stands for the end of the process."""


class Kill:
    """Ends the run before a batch, once."""

    at: int | None = None

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if context["train_state"]["iteration"] == Kill.at:
            Kill.at = None
            raise Killed


LAYERWISE = item(LayerwiseRates, decay=0.5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [5, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 7, 11))])
@pytest.mark.parametrize(
    "plugin",
    [
        item(Unfreeze, epoch=2),
        item(SamplePredictions, count=2),
        item(GradientNoise, scale=0.1),
        LAYERWISE,
        item(AccumulationSchedule, batches={"1": 2, "2": 3}),
        item(ReduceOnPlateau, factor=0.5, patience=0),
        item(MaxNorm, limit=0.3),
        GradientStatistics,
        item(DropoutSchedule, start=0.5, epochs=4),
    ],
    ids=lambda plugin: plugin["class_path"].__name__ if isinstance(plugin, dict) else plugin.__name__,
)
def test_a_killed_run_with_each_of_them_comes_to_the_same_end(
    plugin: Any, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    make = scheduled if plugin is LAYERWISE else config
    for number, kill in enumerate((None, at)):
        monkeypatch.chdir(tmp_path)
        chosen = make(plugin, Kill) | {"output_dir": f"runs{number}"}
        monkeypatch.setattr(Kill, "at", kill)
        if kill is not None:
            with pytest.raises(Killed):
                GeneralTrainer(chosen).run()
        context = GeneralTrainer(chosen, resume="auto").run()
        assert len([*Path(chosen["output_dir"]).glob("popular/2*")]) == 1
        files = sorted((context["run_dir"] / "train").glob("*.json*"))
        texts = {file.name: file.read_text(encoding="utf-8") for file in files if "timing" not in file.name}
        ends.append((weights(context), texts))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_each_is_at_most_30_lines() -> None:
    classes = [
        node for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    ]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in classes}
    assert len(lengths) > 10
    assert max(lengths.values()) <= 30
