"""The weights alone are saved for whoever uses the models, and on request the models themselves."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from pipeline import Brain, Context, GeneralTrainer, Stage, hookimpl
from pipeline.checkpoint import foreign
from pipeline.errors import ConfigError, DataError, StorageError

Run = Callable[[dict[str, Any]], Context]
Config = Callable[..., dict[str, Any]]


def saved(context: Context) -> list[str]:
    """The names in the folder where they go by default."""
    return sorted(path.name for path in (context["run_dir"] / "train" / "inference").iterdir())


def file_of(context: Context, iteration: int, phase: str = "line", suffix: str = "safetensors") -> Path:
    folder: Path = context["run_dir"] / "train" / "inference"
    return folder / f"{phase}-{iteration:012d}.{suffix}"


@pytest.mark.parametrize(
    ("interval", "iterations"),
    [
        (1, [3, 6]),
        ("4 iteration", [4, 6]),
        ([2, "5 iteration"], [5, 6]),
        ("1 minute", [6]),
    ],
)
def test_they_are_saved_at_the_interval_and_at_the_end(
    config: Config, run: Run, interval: Any, iterations: list[int]
) -> None:
    context = run(config(save_inference_interval=interval))
    assert saved(context) == [f"line-{each:012d}.safetensors" for each in iterations]


def test_without_an_interval_nothing_is_saved(config: Config, run: Run) -> None:
    assert not (run(config())["run_dir"] / "train" / "inference").exists()


def test_they_are_the_weights_of_that_iteration(config: Config, run: Run, by_hand: Callable[..., Any]) -> None:
    context = run(config(save_inference_interval="4 iteration"))
    hand = by_hand(lambda parameters: torch.optim.SGD(parameters, lr=0.1), steps=4)
    for read in (load_file, foreign.read):
        found = read(file_of(context, 4))
        assert found.keys() == hand.keys()
        assert all(torch.equal(found[name], hand[name]) for name in hand)


def test_the_file_says_at_which_step_and_epoch_it_was_written(config: Config, run: Run) -> None:
    context = run(config(save_inference_interval="4 iteration"))
    with safe_open(file_of(context, 4), "pt") as file:
        about = file.metadata()
    assert {key: about[key] for key in ("step", "epoch", "format")} == {"step": "4", "epoch": "1", "format": "pt"}


def test_phases_that_share_a_model_share_a_file(config: Config, run: Run) -> None:
    chosen = config(save_inference_interval=2)
    first = chosen["phase"][0]
    chosen["phase"] += [{**first, "name": "own"}, {"name": "again", "model_of": "line", "dataset_name": "data"}]
    assert saved(run(chosen)) == ["line-000000000018.safetensors", "own-000000000018.safetensors"]


def test_two_runs_with_the_same_path_have_folders_of_their_own(config: Config, run: Run, tmp_path: Path) -> None:
    far = tmp_path / "far"
    contexts = [run(config(save_inference_interval=2, save_inference_path=str(far))) for _ in range(2)]
    expected = {far / each["run_dir"].name / "train" / "line-000000000006.safetensors" for each in contexts}
    assert {path for path in far.rglob("*") if path.is_file()} == expected
    assert not (contexts[0]["run_dir"] / "train" / "inference").exists()


def test_a_debug_run_leaves_nothing_there(config: Config, run: Run, tmp_path: Path) -> None:
    run(config(save_inference_interval=1, save_inference_path=str(tmp_path / "far"), debug=True))
    assert not (tmp_path / "far").exists()


class Watch:
    """A plugin that acts on the folder of the inference weights after some iterations."""

    acts: dict[int, Callable[[Path], object]] = {}  # noqa: RUF012

    @hookimpl
    def after_batch(self, context: Context) -> None:
        act = self.acts.get(context["train_state"]["iteration"])
        if act:
            act(context["run_dir"] / "train" / "inference")


def block(folder: Path) -> None:
    """Let the storage refuse to write there."""
    folder.rename(folder.with_name("aside"))
    folder.write_text("no folder")


def unblock(folder: Path) -> None:
    folder.unlink()
    folder.with_name("aside").rename(folder)


@pytest.fixture
def acting(config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A config with the plugin, and what it is to do after which iteration."""

    def make(acts: dict[int, Callable[[Path], object]], **runner: Any) -> dict[str, Any]:
        monkeypatch.setattr(Watch, "acts", acts)
        chosen = config(save_inference_interval="1 iteration", **runner)
        return {**chosen, "plugins": [*chosen["plugins"], Watch]}

    return make


def test_a_folder_that_cannot_be_made_is_told_before_the_first_step(config: Config, tmp_path: Path) -> None:
    trainer = GeneralTrainer(config(save_inference_interval=1, save_inference_path=str(tmp_path / "file")))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=r"file/.*/train: cannot be written: .*; free or repair the storage"):
        trainer.run()
    assert '"iteration": 0' in Path("runs/config/latest/status.json").read_text(encoding="utf-8")


def test_a_save_that_the_storage_refuses_ends_the_run(acting: Config, run: Run) -> None:
    with pytest.raises(StorageError, match=r"line-000000000002.safetensors: cannot be written: .*; free or repair"):
        run(acting({2: block}))


def test_where_that_is_wanted_it_is_told_and_training_goes_on(acting: Config, run: Run, log_lines: list[str]) -> None:
    context = run(acting({2: block, 4: unblock}, on_save_error="warn"))
    assert saved(context) == [f"line-{each:012d}.safetensors" for each in (1, 4, 5, 6)]
    told = [line for line in log_lines if "cannot be written" in line]
    assert [line.startswith("WARNING") and "so training goes on" in line for line in told] == [True, True]


def test_at_the_end_a_warning_does_not_do(acting: Config, run: Run) -> None:
    with pytest.raises(StorageError, match=r"line-000000000006.safetensors: cannot be written"):
        run(acting({6: block}, on_save_error="warn"))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise of the global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3) + index + random.random(), torch.randn(1)


class Counting(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that goes on where it stopped, with what it has given so far in its samples."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(12):
            self.given += 1
            yield torch.randn(3) + self.given, torch.randn(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Mine(Brain):
    """Two modules, the second called by name with what the first returns and a number; a third that it does not call."""

    def __init__(self) -> None:
        super().__init__({"net": Net(), "scale": Scale(), "spare": nn.Linear(1, 1)})

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        self.log("drawn", float(torch.rand(())))
        return self.modules.scale(self.modules.net(batch[0]), by=2.0)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return nn.functional.mse_loss(predictions, batch[1])


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, by: float) -> Any:
        return x * self.weight * by


class Idle(Mine):
    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.net.layers(batch[0])


def noisy(config: Config, dataset: Any = Noisy, model: Any = Net, export: bool = True, **keys: Any) -> dict[str, Any]:
    """A config whose weights depend on every random draw."""
    chosen = config(save_inference_interval="4 iteration", save_inference_export=export)
    chosen["dataset"] = [{"name": "data", "class_path": dataset, "batch_size": 4, **keys}]
    chosen["phase"][0]["model"] = model
    return chosen


def test_an_exported_model_computes_the_same_for_any_number_of_samples(config: Config, run: Run) -> None:
    context = run(noisy(config))
    model = context["model"]["line"]["model"]
    program = torch.export.load(file_of(context, 6, suffix="pt2")).module()
    assert model.training
    model.eval()
    for samples in (1, 2, 7):
        x = torch.randn(samples, 3)
        torch.testing.assert_close(program(x), model(x))


def test_an_exported_model_has_the_weights_that_are_beside_it(config: Config, run: Run) -> None:
    context = run(noisy(config))
    program, weights = torch.export.load(file_of(context, 4, suffix="pt2")), load_file(file_of(context, 4))
    assert program.state_dict.keys() == weights.keys()
    assert all(torch.equal(program.state_dict[name], weights[name]) for name in weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dataset", [Noisy, Counting])
def test_on_a_gpu_an_exported_model_computes_there(config: Config, run: Run, dataset: Any) -> None:
    chosen = noisy(config, dataset=dataset)
    chosen["runner"][0]["device"] = "cuda"
    context = run(chosen)
    model, x = context["model"]["line"]["model"].eval(), torch.randn(7, 3, device="cuda")
    program = torch.export.load(file_of(context, 6, suffix="pt2")).module()
    torch.testing.assert_close(program(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [{"shuffle": True}, {"shuffle": True, "num_workers": 2}, {"dataset": Counting}, {"dataset": Counting, "num_workers": 2}, {"model": Mine}],
)  # fmt: skip
def test_to_export_disturbs_neither_data_nor_random_generators(config: Config, run: Run, keys: Any) -> None:
    ends = []
    for export in (False, True):
        chosen = noisy(config, export=export, **keys)
        weights = run(with_brain(chosen) if "model" in keys else chosen)["model"]["line"]["brain"].modules.state_dict()
        ends.append([*weights.values(), torch.get_rng_state(), torch.tensor(random.getstate()[1])])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # what torch says of itself
def test_a_scripted_model_is_exported_as_it_was_written(config: Config, run: Run) -> None:
    chosen = noisy(config)
    chosen["runner"][0]["jit"] = True
    assert file_of(run(chosen), 4, suffix="pt2").is_file()


class Branch(nn.Module):
    """Its forward depends on numbers, which torch.export cannot follow, once it is told to."""

    free = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) if self.free or x.sum() > 0 else -self.linear(x)


class Shifted(nn.Module):
    """Draws from Python's generator, what torch.export takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + random.random()


def with_brain(chosen: dict[str, Any]) -> dict[str, Any]:
    chosen["phase"][0].pop("loss")
    return chosen


def test_of_a_brain_each_module_that_computes_the_predictions_is_exported(config: Config, run: Run) -> None:
    context = run(with_brain(noisy(config, model=Mine)))
    modules = context["model"]["line"]["brain"].modules.eval()
    assert [name for name in saved(context) if name.endswith("6.pt2")] == [
        "line.net-000000000006.pt2", "line.scale-000000000006.pt2"
    ]  # fmt: skip
    net, scale = (
        torch.export.load(file_of(context, 6, phase=f"line.{name}", suffix="pt2")).module() for name in ("net", "scale")
    )
    for samples in (1, 2, 7):
        x = torch.randn(samples, 3)
        y = modules["net"](x)
        torch.testing.assert_close(net(x), y)
        torch.testing.assert_close(scale(y, by=2.0), modules["scale"](y, by=2.0))


def test_a_model_that_cannot_be_exported_is_told_before_the_first_step(config: Config, run: Run) -> None:
    message = (
        r"runner.train.save_inference_export: Branch of phase 'line' cannot be exported: \w+: .*; mend its forward"
    )
    with pytest.raises(ConfigError, match=message):
        run(noisy(config, model=Branch))
    assert not list(Path("runs").glob("*/*/train/checkpoints/step-*"))


def test_a_brain_that_calls_none_of_its_modules_is_told_before_the_first_step(config: Config, run: Run) -> None:
    message = (
        "compute_forward of Idle of phase 'line' calls none of its modules; have it call one, or set this to false"
    )
    with pytest.raises(ConfigError, match=message):
        run(with_brain(noisy(config, model=Idle)))


def test_what_is_exported_has_to_compute_what_the_model_does(config: Config, run: Run) -> None:
    with pytest.raises(ConfigError, match=r"Shifted of phase 'line' cannot be exported: AssertionError: .* not close"):
        run(noisy(config, model=Shifted))


def test_a_model_that_cannot_be_exported_any_more_does_not_end_the_training(
    acting: Config, run: Run, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Branch, "free", True)
    chosen = acting({3: lambda _: setattr(Branch, "free", False)}, save_inference_export=True)
    chosen["phase"][0]["model"] = Branch
    context = run(chosen)
    assert [name for name in saved(context) if name.endswith("pt2")] == ["line-000000000001.pt2", "line-000000000002.pt2"]  # fmt: skip
    assert len([line for line in log_lines if "cannot be exported any more" in line and "WARNING" in line]) == 4


def test_data_that_can_be_read_only_once_is_not_read_for_an_example(config: Config, run: Run) -> None:
    class Once:
        @hookimpl
        def after_stage(self, name: str, context: Context) -> None:
            if name == "network":
                context["dataset"]["data"] = iter([(torch.zeros(4, 3), torch.zeros(4, 1))])

    chosen = noisy(config)
    chosen["plugins"] += [Once]
    with pytest.raises(DataError, match="a list_iterator can be iterated only once, and a batch taken before"):
        run(chosen)


class KilledError(BaseException):
    """Stands for the end of the process."""


def kill(folder: Path) -> None:
    (folder / ".net.safetensors.tmp").write_text("half of a file")
    raise KilledError


@pytest.mark.parametrize("at", [2, 3, 5])
@pytest.mark.slow
def test_a_resumed_run_saves_what_one_that_was_not_interrupted_does(
    config: Config, run: Run, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {**noisy(config, shuffle=True), "output_dir": "whole"}
    chosen["runner"][0]["save_interval"] = 2
    whole = run(chosen)
    chosen = {**chosen, "name": "config", "output_dir": "killed", "plugins": [*chosen["plugins"], Watch]}
    monkeypatch.setattr(Watch, "acts", {at: kill})
    with pytest.raises(KilledError):
        run(chosen)
    monkeypatch.setattr(Watch, "acts", {})
    resumed = GeneralTrainer(chosen, resume="auto").run()
    assert saved(resumed) == saved(whole)
    for name in (4, 6):
        assert file_of(resumed, name).read_bytes() == file_of(whole, name).read_bytes()


def test_the_folder_may_be_removed_while_it_is_not_written(acting: Config, run: Run) -> None:
    context = run(acting({3: shutil.rmtree}))
    assert saved(context) == [f"line-{each:012d}.safetensors" for each in (3, 4, 5, 6)]


class Swaps:
    """A plugin that exports other weights than those that are trained."""

    @hookimpl
    def before_export(self, context: Context) -> None:
        model = context["model"]["line"].model
        self.bias = model.bias.detach().clone()
        model.bias.data.fill_(7)

    @hookimpl
    def after_export(self, context: Context) -> None:
        context["model"]["line"].model.bias.data.copy_(self.bias)


def test_a_plugin_may_have_other_weights_exported_than_those_that_are_trained(
    config: Config, run: Run, by_hand: Callable[..., Any]
) -> None:
    chosen = config(save_inference_interval=1)
    chosen["plugins"].append(Swaps)
    context = run(chosen)
    assert [load_file(file_of(context, each))["bias"].item() for each in (3, 6)] == [7, 7]
    hand = by_hand(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    torch.testing.assert_close(dict(context["model"]["line"].model.state_dict()), dict(hand))


def test_after_an_export_that_the_storage_refuses_the_plugins_are_called_too(
    acting: Config, run: Run, by_hand: Callable[..., Any]
) -> None:
    chosen = acting({2: block, 4: unblock}, on_save_error="warn")
    chosen["plugins"].append(Swaps)
    hand = by_hand(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    torch.testing.assert_close(dict(run(chosen)["model"]["line"].model.state_dict()), dict(hand))
