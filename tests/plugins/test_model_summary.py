"""``model_summary``: parameters, shapes and FLOPs of each module, from the first batch, without a change of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from pipeline_plugins.model_summary import ModelSummary
from pipeline_plugins.shared.differences import checkpoint_differences
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from pipeline import Brain, Context, GeneralTrainer, RunnerBase, Stage, hookimpl
from pipeline.checkpoint.reader import read_checkpoint
from pipeline.errors import ConfigError


class Samples(Dataset[Any]):
    """``count`` random inputs of a shape, with one number as their target."""

    def __init__(self, shape: tuple[int, ...] = (3,), count: int = 8) -> None:
        self.x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.x[index].sum().view(1)


def loss(predictions: Tensor, target: Tensor) -> Tensor:
    return (predictions.flatten(1).mean(1, keepdim=True) - target).pow(2).mean()


def config(model: Any, *plugins: Any, shape: tuple[int, ...] = (3,), **runner: Any) -> dict[str, Any]:
    """Two epochs of 2 batches of 4 samples."""
    phase = {"name": "p", "model": model, "dataset_name": "data"}
    own = {} if isinstance(model, type) and issubclass(model, Brain) else {"loss": loss}
    return {
        "hyper_parameters": {"optimizer": {"class": "SGD", "lr": 0.01}},
        "plugins": [{"progress_bar": False}, *plugins],
        "dataset": [
            {"name": "data", "class_path": Samples, "args": {"shape": shape}, "batch_size": 4, "shuffle": True}
        ],
        "runner": [{"name": "t", "class": "train", "device": "cpu", "epochs": 2, "print_interval": 1, **runner}],
        "phase": [{**phase, **own}],
    }


def text(context: Context, phase: str = "p") -> str:
    written: str = (context["run_dir"] / "t" / f"model_summary_{phase}.txt").read_text(encoding="utf-8")
    return written


def table(model: Any, shape: tuple[int, ...] = (3,), **arguments: Any) -> dict[str, list[str]]:
    """Module -> [class, parameters, trained, output, FLOPs], as a run has written them."""
    context = GeneralTrainer(config(model, {"model_summary": arguments}, shape=shape)).run()
    lines = [line.replace(", ", ",").split() for line in text(context).splitlines()]
    return {line[0]: line[1:] for line in lines[1:]}


def test_a_linear_layer_has_the_flops_of_its_closed_form() -> None:
    assert table(lambda: nn.Linear(3, 5)) == {
        "model": ["Linear", "20", "20", "[4,5]", str(2 * 4 * 3 * 5)],
        "all": ["20", "20", "120"],
    }


def test_a_convolution_has_the_flops_of_its_closed_form() -> None:
    # Each of 2 x 6 x 6 outputs of 4 samples is a sum of 3 x 3 x 3 products.
    rows = table(lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU()), (3, 8, 8))
    flops = f"{2 * 4 * 2 * 6 * 6 * 27:,}"
    assert rows["model.0"] == ["Conv2d", "56", "56", "[4,2,6,6]", flops]
    assert rows["model.1"] == ["ReLU", "0", "0", "[4,2,6,6]", "-"]
    assert rows["model"] == ["Sequential", "56", "56", "[4,2,6,6]", flops]


def test_a_module_that_is_called_twice_counts_twice_and_is_one_row() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = self.again = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.again(self.layer(x))

    assert table(Twice) == {
        "model": ["Twice", "12", "12", "[4,3]", "144"],
        "model.layer": ["Linear", "12", "12", "[4,3]", "144"],
        "all": ["12", "12", "144"],
    }


class Tied(nn.Module):
    """An encoder whose weight is the decoder's too, behind a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Any:
        return {"x": self.decoder(self.encoder(self.frozen(x)))}["x"]


def test_shared_parameters_are_counted_once_and_frozen_ones_told_apart() -> None:
    rows, parameters = table(Tied), list(Tied().parameters())
    assert rows["all"][:2] == [str(sum(each.numel() for each in parameters)), "15"]
    assert [rows[f"model.{name}"][1:3] for name in ("frozen", "encoder", "decoder")] == [
        ["12", "0"], ["12", "12"], ["3", "3"],
    ]  # fmt: skip


def test_lazy_modules_are_counted_as_what_they_become() -> None:
    assert table(lambda: nn.Sequential(nn.LazyLinear(2)))["model.0"] == ["Linear", "8", "8", "[4,2]", "48"]


def deep() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 1))))


@pytest.mark.parametrize(("depth", "rows"), [(1, 1), (2, 2), (3, 3), (None, 4)])
def test_the_depth_limits_the_rows_and_not_what_is_counted(depth: int | None, rows: int) -> None:
    found = table(deep, depth=depth)
    assert len(found) == rows + 1
    assert found["model"] == ["Sequential", "4", "4", "[4,1]", "24"]


def test_no_depth_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_summary: depth is 0; write 1 or more"):
        ModelSummary(depth=0)


class Attention(nn.Module):
    """A layer of a transformer behind a recurrent one; its output is nested."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.lstm(x)[0])


class Pictures(nn.Module):
    """Convolutions with running statistics, computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(1))

    def forward(self, x: Tensor) -> Any:
        return self.head(checkpoint(self.layers, x, use_reentrant=False))


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "dropout and running statistics": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)), (3,)
    ),
    "attention and recurrence": (Attention, (5, 3)),
    "convolutions that are computed again": (Pictures, (3, 6, 6)),
}  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_it_changes_no_bit_of_a_run(case: str) -> None:
    model, shape = CASES[case]
    runs = [
        GeneralTrainer(config(model, *own, shape=shape, save_interval=1)).run() for own in ([], [{"model_summary": {}}])
    ]
    saved = [sorted((context["run_dir"] / "t").glob("checkpoints/step-*")) for context in runs]
    places = []
    assert saved[0]
    for pair in zip(*saved, strict=True):
        places += [found.place for found in checkpoint_differences(*map(read_checkpoint, pair))]
    # The length of timing.jsonl depends on the clock.
    assert [place for place in places if not place.endswith("metric_log.timing")] == []
    assert "model." in text(runs[1])


def test_the_flops_are_those_that_torch_counts() -> None:
    with FlopCounterMode(display=False) as counter:
        Attention()(torch.randn(4, 5, 3))
    assert table(Attention, (5, 3))["all"][2] == f"{counter.get_total_flops():,}"


def test_what_a_backward_computes_again_is_counted_once() -> None:
    rows = table(Pictures, (3, 6, 6))
    assert rows["model.layers.0"][3:] == ["[4,4,4,4]", f"{2 * 4 * 4 * 4 * 4 * 27:,}"]


def test_parts_that_a_brain_calls_itself_are_counted() -> None:
    class Pair(Brain):
        def __init__(self) -> None:
            super().__init__({"one": nn.Linear(3, 2), "two": nn.Linear(2, 1), "idle": nn.Linear(1, 1)})

        def compute_forward(self, batch: Any, stage: Stage) -> Any:
            return self.modules.two(self.modules.one(batch[0]))

        def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
            return loss(predictions, batch[1]) + 0 * self.modules.idle.weight.sum()

    assert table(Pair) == {
        "one": ["Linear", "8", "8", "[4,2]", "48"],
        "two": ["Linear", "3", "3", "[4,1]", "16"],
        "idle": ["Linear", "2", "2", "-", "-"],
        "all": ["13", "13", "64"],
    }


class Watch:
    """Notes at each batch whether the module has hooks."""

    hooks: list[int] = []  # noqa: RUF012

    @hookimpl
    def before_batch(self, context: Context) -> None:
        module = context["model"]["p"].model
        Watch.hooks.append(len(module._forward_hooks) + len(module._forward_pre_hooks))


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(Watch, "hooks", [])
    return Watch.hooks


def test_nothing_stays_on_the_modules_after_the_second_batch_began(hooks: list[int]) -> None:
    GeneralTrainer(config(lambda: nn.Linear(3, 1), {"model_summary": {}}, Watch)).run()
    assert hooks == [2, 2, 0, 0]


def test_a_compiled_module_gets_no_hook(hooks: list[int]) -> None:
    def compiled() -> nn.Module:
        module = nn.Linear(3, 1)
        module.compile(backend="eager")
        return module

    context = GeneralTrainer(config(compiled, {"model_summary": {}}, Watch)).run()
    assert set(hooks) == {0}
    assert text(context).splitlines()[1].split() == ["model", "Linear", "4", "4", "-", "-"]


def test_a_function_in_a_module_stays_compiled() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    class Model(nn.Linear):
        doubled = staticmethod(torch.compile(lambda x: x * 2, backend=backend))

        def forward(self, x: Tensor) -> Any:
            return super().forward(self.doubled(x))

    GeneralTrainer(config(lambda: Model(3, 1), {"model_summary": {}})).run()
    assert compiled


class Loop(RunnerBase):
    """A loop of one's own without epochs."""

    def run(self, context: Context) -> None:
        for batch in context.batches("p", count=1):
            context["model"]["p"].brain.fit_batch(batch)


@pytest.mark.parametrize("others", [[{"sanity_validation": {}}], []])
def test_it_is_written_in_a_loop_of_ones_own_of_one_batch(others: list[Any], log_lines: list[str]) -> None:
    chosen = config(lambda: nn.Linear(3, 1), {"model_summary": {}}, *others, runner_class_path=Loop)
    chosen["phase"][0]["valid_dataset_name"] = "data"
    context = GeneralTrainer(chosen).run()
    assert text(context).splitlines()[1].split() == ["model", "Linear", "4", "4", "[4,", "1]", "24"]
    assert sum(f"model_summary: p\n{text(context)}" in line for line in log_lines) == 1


class KilledError(BaseException):
    """Stands for the end of the process."""


class Kill:
    """Ends the process once in each of these iterations."""

    at: list[int] = []  # noqa: RUF012

    @hookimpl
    def before_batch(self, context: Context) -> None:
        if self.at and context["train_state"]["iteration"] == self.at[0]:
            del self.at[0]
            raise KilledError


def test_an_interruption_within_a_module_leaves_nothing_behind() -> None:
    class Interrupted(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            raise KilledError

    module = Interrupted(3, 1)
    with pytest.raises(KilledError):
        GeneralTrainer(config(lambda: module, {"model_summary": {}})).run()
    assert _get_current_dispatch_mode() is None
    assert not module._forward_hooks


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kills", [[1], [3], [1, 2, 3]])
def test_a_run_that_is_resumed_has_it_once_for_each_phase(
    kills: list[int], monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    chosen = config(lambda: nn.Linear(3, 1), {"model_summary": {}}, Kill, save_interval="1 iteration", epochs=1)
    chosen |= {"name": "config", "phase": [*chosen["phase"], {**chosen["phase"][0], "name": "q"}]}
    monkeypatch.setattr(Kill, "at", list(kills))
    for _ in kills:
        with pytest.raises(KilledError):
            GeneralTrainer(chosen, resume="auto").run()
    context = GeneralTrainer(chosen, resume="auto").run()
    assert text(context) == text(context, "q")
    for phase in "pq":
        assert sum(f"model_summary: {phase}\n" in line for line in log_lines) == 1


def test_a_second_one_has_a_name_and_a_file_of_its_own() -> None:
    other = {"name": "short", "class_path": "model_summary", "args": {"depth": 1}}
    context = GeneralTrainer(config(deep, {"model_summary": {}}, other)).run()
    short: str = (context["run_dir"] / "t" / "short_p.txt").read_text(encoding="utf-8")
    assert (len(short.splitlines()), len(text(context).splitlines())) == (3, 5)


@pytest.mark.slow
def test_resume_test_says_that_it_can_be_resumed(resume_test: Callable[..., Result], linear: Path) -> None:
    plugins = "plugins=[model_summary, sanity_validation, nan_guard: {action: warn}]"
    done = resume_test(linear, plugins, "--at", 1, "--at", 8, "runner.train_runner.save_interval=1")
    assert done.exit_code == 0, done.output
    assert "model_summary_line.txt" in done.stdout
    assert done.stdout.endswith("\nequal, bit for bit\n")
