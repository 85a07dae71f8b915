"""One phase as the default network stage builds it: how large it is, and a batch that goes through it.

All of it on the meta device, where a tensor has a shape and no numbers: nothing is allocated, nothing computed. What
fails there may be sound all the same, because it reads a number, and torch says less clearly what is wrong. So it is
tried once more for real, and only that counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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

    def size(self) -> tuple[int, int, int]:
        """How large the model is: (numbers in its parameters, those that are trained, bytes with its buffers).

        Raises:
            CannotTellError: a module takes its shape from its first batch, and there was none.
        """
        parameters = list(self.modules.parameters())
        if any(map(is_lazy, parameters)):
            raise CannotTellError("a lazy module takes its shape from the first batch")
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return sum(parameter.numel() for parameter in parameters), trained, _bytes(self.modules)

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

    def optimizers(self, device: torch.device) -> None:
        """Build the optimizers of the phase."""
        context, brain = self.context(device), self.entry(device)["brain"]
        Network(context).build_optim_schedulers(self.owner, brain, self.runner, context)


def _making(device: torch.device) -> AbstractContextManager[Any]:
    """Whatever makes a tensor makes it on the meta device; for real, it makes it where it does in a run."""
    return device if device == META else nullcontext()


def _bytes(modules: nn.Module) -> int:
    """What parameters and buffers take: of a sparse one its values, of a lazy one, which has no shape yet, nothing."""
    tensors = [tensor for tensor in (*modules.parameters(), *modules.buffers()) if not is_lazy(tensor)]
    return sum((t.numel() if t.layout is torch.strided else t._nnz()) * t.element_size() for t in tensors)


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
