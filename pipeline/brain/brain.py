"""Brain: how the predictions and losses of a model are computed, and how it is trained.

The names are those of SpeechBrain's ``Brain``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.brain.broadcasts import LossWatch
from pipeline.brain.checkpointer import Checkpoint, Checkpointer
from pipeline.brain.fit import fit, loader_of, refuse_faults, test
from pipeline.brain.internals import overridden
from pipeline.brain.recipes import RecipeMethods
from pipeline.brain.run_options import RunOptions
from pipeline.checkpoint.random_state import random_state, restore_random_state
from pipeline.compute.stage import Stage
from pipeline.data.batch import split
from pipeline.data.generators import own_generators
from pipeline.data.loader import make_loader
from pipeline.distributed.world import joined
from pipeline.errors import ConfigError
from pipeline.optim.losses import Losses
from pipeline.optim.parameter_groups import trainable_parameters, without_decay
from pipeline.run.exclusive import exclusive
from pipeline.user_code import class_path

__all__ = ["Brain", "Stage"]

# A class of datasets of SpeechBrain, and the class that makes its batches.
DYNAMIC = "speechbrain.dataio.dataset:DynamicItemDataset"
PADDED = "speechbrain.dataio.batch:PaddedBatch"


class Brain(RecipeMethods):
    """A model with its training: what is computed for a batch, and what is minimized.

    A subclass defines ``compute_forward`` and ``compute_objectives``. In a script, ``fit`` trains it
    and ``evaluate`` tests it. In a config, it is the ``model`` of a phase.

    The base class ``RecipeMethods`` has the methods and counters that recipes ported from SpeechBrain
    also use. Its base class ``BrainInternals`` has what the framework calls.

    Names that are not SpeechBrain's begin with an underscore, so that a subclass can use any other
    name. The exceptions are ``bind``, ``log``, ``count_samples``, ``target`` and ``readable``, which
    may be overridden.

    Args:
        modules: name -> module. They contain everything that is trained and saved;
            ``self.modules.<name>``.
        opt_class: makes an optimizer of the parameters, for ``fit``. In a config, the phase has
            ``optim_schedulers``.
        hparams: hyperparameters; ``self.hparams.<name>``. One with the name of a run option sets it.
        run_opts: run options (see RunOptions). They replace those in ``hparams``. In a config, the
            runner has such keys.
        checkpointer: where ``fit`` saves, and where ``evaluate`` finds the best checkpoint.

    Attributes:
        step: the number of the batch in its pass, from 1. A validation within a pass counts
            separately.
        optimizers_dict: the optimizers that the losses drive, by name; None before there are any.
        optimizer: the optimizer that ``opt_class`` has made, or the only one of a phase in a config.
        scaler: scales the loss in fp16; a disabled one in other precisions. A scaler that a subclass
            sets is kept.
        training_ctx, evaluation_ctx: autocast in ``precision`` and ``eval_precision``, for a
            ``fit_batch`` or ``evaluate_batch`` of a subclass.
        device, device_type: where it computes.
        train_sampler: its ``set_epoch`` is called when a training pass starts, unless it is None.

    Raises:
        ConfigError: a run option is wrong, or ``checkpointer`` is an object of another library.

    Example::

        class Regression(Brain):
            def compute_forward(self, batch, stage):
                return self.modules.net(batch[0])

            def compute_objectives(self, predictions, batch, stage):
                return torch.nn.functional.mse_loss(predictions, batch[1])


        data = [(torch.randn(3), torch.randn(1)) for _ in range(8)]
        make_sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        brain = Regression({"net": torch.nn.Linear(3, 1)}, opt_class=make_sgd)
        brain.fit(range(2), data, train_loader_kwargs={"batch_size": 4})
        loss = brain.evaluate(data, test_loader_kwargs={"batch_size": 4})
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        opt_class: Callable[..., Optimizer] | None = None,
        hparams: Mapping[str, Any] | None = None,
        run_opts: Mapping[str, Any] | RunOptions | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        if not isinstance(checkpointer, Checkpointer | None):
            what = f"checkpointer is a {type(checkpointer).__module__}.{type(checkpointer).__qualname__}"
            raise ConfigError(f"{what}; write pipeline.Checkpointer, in YAML !new:pipeline.Checkpointer")
        self.modules = nn.ModuleDict(dict(modules or {}))
        self.opt_class = opt_class
        self.hparams = SimpleNamespace(**(hparams or {}))
        self.checkpointer = checkpointer
        if checkpointer:
            checkpointer.session.begin(self._entry())
        self._trainable = self._make_trainable(Brain)
        self._loss_watch = LossWatch()
        self._apply_run_options(RunOptions.resolve(hparams, run_opts))
        if overridden(self, Brain, "print_trainable_parameters"):
            self.print_trainable_parameters()

    # What a subclass defines.

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """Return the predictions for a batch."""
        raise NotImplementedError(f"{type(self).__name__} does not define compute_forward(batch, stage)")

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor | Losses | None:
        """Return the loss of the predictions.

        Args:
            predictions: what ``compute_forward`` returned.
            batch: the batch.
            stage: the pass in which it is computed.

        Returns:
            A scalar tensor, which is a mean over samples, or a mapping of such losses by name.
            Outside of TRAIN it may be None. Then only the metrics and what is logged are reported.
        """
        kind = type(self).__name__
        raise NotImplementedError(f"{kind} does not define compute_objectives(predictions, batch, stage)")

    # Training and testing, without a config.

    def fit(
        self,
        epoch_counter: Iterable[int],
        train_set: Any,
        valid_set: Any = None,
        progressbar: bool | None = None,
        train_loader_kwargs: Mapping[str, Any] | None = None,
        valid_loader_kwargs: Mapping[str, Any] | None = None,
        plugins: Iterable[Any] = (),
    ) -> None:
        """Train, without a config.

        Under torchrun the processes share the work, see ``pipeline/distributed/README.md``.

        With a checkpointer, training continues from the newest checkpoint that a fit has saved
        there, also in the middle of an epoch. Restored are the weights, optimizers, counters and random
        generators, and what ``add_recoverable`` has named. The result is the same as if both fits
        had been one. If nothing is left to train, ``fit`` only logs that.

        As in SpeechBrain, a validation uses random numbers of the training. With dropout, a fit with
        ``valid_set`` ends with other weights than a fit without it. In a run of a config, validations
        leave the generators as they were.

        Args:
            epoch_counter: gives the number of each epoch: a range, a list, or an object that counts
                when it is iterated over. Epochs that are done are skipped: of each number, as many as
                have been trained to their end.
            train_set: a dataset, from which ``make_dataloader`` makes batches, or a loader that gives
                batches.
            valid_set: a dataset or a loader that is evaluated after each epoch. None: there is no
                validation.
            progressbar: whether to show a progress bar. None shows one if stderr is a terminal, unless
                ``noprogressbar`` is set.
            train_loader_kwargs: keyword arguments of the DataLoader for ``train_set``.
            valid_loader_kwargs: keyword arguments of the DataLoader for ``valid_set``.
            plugins: objects with hooks, or what the ``plugins`` of a config may contain:
                ``"early_stopping"``, ``{"ema": {"decay": 0.99}}``, a class. They get the hooks of a
                training, with ``"brain"`` as the phase and ``"runner"`` as the only stage. A plugin with
                ``wrap_model`` is an error. Checkpoints keep the states of plugins. Plugins write
                into the hyperparameter ``output_folder``.

        Raises:
            ConfigError: there is nothing to train, a module keeps layers in a plain list, keywords are
                given for a loader that is already made, or the class defines a method of SpeechBrain
                that is never called here.
            StageError: nothing says how to optimize.
            DataError: there is no data, or it does not fit.
            DivergedError: too many losses were not finite.
            CheckpointError: the checkpoints are of something else, or none of them is valid.
            StorageError: a checkpoint or file cannot be written.
            ConcurrentRunError: another thread of this process is training.
        """
        refuse_faults(self, Brain)
        if self._run_options.test_only:
            return
        self._debug_folder = self._new_debug_folder()
        name = f"{type(self).__name__}.fit"
        with (
            exclusive(name, may_nest=True),
            joined(),
            self._checkpoints_in(self._debug_folder),
            ExitStack() as workers,
        ):
            train = loader_of(self, train_set, Stage.TRAIN, train_loader_kwargs, workers)
            valid = None
            if valid_set is not None:
                valid = loader_of(self, valid_set, Stage.VALID, valid_loader_kwargs, workers)
            self._trainable.work_alone()
            self.on_fit_start()
            fit(self, epoch_counter, train, valid, show=progressbar, plugins=plugins)

    def evaluate(
        self,
        test_set: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        test_loader_kwargs: Mapping[str, Any] | None = None,
    ) -> float:
        """Evaluate, with the best checkpoint if there is a checkpointer.

        After a ``fit`` with the option ``debug``, the checkpoint is one of that fit.

        Args:
            test_set: a dataset or a loader, as in ``fit``.
            max_key: the number whose highest value chooses the checkpoint. Each checkpoint counts with
                the numbers of its iteration.
            min_key: the number whose lowest value chooses it. Without either key it is the newest.
            progressbar: whether to show a progress bar. None shows one if stderr is a terminal, unless
                ``noprogressbar`` is set.
            test_loader_kwargs: keyword arguments of the DataLoader.

        Returns:
            The mean loss over samples. It is the same on all ranks.

        Raises:
            ConfigError: both keys are given, or one without a checkpointer; or as in ``fit``.
            ConcurrentRunError: another thread of this process is training.
        """
        refuse_faults(self, Brain)
        name = f"{type(self).__name__}.evaluate"
        with exclusive(name, trains=False, may_nest=True), joined(), ExitStack() as workers:
            loader = loader_of(self, test_set, Stage.TEST, test_loader_kwargs, workers)
            self._place_modules()
            in_run = self._trainable.in_run
            generators = own_generators({"": self}, {"test": loader}) if in_run else {}
            random = random_state(generators) if in_run else None
            with self._checkpoints_in(self._debug_folder):
                self.on_evaluate_start(max_key, min_key)
            loss = test(self, loader, progressbar)
            if random:
                # Within a run, an evaluation does not change the training.
                restore_random_state(random, generators)
        return loss

    def make_dataloader(
        self, dataset: Any, stage: Stage, ckpt_prefix: str | None = "dataloader-", **loader_kwargs: Any
    ) -> Iterable[Any]:
        """Return a loader of a dataset.

        The order of samples depends only on the hyperparameter ``seed`` and the epoch.

        Args:
            dataset: map-style, iterable, or a list of samples. A DynamicItemDataset of SpeechBrain gives
                PaddedBatches.
            stage: the pass that uses it.
            ckpt_prefix: kept for callers written for SpeechBrain, and not used: ``fit`` keeps the place
                in the data of any loader.
            loader_kwargs: keyword arguments of torch's DataLoader.
        """
        if DYNAMIC in (f"{base.__module__}:{base.__qualname__}" for base in type(dataset).__mro__):
            loader_kwargs.setdefault("collate_fn", class_path.load(class_path.parse(PADDED)))
        seed = loader_kwargs.pop("seed", getattr(self.hparams, "seed", 0))
        return make_loader(dataset, seed=seed, where="Brain.make_dataloader", **loader_kwargs)

    # What a subclass may override or extend.

    def init_optimizers(self) -> None:
        """Make the optimizer with ``opt_class``.

        A subclass with multiple optimizers puts them into ``optimizers_dict``, by name. All of them
        descend the loss named ``loss``. For other losses, bind OptimSchedulers that name them. A subclass
        whose ``fit_batch`` steps its optimizers may keep them anywhere. In a config, the
        ``init_optimizers`` of a subclass is called if the config names no optimizer.
        """
        if self.opt_class is None:
            return
        parameters = list(trainable_parameters(self.modules, None).values())
        groups = without_decay(parameters) if self._run_options.remove_vector_weight_decay else parameters
        self.optimizer = self.opt_class(groups)
        self.optimizers_dict = {"opt_class": self.optimizer}

    def on_fit_start(self) -> None:
        """Prepare the modules, and make the optimizers. After it, ``fit`` restores the checkpoint.

        In a config, the optimizers are those of the phase, and the startup stage has already loaded the
        weights. A resumed run restores everything after this call, whichever runner stage follows.
        """
        self._place_modules()
        if self._trainable.in_run:
            return
        type(self).bind(self, "", self._make_optimizers(), patience=self._run_options.nonfinite_patience)

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the weights of the best checkpoint, or of the newest if no key is given.

        Raises:
            ConfigError: both keys are given, or one without a checkpointer.
        """
        metric = max_key or min_key
        if max_key and min_key:
            raise ConfigError(f"evaluate: max_key is '{max_key}' and min_key '{min_key}'; name one")
        if self.checkpointer is None:
            if metric:
                what = f"evaluate: '{metric}' chooses a checkpoint, and there is no checkpointer"
                raise ConfigError(f"{what}; give the Brain one")
            return
        recovered = self.checkpointer.recover_if_possible(max_key=max_key, min_key=min_key)
        if metric and not recovered:
            # No call has given the checkpointer such a number, so it is one that fit reports.
            path = self.checkpointer.best(metric, "max" if max_key else "min")
            if path:
                self.checkpointer.load_checkpoint(Checkpoint.read(path))

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Do something before a pass. ``epoch`` is None in a test."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Do something after a pass.

        Args:
            stage: the pass.
            stage_loss: the mean loss of the pass over samples; nan if no loss was computed.
            epoch: the number of the epoch; None in a test.
        """

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Do something before a training batch. ``should_step``: whether it closes a window."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        """Do something after a training batch.

        Args:
            batch: the batch.
            outputs: the predictions.
            loss: the loss, detached, on its device.
            should_step: whether the batch closes an accumulation window.
        """

    def fit_batch(self, batch: Any) -> Tensor:
        """Train on a batch.

        Returns:
            The loss, detached, on its device. It is not finite if the step was discarded. For a batch
            without samples it is 0; nothing is computed then, and no hook of the Brain is called.
        """
        return self._trainable.fit_batch(batch)

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        """Return the loss of one batch, without training."""
        return self._trainable.evaluate_batch(batch, stage)

    def count_samples(self, batch: Any) -> int:
        """Return how many samples a batch holds. Its loss has this weight in each mean.

        It is what ``count_samples`` of the phase returns. Without that, it is the length of the first
        tensor in the batch, or of an object with ``to``; for a plain module, the length of the target. A
        subclass may return whatever its loss is a mean over, such as tokens. A batch of 0 contributes
        nothing: its loss is not used.
        """
        return self._trainable.default_count(batch)

    def target(self, batch: Any) -> Any:
        """Return what the metrics compare the predictions with."""
        return split(batch)[1]

    def readable(self, predictions: Any, batch: Any) -> Any:
        """Return what the metrics get of the predictions, and what is written of them.

        By default these are the predictions.
        """
        return predictions

    # What a subclass calls.

    def log(self, name: str, value: Tensor | float, batch_size: int | None = None) -> None:
        """Report a number.

        It is averaged over the samples of the pass, and stays on its device until it is read.

        Args:
            name: the name in the report; a validation pass puts ``valid_`` before it. The names of
                metrics are taken. So is ``loss``, except for an updater that returns no loss.
            value: a scalar that is a mean over the samples.
            batch_size: the number of these samples. None takes the samples of the batch.
        """
        self._trainable.numbers.logged.log(name, value, batch_size)
