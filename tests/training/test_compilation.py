"""Modules that are compiled or scripted."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from pipeline import Brain, Stage, UpdaterBase, hookimpl, stages
from pipeline.brain.compilation import compile_modules
from pipeline.brain.run_options import RunOptions
from pipeline.config.schema import RunnerSchema
from pipeline.context import Context
from pipeline.errors import ConfigError
from tests.training.conftest import table

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
mse = nn.functional.mse_loss
# What torch says of itself, when it scripts or compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Failed to initialize NumPy:UserWarning"),
]
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler on a CPU"
)


class Sampling(nn.Module):
    """A layer, which torch would not compile by itself, and a ``generate`` whose calls of it have a new length each, as that of a language model."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> Tensor:
        predictions: Tensor = self.layer(x)
        return predictions

    @torch.no_grad()
    def generate(self, length: int) -> Tensor:
        x = torch.ones(1, 3)
        for _ in range(length):
            x = torch.cat([x, self(x)[-1:].expand(1, 3)])
        return x


class Two(Brain):
    """An encoder and a decoder, both with random weights from seed 0."""

    def __init__(self, **keywords: Any) -> None:
        torch.manual_seed(0)
        modules = {"encoder": nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "decoder": Sampling(4)}
        super().__init__(modules, opt_class=lambda parameters: SGD(parameters, 0.1), **keywords)

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        return self.modules.decoder(self.modules.encoder(batch[0]))

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        return mse(predictions, batch[1])


def fitted(data: Any, **options: Any) -> Two:
    brain = Two(run_opts=options)
    brain.fit(range(2), DataLoader(data, batch_size=5))
    return brain


def close(ours: nn.Module, theirs: nn.Module) -> bool:
    """The same names, and the same weights but for rounding."""
    one, other = ours.state_dict(), theirs.state_dict()
    return list(one) == list(other) and all(
        torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6) for name in one
    )


def compiled(brain: Brain) -> list[str]:
    return [name for name, module in brain.modules.items() if module._compiled_call_impl is not None]


def scripted(brain: Brain) -> list[str]:
    return [name for name, module in brain.modules.items() if isinstance(module, torch.jit.ScriptModule)]


@needs_compiler
@pytest.mark.slow
def test_compiled_modules_keep_their_names_and_train_to_the_same_weights(make_table: Any) -> None:
    brain, plain = fitted(make_table(10), compile_module_keys=["decoder"]), fitted(make_table(10))
    assert compiled(brain) == ["decoder"]
    assert close(brain.modules, plain.modules)
    x = make_table(10).tensors[0]
    assert torch.allclose(brain.modules.encoder(x), plain.modules.encoder(x), atol=1e-6)


@needs_compiler
@pytest.mark.slow
def test_a_run_compiles_what_its_config_says(config: Config, run: Run) -> None:
    chosen = config(compile=True, compile_using_dynamic_shape_tracing=None)
    context, plain = run(chosen), run(config())
    assert compiled(context["model"]["line"]["brain"]) == ["model"]
    assert close(context["model"]["line"]["model"], plain["model"]["line"]["model"])


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the first data input of each graph that torch compiles, by a backend of torch that needs no compiler."""
    shapes: list[tuple[int, ...]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        shapes.append(tuple(inputs[-1].shape))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return shapes


def test_a_module_of_torchs_own_class_is_compiled_too(make_table: Any, graphs: list[tuple[int, ...]]) -> None:
    brain = fitted(make_table(10), compile_module_keys=["encoder"])
    assert graphs == [(5, 3)]
    assert close(brain.modules, fitted(make_table(10)).modules)


def test_more_modules_than_torch_recompiles_one_function_are_all_compiled(graphs: list[tuple[int, ...]]) -> None:
    count = torch._dynamo.config.recompile_limit + 1
    modules = nn.ModuleDict()
    for number in range(count):
        names: dict[str, Any] = {"nn": nn}
        # Each class has a forward of its own.
        exec("class Layer(nn.Linear):\n    def forward(self, input):\n        return super().forward(input)\n", names)
        modules[str(number)] = names["Layer"](1, 1)
    compile_modules(modules, RunOptions(compile=True), lambda: True)
    for module in modules.values():
        module(torch.ones(1, 1))
    assert len(graphs) == count


class Samples:
    """A plugin that generates in the middle of training."""

    @hookimpl
    def after_batch(self, context: Context) -> None:
        context["model"]["line"]["model"].generate(4)


class Terminal(stages.Terminal):
    """Generates at the end."""

    def terminal(self, context: Context) -> None:
        context["model"]["line"]["model"].generate(6)
        super().terminal(context)


def test_the_model_of_a_run_is_the_users_and_computes_eagerly_for_anyone_but_the_training(
    config: Config, run: Run, graphs: list[tuple[int, ...]]
) -> None:
    made, models = config(compile=True, terminal_class_path=Terminal), list[nn.Module]()
    made["plugins"] = [*made["plugins"], Samples]
    made["phase"][0] |= {"model": lambda: models.append(Sampling()) or models[0], "valid_dataset_name": "data"}
    model = run(made)["model"]["line"]["model"]
    assert model is models[0]
    assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
    # The batches have 4 rows and 2; torch may compile the second time for any number, and again for an evaluation.
    assert {shape[0] for shape in graphs} <= {4, 2}
    before = len(graphs)
    assert before
    model.generate(9)
    model(torch.ones(7, 3))
    assert len(graphs) == before


@pytest.mark.parametrize("own", ["compute_forward", "fit_batch", "evaluate_batch"])
def test_whatever_method_of_a_brain_computes_it_computes_compiled(
    own: str, make_table: Any, graphs: list[tuple[int, ...]]
) -> None:
    def called(self: Two, *args: Any) -> Any:
        self.modules.decoder(torch.ones(11, 4))
        return getattr(Two, own)(self, *args)

    brain = type("Mine", (Two,), {own: called})(run_opts={"compile_module_keys": ["decoder"]})
    data = DataLoader(make_table(10), batch_size=5)
    brain.fit(range(1), data, data)
    before = len(graphs)
    assert (11, 4) in graphs
    brain.modules.decoder(torch.ones(13, 4))
    assert len(graphs) == before


def test_what_an_updater_of_ones_own_computes_is_compiled(
    config: Config, run: Run, graphs: list[tuple[int, ...]]
) -> None:
    class Mine(UpdaterBase):
        def __init__(self, model: nn.Module, optim_schedulers: Any) -> None:
            super().__init__()
            self.model, self.schedulers = model, optim_schedulers

        def update(self, batch: Any) -> Tensor:
            loss = mse(self.model(batch[0]), batch[1])
            self.schedulers["main"].step(loss)
            return loss.detach()

    made = config(compile=True)
    made["phase"][0] |= {"updater": {"class_path": Mine}, "model": Sampling}
    run(made)
    assert (4, 3) in graphs


def test_a_copy_of_a_compiled_brain_computes_on_its_own_modules(make_table: Any) -> None:
    brain = Two(run_opts={"compile_module_keys": ["decoder"]})
    brain.on_fit_start()
    other = copy.deepcopy(brain)
    with torch.no_grad():
        other.modules.decoder.layer.weight.zero_()
        other.modules.decoder.layer.bias.fill_(5)
        assert (other.compute_forward([torch.ones(2, 3)], Stage.TEST) == 5).all()
        assert not other._computes


def test_the_tracing_of_shapes_is_left_to_torch_in_a_config_and_off_by_hand() -> None:
    assert RunnerSchema(name="train", **{"class": "train"}).compile_using_dynamic_shape_tracing is None
    assert RunOptions().compile_using_dynamic_shape_tracing is False


def test_scripted_modules_keep_their_names_and_train_to_the_same_weights(make_table: Any) -> None:
    brain, plain = fitted(make_table(10), jit_module_keys=["encoder"]), fitted(make_table(10))
    assert scripted(brain) == ["encoder"]
    assert close(brain.modules, plain.modules)


def test_a_run_scripts_what_its_config_says_and_saves_the_trained_weights(config: Config, run: Run) -> None:
    context, plain = run(config(jit=True)), run(config())
    brain, model = context["model"]["line"]["brain"], context["model"]["line"]["model"]
    assert scripted(brain) == ["model"]
    assert brain.module is brain.modules["model"]
    assert close(model, plain["model"]["line"]["model"])
    with torch.no_grad():
        assert torch.equal(brain.module(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_nothing_is_compiled_or_scripted_unless_asked(make_table: Any) -> None:
    brain = fitted(make_table(10))
    assert (compiled(brain), scripted(brain)) == ([], [])


def test_what_is_compiled_or_scripted_is_left_as_it_is_the_next_time() -> None:
    modules = nn.ModuleDict({"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)})
    options = RunOptions(compile_module_keys=["one"], jit_module_keys=["two"])
    compile_modules(modules, options, lambda: True)
    call, module = modules["one"]._compiled_call_impl, modules["two"]
    compile_modules(modules, options, lambda: True)
    assert modules["one"]._compiled_call_impl is call
    assert modules["two"] is module


def test_a_compiled_module_is_the_same_object_and_a_scripted_one_has_the_same_parameters() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    modules = nn.ModuleDict({"one": one, "two": two})
    compile_modules(modules, RunOptions(compile_module_keys=["one"], jit_module_keys=["two"]), lambda: True)
    assert modules["one"] is one
    assert modules["two"].weight is two.weight


@pytest.mark.parametrize("how", ["compile", "jit"])
def test_a_key_that_names_no_module_is_told_with_the_nearest(make_table: Any, how: str) -> None:
    message = rf"{how}_module_keys: there is no module 'decode'; did you mean 'decoder'\?"
    with pytest.raises(ConfigError, match=message):
        fitted(make_table(4), **{f"{how}_module_keys": ["decode"]})


def squeezed(predictions: Tensor, target: Tensor) -> Tensor:
    return mse(predictions.squeeze(1), target)


def test_compiled_loss_with_unequal_shapes_is_compiled(config: Config, run: Run) -> None:
    """A broadcast is looked for in its first call: one graph is for batches of 4, and one for 2."""
    graphs: list[Any] = []

    def compile_graph(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    loss = torch.compile(squeezed, backend=compile_graph, dynamic=False, fullgraph=True)
    chosen = config()
    x, y = table(10).tensors
    chosen["dataset"][0]["class_path"] = lambda: TensorDataset(x, y.squeeze(1))
    chosen["phase"][0]["loss"] = loss
    run(chosen)
    assert len(graphs) == 2
