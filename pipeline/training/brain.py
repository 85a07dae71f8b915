"""Brain: what a model computes, and how it is trained by itself; ModuleBrain around a plain module. Names are SpeechBrain's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import Parameter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import finalize

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.data.batch import on_device, shape_of, split
from pipeline.data.loader import LimitedLoader, length, make_loader, without_state
from pipeline.errors import ConfigError, DataError
from pipeline.training.batch_brain import BatchBrain, Stage
from pipeline.training.evaluation import evaluate
from pipeline.training.fit import NAME, Fit, pass_progress
from pipeline.training.optim_scheduler import OptimScheduler, trainable_parameters, without_decay
from pipeline.training.schedules import Constant
from pipeline.user_code import source
from pipeline.user_code.uncalled import BRAIN, BRAIN_REMEDIES, uncalled_faults

__all__ = ["Brain", "Stage"]


class Brain(BatchBrain):
    """Computes predictions and losses; a subclass defines ``compute_forward`` and ``compute_objectives``.

    By itself it trains with ``fit``, and ``evaluate`` tests it; in a config it is the ``model`` of a phase. What it does
    with one batch is in BatchBrain, with its arguments and attributes.

    Attributes:
        optimizers_dict: the optimizers that the losses drive in ``fit``, by name.
    """

    optimizers_dict: dict[str, Optimizer]
    # Has the checkpoints of the debug fit that was the last; None where the last was none.
    _debug_folder: TemporaryDirectory[str] | None = None

    def fit(
        self,
        epoch_counter: Iterable[int],
        train_set: Any,
        valid_set: Any = None,
        progressbar: bool | None = None,
        train_loader_kwargs: Mapping[str, Any] | None = None,
        valid_loader_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Train, without a config.

        With a checkpointer it goes on from where the last epoch ended that a fit has saved there: weights, optimizers,
        counters, random generators, and what ``add_recoverable`` has named. After it everything is as if that fit and
        this one had been one. It ends with a log line where nothing is left to train.

        Args:
            epoch_counter: gives the number of each epoch: a range, a list, or an object that counts by itself. Those
                that are done are skipped: of each number as many epochs as have been trained to their end.
            train_set: a dataset, of which ``make_dataloader`` makes batches, or a loader that gives batches.
            valid_set: likewise; evaluated after each epoch. None: nothing is.
            progressbar: whether to show one; None: where stderr is a terminal, unless ``noprogressbar``.
            train_loader_kwargs: keyword arguments of the DataLoader.
            valid_loader_kwargs: likewise.

        Raises:
            ConfigError: there is nothing to train, keywords are given for a loader that is made already, or the class
                defines a method of SpeechBrain's that nobody calls.
            StageError: nothing says how to optimize.
            DataError: there is no data, or it does not fit.
            DivergedError: too many losses were not finite.
            CheckpointError: the checkpoints are of something else, or none of them is valid.
            StorageError: the storage refuses.
        """
        self._refuse_uncalled()
        if self._run_options.test_only:
            return
        train = self._loader_of(train_set, Stage.TRAIN, train_loader_kwargs)
        valid = None if valid_set is None else self._loader_of(valid_set, Stage.VALID, valid_loader_kwargs)
        self._debug_folder = self._new_debug_folder()
        with self._checkpoints_in(self._debug_folder):
            self.on_fit_start()
            show_progress = False if self._run_options.noprogressbar and progressbar is None else progressbar
            Fit(self, train, valid, show_progress).run(epoch_counter)

    def evaluate(
        self,
        test_set: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        test_loader_kwargs: Mapping[str, Any] | None = None,
    ) -> float:
        """Evaluate, with the best checkpoint if there is a checkpointer; after a debug ``fit``, with a checkpoint of that fit.

        Args:
            test_set: a dataset or a loader, as in ``fit``.
            max_key: the number by which the best checkpoint is chosen, more being better; each by those of its own iteration.
            min_key: likewise, less being better. Without either it is the newest.
            progressbar: whether to show one; None: where stderr is a terminal, unless ``noprogressbar``.
            test_loader_kwargs: keyword arguments of the DataLoader.

        Returns:
            The mean loss over samples.
        """
        self._refuse_uncalled()
        loader = self._loader_of(test_set, Stage.TEST, test_loader_kwargs)
        if self._run_options.debug:
            loader = LimitedLoader(loader, self._run_options.debug_batches)
        self._place_modules()
        with self._checkpoints_in(self._debug_folder):
            self.on_evaluate_start(max_key, min_key)
        show_progress = False if self._run_options.noprogressbar and progressbar is None else progressbar
        with pass_progress("test", length(loader), show_progress) as bar:
            batches: Iterable[Any] = on_device(without_state(loader), self.device)
            if not bar.disable:
                batches = bar.track(batches, task_id=bar.task_ids[0])
            return evaluate(self, batches, Stage.TEST, {})["loss"]

    def make_dataloader(self, dataset: Any, stage: Stage, **loader_kwargs: Any) -> Iterable[Any]:
        """A loader of a dataset. The order of samples depends on the hyperparameter ``seed`` and the epoch alone.

        Args:
            dataset: map-style, iterable, or a list of samples.
            stage: what for.
            loader_kwargs: keyword arguments of torch's DataLoader.
        """
        seed = loader_kwargs.pop("seed", getattr(self.hparams, "seed", 0))
        return make_loader(dataset, seed=seed, where="Brain.make_dataloader", **loader_kwargs)

    def init_optimizers(self) -> None:
        """Make the optimizer with ``opt_class``; a subclass with several puts them into ``optimizers_dict``, by name.

        All of these descend the loss named ``loss``; for others, bind OptimSchedulers that say so. A subclass whose own
        ``fit_batch`` steps its optimizers may keep them where it likes.
        """
        if self.opt_class is None:
            return
        parameters = list(trainable_parameters(self.modules, None).values())
        groups = without_decay(self.modules) if self._run_options.remove_vector_weight_decay else parameters
        self.optimizer = self.opt_class(groups)
        self.optimizers_dict = {"opt_class": self.optimizer}

    def on_fit_start(self) -> None:
        """Prepare the modules, and make the optimizers; then ``fit`` restores the checkpoint.

        In a config the optimizers are those of the phase, and the startup stage has loaded the weights. A run that is
        resumed takes everything back after it, whichever runner stage comes.
        """
        self._place_modules()
        if self._in_run:
            return
        self.optimizers_dict = {}
        self.init_optimizers()
        options, schedulers = self._run_options, dict[str, OptimScheduler]()
        factor, norm = options.grad_accumulation_factor, options.max_grad_norm
        for name, optimizer in self.optimizers_dict.items():
            make = partial(_same_optimizer, optimizer)
            schedulers[name] = Constant(make, {}, self.modules, accum_grad=factor, grad_clip=norm)
            schedulers[name].check_gradients = options.skip_nonfinite_grads
        type(self).bind(self, "", schedulers, patience=options.nonfinite_patience)

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the weights of the best checkpoint, or of the newest if no key is given."""
        metric = max_key or min_key
        if max_key and min_key:
            raise ConfigError(f"evaluate: max_key is '{max_key}' and min_key '{min_key}'; name one")
        if self.checkpointer is None:
            if metric:
                what = f"evaluate: '{metric}' chooses a checkpoint, and there is no checkpointer"
                raise ConfigError(f"{what}; give the Brain one")
            return
        path = self.checkpointer.best(metric, "max" if max_key else "min") if metric else self.checkpointer.newest()
        if path:
            self.checkpointer.load_weights(path, {NAME: {"model": self, "brain": self}})

    def _refuse_uncalled(self) -> None:
        """Raise for methods that nobody calls; with a config, ``check`` reports them."""
        faults = [] if self._in_run else uncalled_faults(source.class_definition(type(self)), BRAIN, BRAIN_REMEDIES)
        if faults:
            raise ConfigError("\n".join(faults))

    def _new_debug_folder(self) -> TemporaryDirectory[str] | None:
        """For the checkpoints of a debug run, a temporary folder that exists until the next fit; None for another run."""
        if self._debug_folder:
            self._debug_folder.cleanup()
        if not self.checkpointer or not self._run_options.debug or self._run_options.debug_persistently:
            return None
        folder = TemporaryDirectory(prefix="debug-")
        finalize(self, folder.cleanup)
        return folder

    @contextmanager
    def _checkpoints_in(self, folder: TemporaryDirectory[str] | None) -> Iterator[None]:
        """Use another folder for checkpoints until the block ends; None: the checkpointer's own."""
        checkpointer = self.checkpointer
        recoverables = dict(checkpointer.recoverables) if checkpointer else {}
        if checkpointer and folder:
            self.checkpointer = Checkpointer(Path(folder.name))
            self.checkpointer.recoverables = dict(recoverables)
        try:
            yield
        finally:
            self.checkpointer = checkpointer
            # What was added in the block, as by on_fit_start, is of this fit.
            if checkpointer:
                checkpointer.recoverables = recoverables

    def _loader_of(self, data: Any, stage: Stage, keywords: Mapping[str, Any] | None) -> Any:
        """The loader itself, or a loader made of a dataset."""
        if hasattr(data, "__getitem__") or isinstance(data, Dataset):
            return self.make_dataloader(data, stage, **(keywords or {}))
        if keywords:
            what = f"{stage.name.lower()}_loader_kwargs would be ignored: {type(data).__name__} is a loader already"
            raise ConfigError(f"{what}; give fit the dataset, or leave it out")
        return data


def _same_optimizer(optimizer: Optimizer, _parameters: object) -> Optimizer:
    return optimizer


class ModuleBrain(Brain):
    """Makes a Brain of a module and a loss.

    Args:
        module: called with the batch's inputs, by position or name.
        loss: ``loss(predictions, target)`` -> scalar.
    """

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__({"model": module})
        self.module = module
        self.loss = loss
        self._signature = inspect.signature(module.forward)
        by_name = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
        parameters = self._signature.parameters.items()
        # Name -> whether it has a default.
        self._defaults = {name: own.default is not Parameter.empty for name, own in parameters if own.kind in by_name}

    def _place_modules(self) -> None:
        """Place the modules, and the loss if it is a module; scripting replaces a module by another."""
        super()._place_modules()
        if isinstance(self.loss, nn.Module):
            self.loss.to(self.device)
        self.module = self.modules["model"]

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The module's output for the batch's inputs."""
        inputs, _ = split(batch)
        try:
            if type(inputs) is not Tensor and isinstance(inputs, list | tuple):
                return self.module(*inputs)
            if type(inputs) is not Tensor and isinstance(inputs, Mapping):
                return self.module(**self._by_name(inputs, batch))
            return self.module(inputs)
        except TypeError as error:
            self._explain(error, inputs)
            raise

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor:
        """The loss of the predictions."""
        return self.loss(predictions, split(batch)[1])

    def _by_name(self, inputs: Mapping[str, Any], batch: Any) -> Mapping[str, Any]:
        """The items of a mapping that ``forward`` takes; the inputs of a pair are passed as they are."""
        if not isinstance(batch, Mapping):
            return inputs
        if missing := [name for name, has_default in self._defaults.items() if not has_default and name not in batch]:
            what = f"a batch with the keys {', '.join(map(str, batch))} has no '{missing[0]}'"
            forward = f"{type(self.module).__name__}.forward{self._signature}"
            raise DataError(f"{self._where}{what}, which {forward} takes; name one so, or write a Brain")
        return {name: batch[name] for name in self._defaults if name in batch} or inputs

    def _explain(self, error: TypeError, inputs: Any) -> None:
        """Raise a clearer error than ``error`` if the batch does not fit the signature of ``forward``."""
        keywords = inputs if isinstance(inputs, Mapping) else {}
        positional = inputs if isinstance(inputs, list | tuple) else () if keywords else (inputs,)
        try:
            self._signature.bind(*positional, **keywords)
        except TypeError as mismatch:
            names = ", ".join(f"{name}: {shape_of(value)}" for name, value in keywords.items())
            shapes = names or ", ".join(shape_of(value) for value in positional)
            what = f"the inputs of a batch are ({shapes}), and {type(self.module).__name__}.forward takes"
            remedy = "return them so from the dataset, or write a Brain"
            raise DataError(f"{self._where}{what} {self._signature}: {mismatch}; {remedy}") from error
