"""The job of which every call counts: a 64-64-10 MLP at batch 32 with SGD, by hand, by ``Brain.fit`` and by a run.

By hand means what a person would write, with the same features: clipping where the Brain clips, torch's own DataLoader
where ours is measured. ``torch.autograd.backward`` makes fewer calls than ``loss.backward``, so it is the reference.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from side_by_side import Clock, Way
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeline import Brain, GeneralTrainer, Stage, hookimpl, stages
from pipeline.context import Context
from pipeline.distributed.world import current_world

Batch = tuple[Tensor, Tensor]
BATCH_SIZE = 32
CLIP = 5.0
"""What ``Brain.fit`` clips to by default, as SpeechBrain does."""

NO_PLUGINS = [{"progress_bar": False}, {"metric_log": False}]
ALL_OFF = {"print_interval": None, "save_interval": None, "nonfinite_patience": None}
cross_entropy = nn.functional.cross_entropy


class Batches:
    """Batches to go over, which cannot be indexed: a list would be taken for a dataset."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Table(TensorDataset):
    """A dataset of the user's own: what is in its methods, and whether it draws, nobody knows."""


class DeclaredTable(Table):
    """A dataset that declares that it draws nothing."""

    uses_random_numbers = False


@cache
def table(steps: int, kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    """Random samples for so many steps."""
    random = torch.Generator().manual_seed(0)
    samples = steps * BATCH_SIZE
    return kind(torch.randn(samples, 64, generator=random), torch.randint(10, (samples,), generator=random))


@cache
def in_memory(steps: int) -> Batches:
    """The same, as batches that are there already."""
    inputs, target = table(steps).tensors
    return Batches(list(zip(inputs.split(BATCH_SIZE), target.split(BATCH_SIZE), strict=True)))


def three_quarters(steps: int) -> Batches:
    """Batches for three of four steps; the fourth is another model's."""
    return in_memory(steps * 3 // 4)


def loaded(steps: int) -> DataLoader[Any]:
    """The same, from torch's DataLoader."""
    return DataLoader(table(steps), batch_size=BATCH_SIZE)


def model() -> nn.Module:
    """The MLP."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def by_hand(data: Callable[[int], Iterable[Batch]], clip: float | None, steps: int, clock: Clock) -> None:
    """The raw loop."""
    network, batches = model(), data(steps)
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    clock.start()
    for step, (inputs, target) in enumerate(batches, 1):
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(network(inputs), target)
        torch.autograd.backward(loss)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        if step % 50 == 0:
            loss.item()
    clock.stop()


def nested_by_hand(steps: int, clock: Clock) -> None:
    """The raw loop over two models: three batches of one for one of the other."""
    networks = model(), model()
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]
    others = cycle(three_quarters(steps))
    clock.start()
    for step, batch in enumerate(three_quarters(steps), 1):
        turns = [(0, batch), (1, next(others))] if step % 3 == 0 else [(0, batch)]
        for turn, (inputs, target) in turns:
            optimizers[turn].zero_grad(set_to_none=True)
            loss = cross_entropy(networks[turn](inputs), target)
            torch.autograd.backward(loss)
            optimizers[turn].step()
        if step % 50 == 0:
            loss.item()
    clock.stop()


class SimpleBrain(Brain):
    """What a user of ``Brain.fit`` writes."""

    clock = Clock()

    def compute_forward(self, batch: Batch, stage: Stage) -> Tensor:
        """The scores."""
        scores: Tensor = self.modules.model(batch[0])
        return scores

    def compute_objectives(self, predictions: Tensor, batch: Batch, stage: Stage) -> Tensor:
        """The loss."""
        return cross_entropy(predictions, batch[1])

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """The loop begins."""
        self.clock.start()

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """The loop is over."""
        self.clock.stop()


def by_fit(
    data: Callable[[int], Iterable[Batch]],
    options: Mapping[str, Any],
    steps: int,
    clock: Clock,
) -> None:
    """The Brain by itself; progress is shown, but where options turn it off."""
    brain = SimpleBrain(
        {"model": model()},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={"device": "cpu", **options},
    )
    brain.clock = clock
    brain.fit(range(1), data(steps), progressbar=not options.get("noprogressbar"))


class Network(stages.Network):
    """The default, but for batches that are there already."""

    batches: ClassVar[Iterable[Batch]] = []

    def build_dataset(self, *_: Any) -> Any:
        """The batches."""
        return self.batches


def by_run(
    data: Callable[[int], Iterable[Batch]] | None,
    settings: Mapping[str, Any],
    plugins: list[Any],
    steps: int,
    clock: Clock,
    kind: type[TensorDataset] = TensorDataset,
) -> None:
    """A whole run; without ``data``, the config builds the DataLoader of a dataset of this kind."""
    network = {"network_class_path": Network} if data else {}
    Network.batches = data(steps) if data else []
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "output_dir": current_world().broadcast(folder),
            "plugins": [*plugins, clocked(clock)],
            "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.1}},
            "dataset": [{"name": "data", "class_path": partial(table, steps, kind), "batch_size": BATCH_SIZE}],
            "runner": [{"name": "train", "class": "train", "device": "cpu", "epochs": 1, **network, **settings}],
            "phase": [
                {"name": name, "model": model, "loss": cross_entropy, "dataset_name": "data"}
                for name in ("mlp", "second")[: 1 + (settings.get("runner_class_path") is Nested)]
            ],
        }
        GeneralTrainer(config).run()


def without_numpy(kind: type[TensorDataset], settings: Mapping[str, Any], steps: int, clock: Clock) -> None:
    """The run with a dataset of the user's own, in a process that has not imported numpy."""
    with patch.dict(sys.modules, {"numpy": None}):
        by_run(None, settings, [], steps, clock, kind)


class OwnLoop(stages.Runner):
    """A loop of one's own over the batches of a phase."""

    def run(self, context: Context) -> None:
        fit_batch = context["model"]["mlp"]["brain"].fit_batch
        for _ in context.epochs():
            for batch in context.batches("mlp"):
                fit_batch(batch)


class Nested(stages.Runner):
    """Three batches of one phase for one of another, in its body."""

    def run(self, context: Context) -> None:
        first, second = (context["model"][name]["brain"].fit_batch for name in ("mlp", "second"))
        for _ in context.epochs():
            others = context.batches("second", repeat=True)
            for number, batch in enumerate(context.batches("mlp")):
                first(batch)
                if number % 3 == 2:
                    second(next(others))


def clocked(clock: Clock) -> type:
    """A plugin that starts and stops the clock, and costs nothing in between."""

    class Clocked:
        @hookimpl
        def before_epoch(self, context: Context) -> None:
            clock.start()

        @hookimpl
        def after_epoch(self, context: Context) -> None:
            clock.stop()

    return Clocked


class PerBatch:
    """A plugin with one hook for each batch."""

    @hookimpl
    def after_batch(self, context: Context, batch: Any, losses: Any) -> None:
        pass


NO_CLIPPING = {"max_grad_norm": None}
FIT_OFF = {**NO_CLIPPING, "nonfinite_patience": None, "noprogressbar": True}
WAYS = {
    "raw loop": Way(partial(by_hand, in_memory, None)),
    "raw loop, clipping": Way(partial(by_hand, in_memory, CLIP)),
    "raw loop, DataLoader": Way(partial(by_hand, loaded, None)),
    "raw loop, DataLoader, clipping": Way(partial(by_hand, loaded, CLIP)),
    "Brain.fit, defaults": Way(partial(by_fit, in_memory, {}), "raw loop, clipping"),
    "Brain.fit, defaults but no clipping": Way(partial(by_fit, in_memory, NO_CLIPPING), "raw loop"),
    "Brain.fit, everything off": Way(partial(by_fit, in_memory, FIT_OFF), "raw loop"),
    "Brain.fit, DataLoader, defaults": Way(partial(by_fit, loaded, {}), "raw loop, DataLoader, clipping"),
    "Brain.fit, DataLoader, defaults but no clipping": Way(
        partial(by_fit, loaded, NO_CLIPPING), "raw loop, DataLoader"
    ),
    "Brain.fit, DataLoader, everything off": Way(partial(by_fit, loaded, FIT_OFF), "raw loop, DataLoader"),
    "pipeline run, defaults": Way(partial(by_run, in_memory, {}, []), "raw loop"),
    "pipeline run, defaults, a save every 10 minutes": Way(
        partial(by_run, in_memory, {"save_interval": "10 minute"}, []), "raw loop"
    ),
    "pipeline run, a loop of one's own": Way(
        partial(by_run, in_memory, {"runner_class_path": OwnLoop}, []), "raw loop"
    ),
    "raw loop, two models 3 : 1": Way(nested_by_hand),
    "pipeline run, two phases 3 : 1": Way(
        partial(by_run, three_quarters, {"runner_class_path": Nested}, []), "raw loop, two models 3 : 1"
    ),
    "pipeline run, everything off": Way(partial(by_run, in_memory, ALL_OFF, NO_PLUGINS), "raw loop"),
    "the same, a plugin with a hook per batch": Way(
        partial(by_run, in_memory, ALL_OFF, [*NO_PLUGINS, PerBatch]), "pipeline run, everything off"
    ),
    "the plugin report": Way(partial(by_run, in_memory, {}, ["report"]), "pipeline run, defaults"),
    "pipeline run, DataLoader, defaults": Way(partial(by_run, None, {}, []), "raw loop, DataLoader"),
    "pipeline run, DataLoader, everything off": Way(partial(by_run, None, ALL_OFF, NO_PLUGINS), "raw loop, DataLoader"),
    "pipeline run, DataLoader, a dataset of one's own": Way(partial(without_numpy, Table, {}), "raw loop, DataLoader"),
    "pipeline run, DataLoader, a dataset of one's own, seed: null": Way(
        partial(without_numpy, Table, {"seed": None}), "raw loop, DataLoader"
    ),
    "pipeline run, DataLoader, a dataset of one's own, uses_random_numbers = False": Way(
        partial(without_numpy, DeclaredTable, {}), "raw loop, DataLoader"
    ),
}
"""Name -> way. A dataset of one's own may draw: for it the random generators are seeded once per batch."""
if find_spec("numpy"):
    WAYS["the same, numpy imported"] = Way(
        partial(by_run, None, {}, [], kind=Table), "pipeline run, DataLoader, a dataset of one's own"
    )
