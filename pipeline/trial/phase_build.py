"""One phase as the default network stage builds it: how large it is, and a batch that goes through it.

All of it on the meta device, where a tensor has a shape and no numbers: nothing is allocated, nothing computed. What
fails there may be sound all the same, because it reads a number, and torch says less clearly what is wrong. So it is
tried once more for real, and only that counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pipeline import discovery
from pipeline.config.load import Config
from pipeline.config.schema import PhaseSchema, RunnerSchema
from pipeline.context import TRAIN_STATE, Context
from pipeline.data.batch import shape_of, to_device
from pipeline.stages.network import Network
from pipeline.training.brain import Brain, Stage
from pipeline.training.evaluation import evaluating
from pipeline.trial.problems import CannotTellError

CPU, META = torch.device("cpu"), torch.device("meta")
LARGE = 2**31
"""Bytes of weights beyond which nothing is tried for real."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Size:
    """How large a model is.

    Attributes:
        parameters: how many numbers it has.
        trained: how many of them are trained.
        weights: bytes of its parameters and buffers.
        gradients: bytes of the gradients in training.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int


class PhaseBuild:
    """A phase, built once on each device that is asked for.

    Attributes:
        owner: the phase whose model it has: itself, or the one that ``model_of`` names.
    """

    def __init__(self, phase: PhaseSchema, runner: RunnerSchema, config: Config) -> None:
        self.phase = phase
        self.runner = runner
        self.config = config
        self.owner = next((each for each in config.phases(runner) if each.name == phase.model_of), phase)
        self.built: dict[torch.device, dict[str, Any]] = {}

    def tried(self, act: Callable[[torch.device], _T]) -> _T:
        """What ``act`` does on the meta device; where it fails there, what it does for real.

        Raises:
            CannotTellError: it fails on the meta device, and the model is too large for more.
            Exception: what ``act`` raises for real.
        """
        try:
            return act(META)
        except (Exception, SystemExit) as error:
            if META in self.built and _bytes(self.modules) > LARGE:
                raise CannotTellError("too large to be tried but on the meta device", error) from error
        return act(CPU)

    def entry(self, device: torch.device) -> dict[str, Any]:
        """What ``context["model"]`` would hold for the phase, but for optimizers."""
        if device not in self.built:
            with _making(device), warnings.catch_warnings():
                # A constructor that loads weights would be told that nothing is copied.
                warnings.filterwarnings("ignore", message=".*to a meta parameter")
                context = self.context(device)
                phase = self.owner.model_copy(deep=True)
                self.built[device] = Network(context).build_phase(phase, self.runner, context)
        return self.built[device]

    def context(self, device: torch.device) -> Context:
        """What the network stage reads of the context; infer, so that it leaves the optimizer to us."""
        return Context(
            config=self.config,
            hyper_parameters=self.config.plain()["hyper_parameters"],
            runner_name=self.runner.name,
            device=device,
            is_infer=True,
            hooks=discovery.manager().hook,
            train_state=dict.fromkeys(TRAIN_STATE, 0),
        )

    @property
    def name(self) -> str:
        """The name of the model's class."""
        return type(next(iter(self.built.values()))["model"]).__name__

    @property
    def modules(self) -> nn.Module:
        """All that is trained and saved, on whichever device it could be built."""
        modules: nn.Module = next(iter(self.built.values()))["brain"].modules
        return modules

    def size(self) -> Size:
        """How large the model is.

        Raises:
            CannotTellError: a module takes its shape from its first batch, and there was none.
        """
        parameters = list(self.modules.parameters())
        if any(map(is_lazy, parameters)):
            raise CannotTellError("a lazy module takes its shape from the first batch")
        trained = [each for each in parameters if each.requires_grad]
        return Size(
            parameters=sum(each.numel() for each in parameters),
            trained=sum(each.numel() for each in trained),
            weights=_bytes(self.modules),
            gradients=sum(map(_stored, trained)),
        )

    def forward(self, batch: Any, stage: Stage, device: torch.device) -> str:
        """The shape of the predictions for a batch."""
        with self._passing(stage, device) as brain:
            return _shapes(brain.compute_forward(to_device(batch, device), stage))

    def loss(self, batch: Any, stage: Stage, device: torch.device) -> None:
        """The losses of a batch, held to what training asks of them."""
        with self._passing(stage, device) as brain:
            brain.evaluate_batch(to_device(batch, device), stage)

    @contextmanager
    def _passing(self, stage: Stage, device: torch.device) -> Iterator[Brain]:
        brain: Brain = self.entry(device)["brain"]
        brain._begin_pass()
        with _making(device), nullcontext() if stage is Stage.TRAIN else evaluating(brain):
            yield brain

    def optimizers(self, device: torch.device) -> list[Optimizer]:
        """The optimizers of the phase."""
        context, brain = self.context(device), self.entry(device)["brain"]
        built = Network(context).build_optim_schedulers(self.owner, brain, self.runner, context)
        return [each.optimizer for each in built.values()]

    def optimizer(self, device: torch.device) -> Optimizer:
        """The first of them."""
        return self.optimizers(device)[0]

    def optimizer_bytes(self, device: torch.device) -> int:
        """Bytes that the optimizers keep after a step."""
        return sum(_kept(each) for each in self.optimizers(device))


def _kept(optimizer: Optimizer) -> int:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [each for state in optimizer.state.values() for each in state.values()]
    return sum(_stored(each) for each in kept if isinstance(each, Tensor))


def _making(device: torch.device) -> AbstractContextManager[Any]:
    """Whatever makes a tensor makes it on the meta device; for real, it makes it where it does in a run."""
    return device if device == META else nullcontext()


def _bytes(modules: nn.Module) -> int:
    """What parameters and buffers take; a lazy one, which has no shape yet, takes nothing."""
    return sum(_stored(each) for each in (*modules.parameters(), *modules.buffers()) if not is_lazy(each))


_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}


def _stored(tensor: Tensor) -> int:
    """The bytes of a tensor; of a sparse one, those of its parts."""
    parts = [getattr(tensor, part)() for part in _PARTS.get(tensor.layout, ())]
    return sum(each.nbytes for each in parts or [tensor])


def batch_shapes(value: Any) -> str:
    """``(inputs [32, 2], target [32])``."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return f"(inputs {_shapes(value[0])}, target {_shapes(value[1])})"
    return _shapes(value)


def _shapes(value: Any) -> str:
    """``[32, 2]``."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} {_shapes(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple) and len(value) <= 8:
        return f"({', '.join(_shapes(each) for each in value)})"
    return shape_of(value)
