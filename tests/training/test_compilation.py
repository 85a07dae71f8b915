"""Modules that are compiled or scripted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from pipeline import Brain, Stage
from pipeline.context import Context
from pipeline.errors import ConfigError
from pipeline.training.run_options import RunOptions, compile_modules

Config = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Context]
mse = nn.functional.mse_loss
# What torch says of itself, when it scripts or compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Failed to initialize NumPy:UserWarning"),
]
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler on a CPU"
)


class Two(Brain):
    """An encoder and a decoder, both with random weights from seed 0."""

    def __init__(self, **keywords: Any) -> None:
        torch.manual_seed(0)
        modules = {"encoder": nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "decoder": nn.Linear(4, 1)}
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
def test_compiled_modules_keep_their_names_and_train_to_the_same_weights(make_table: Any) -> None:
    brain, plain = fitted(make_table(10), compile_module_keys=["decoder"]), fitted(make_table(10))
    assert compiled(brain) == ["decoder"]
    assert close(brain.modules, plain.modules)
    x = make_table(10).tensors[0]
    assert torch.allclose(brain.modules.encoder(x), plain.modules.encoder(x), atol=1e-6)


@needs_compiler
def test_a_run_compiles_what_its_config_says(config: Config, run: Run) -> None:
    chosen = config(compile=True, compile_using_dynamic_shape_tracing=None)
    context, plain = run(chosen), run(config())
    assert compiled(context["model"]["line"]["brain"]) == ["model"]
    assert close(context["model"]["line"]["model"], plain["model"]["line"]["model"])


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
    compile_modules(modules, options)
    call, module = modules["one"]._compiled_call_impl, modules["two"]
    compile_modules(modules, options)
    assert modules["one"]._compiled_call_impl is call
    assert modules["two"] is module


def test_a_compiled_module_is_the_same_object_and_a_scripted_one_has_the_same_parameters() -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    modules = nn.ModuleDict({"one": one, "two": two})
    compile_modules(modules, RunOptions(compile_module_keys=["one"], jit_module_keys=["two"]))
    assert modules["one"] is one
    assert modules["two"].weight is two.weight


@pytest.mark.parametrize("how", ["compile", "jit"])
def test_a_key_that_names_no_module_is_told_with_the_nearest(make_table: Any, how: str) -> None:
    message = rf"{how}_module_keys: there is no module 'decode'; did you mean 'decoder'\?"
    with pytest.raises(ConfigError, match=message):
        fitted(make_table(4), **{f"{how}_module_keys": ["decode"]})
