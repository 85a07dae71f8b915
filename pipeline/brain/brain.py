"""Brain: what is computed for a batch, and how that trains a model; ModuleBrain around a plain module. Names are SpeechBrain's."""

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
from pipeline.context import Context
from pipeline.data.batch import split
from pipeline.data.generators import own_generators
from pipeline.data.loader import make_loader
from pipeline.distributed.world import joined
from pipeline.engine.trainable import Stage, Trainable
from pipeline.errors import ConfigError
from pipeline.optim.losses import Losses
from pipeline.optim.parameter_groups import trainable_parameters, without_decay
from pipeline.run.exclusive import exclusive
from pipeline.user_code import class_path
from pipeline.user_code.plugin_calls import hook_or_none

__all__ = ["Brain", "Stage"]

# A dataset of SpeechBrain's, and what makes its batches.
DYNAMIC, PADDED = "speechbrain.dataio.dataset:DynamicItemDataset", "speechbrain.dataio.batch:PaddedBatch"


class Brain(RecipeMethods):
    """Computes predictions and losses; a subclass defines ``compute_forward`` and ``compute_objectives``.

    By itself it trains with ``fit``, and ``evaluate`` tests it; in a config it is the ``model`` of a phase.

    Args:
        modules: name -> module: all that is trained and saved; ``self.modules.<name>``.
        opt_class: makes an optimizer of the parameters, for ``fit``; in a config, the phase has ``optim_schedulers``.
        hparams: hyperparameters; ``self.hparams.<name>``. One with the name of a run option sets it.
        run_opts: run options (see RunOptions), over those in ``hparams``; in a config, the runner has such keys.
        checkpointer: where ``fit`` saves, and ``evaluate`` finds the best checkpoint.

    Attributes:
        step: the number of the batch in its pass, from 1; a validation within a pass counts separately.
        optimizers_dict: the optimizers that the losses drive, by name; None before there are any.
        optimizer: the one that ``opt_class`` has made, or the only one of a phase in a config.
        scaler: scales the loss in fp16; elsewhere a disabled one. One of the user's own stays.
        training_ctx, evaluation_ctx: autocast as ``precision`` and ``eval_precision`` say, for a ``fit_batch`` or
            ``evaluate_batch`` of its own.
        device, device_type: where it computes.
        train_sampler: whose ``set_epoch`` is called when a training pass begins; None: nobody's.

    Names that are not SpeechBrain's begin with an underscore, so that a subclass is free in its own; except ``bind``,
    ``log``, ``count_samples``, ``target`` and ``readable``, which may be overridden.
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
        counts_itself = None
        if overridden(self, Brain, "count_samples"):
            # Looked up on the class, so that an attribute of this name may be a subclass's own.
            method = type(self).count_samples.__get__(self)
            counts_itself = method, f"{type(self).__name__}.count_samples"
        names = [name for base in Brain.__mro__ for name in vars(base) if not name.startswith("_")]
        self._trainable = Trainable(
            self,
            overridden(self, Brain, *names),
            self._count,
            counts_itself,
            self._fast_computation(),
            self._loss_source,
            self._compiled,
            self._named_modules,
        )
        self._loss_watch = LossWatch()
        self._apply_run_options(RunOptions.resolve(hparams, run_opts))
        if overridden(self, Brain, "print_trainable_parameters"):
            self.print_trainable_parameters()

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
        """Train, without a config. Under torchrun the processes share the work, see ``pipeline/distributed/README.md``.

        With a checkpointer it goes on from the newest checkpoint that a fit has saved there, also in the middle of an
        epoch: weights, optimizers, counters, random generators, and what ``add_recoverable`` has named. After it
        everything is as if that fit and this one had been one. It ends with a log line where nothing is left to train.

        As in SpeechBrain, a validation uses random numbers of the training: with dropout, a fit with ``valid_set`` ends
        with other weights than one without it. In a run of a config validations leave the generators as they were.

        Args:
            epoch_counter: gives the number of each epoch: a range, a list, or an object that counts by itself. Those
                that are done are skipped: of each number as many epochs as have been trained to their end.
            train_set: a dataset, of which ``make_dataloader`` makes batches, or a loader that gives batches.
            valid_set: likewise; evaluated after each epoch. None: nothing is.
            progressbar: whether to show one; None: where stderr is a terminal, unless ``noprogressbar``.
            train_loader_kwargs: keyword arguments of the DataLoader.
            valid_loader_kwargs: likewise.
            plugins: objects with hooks, or what the ``plugins`` of a config may have: ``"early_stopping"``,
                ``{"ema": {"decay": 0.99}}``, a class. They get the hooks of a training, with ``"brain"`` as the phase and
                ``"runner"`` as the only stage; a plugin with ``wrap_model`` is refused. Checkpoints keep the states of
                plugins. Plugins write into the hyperparameter ``output_folder``.

        Raises:
            ConfigError: there is nothing to train, a module keeps layers in a plain list, keywords are given for a loader
                that is made already, or the class defines a method of SpeechBrain's that nobody calls.
            StageError: nothing says how to optimize.
            DataError: there is no data, or it does not fit.
            DivergedError: too many losses were not finite.
            CheckpointError: the checkpoints are of something else, or none of them is valid.
            StorageError: the storage refuses.
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
            valid = None if valid_set is None else loader_of(self, valid_set, Stage.VALID, valid_loader_kwargs, workers)
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
        """Evaluate, with the best checkpoint if there is a checkpointer; after a debug ``fit``, with a checkpoint of that fit.

        Args:
            test_set: a dataset or a loader, as in ``fit``.
            max_key: the number by which the best checkpoint is chosen, more being better; each by those of its own iteration.
            min_key: likewise, less being better. Without either it is the newest.
            progressbar: whether to show one; None: where stderr is a terminal, unless ``noprogressbar``.
            test_loader_kwargs: keyword arguments of the DataLoader.

        Returns:
            The mean loss over samples, the same on all ranks.

        Raises:
            ConcurrentRunError: another thread of this process is training.
        """
        refuse_faults(self, Brain)
        name = f"{type(self).__name__}.evaluate"
        with exclusive(name, trains=False, may_nest=True), joined(), ExitStack() as workers:
            loader = loader_of(self, test_set, Stage.TEST, test_loader_kwargs, workers)
            self._place_modules()
            in_run = self._trainable.in_run
            own = own_generators({"": self}, {"test": loader}) if in_run else {}
            random = random_state(own) if in_run else None
            with self._checkpoints_in(self._debug_folder):
                self.on_evaluate_start(max_key, min_key)
            loss = test(self, loader, progressbar)
            if random:
                # Within a run it leaves the training as it was.
                restore_random_state(random, own)
        return loss

    def make_dataloader(
        self, dataset: Any, stage: Stage, ckpt_prefix: str | None = "dataloader-", **loader_kwargs: Any
    ) -> Iterable[Any]:
        """A loader of a dataset. The order of samples depends on the hyperparameter ``seed`` and the epoch alone.

        Args:
            dataset: map-style, iterable, or a list of samples; a DynamicItemDataset of SpeechBrain gives PaddedBatches.
            stage: what for.
            ckpt_prefix: kept for SpeechBrain's callers: ``fit`` keeps the place in its data, whoever has made the loader.
            loader_kwargs: keyword arguments of torch's DataLoader.
        """
        if DYNAMIC in (f"{base.__module__}:{base.__qualname__}" for base in type(dataset).__mro__):
            loader_kwargs.setdefault("collate_fn", class_path.load(class_path.parse(PADDED)))
        seed = loader_kwargs.pop("seed", getattr(self.hparams, "seed", 0))
        return make_loader(dataset, seed=seed, where="Brain.make_dataloader", **loader_kwargs)

    def init_optimizers(self) -> None:
        """Make the optimizer with ``opt_class``; a subclass with several puts them into ``optimizers_dict``, by name.

        All of these descend the loss named ``loss``; for others, bind OptimSchedulers that say so. A subclass whose own
        ``fit_batch`` steps its optimizers may keep them where it likes. In a config, one of a subclass is called where the
        config names no optimizer.
        """
        if self.opt_class is None:
            return
        parameters = list(trainable_parameters(self.modules, None).values())
        groups = without_decay(parameters) if self._run_options.remove_vector_weight_decay else parameters
        self.optimizer = self.opt_class(groups)
        self.optimizers_dict = {"opt_class": self.optimizer}

    def on_fit_start(self) -> None:
        """Prepare the modules, and make the optimizers; then ``fit`` restores the checkpoint.

        In a config the optimizers are those of the phase, and the startup stage has loaded the weights. A run that is
        resumed takes everything back after it, whichever runner stage comes.
        """
        self._place_modules()
        if self._trainable.in_run:
            return
        type(self).bind(self, "", self._make_optimizers(), patience=self._run_options.nonfinite_patience)

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
        recovered = self.checkpointer.recover_if_possible(max_key=max_key, min_key=min_key)
        # A number that no call has told is one that fit reports.
        if metric and not recovered and (path := self.checkpointer.best(metric, "max" if max_key else "min")):
            self.checkpointer.load_checkpoint(Checkpoint.read(path))

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """A pass begins; ``epoch`` is None in a test."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """A pass is over; ``stage_loss`` is its mean loss over samples, nan where none was computed."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """A training batch is about to be used; ``should_step``: it closes an accumulation window."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Tensor, should_step: bool) -> None:
        """A training batch has been used; ``loss`` is detached, and on its device."""

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The predictions for a batch."""
        raise NotImplementedError(f"{type(self).__name__} does not define compute_forward(batch, stage)")

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Tensor | Losses | None:
        """The loss, a scalar tensor that is a mean over samples; or several losses by name.

        Outside of TRAIN it may be None: then the metrics and what is logged are reported alone.
        """
        kind = type(self).__name__
        raise NotImplementedError(f"{kind} does not define compute_objectives(predictions, batch, stage)")

    def fit_batch(self, batch: Any) -> Tensor:
        """One training step.

        Returns:
            The loss, detached, on its device; not finite where the step was discarded. For a batch
            without samples it is 0; nothing is computed then, and no hook of the Brain is called.
        """
        return self._trainable.fit_batch(batch)

    def evaluate_batch(self, batch: Any, stage: Stage) -> Tensor:
        """The loss of one batch, without training."""
        return self._trainable.evaluate_batch(batch, stage)

    def count_samples(self, batch: Any) -> int:
        """Return how many samples a batch holds, by which its loss counts in each mean.

        It is what ``count_samples`` of the phase returns. Without that it is the length of the
        first tensor in the batch, or of an object with ``to``; for a plain module, that of the
        target. A subclass may return whatever its loss is a mean over, such as tokens. A batch of 0
        contributes nothing: its loss is not used.
        """
        return self._trainable.default_count(batch)

    def target(self, batch: Any) -> Any:
        """What the metrics compare the predictions with."""
        return split(batch)[1]

    def readable(self, predictions: Any, batch: Any) -> Any:
        """What metrics get of the predictions, and what is written of them: the predictions themselves."""
        return predictions

    def log(self, name: str, value: Tensor | float, batch_size: int | None = None) -> None:
        """Report a number; it is averaged over the samples of the pass, and stays on its device until it is read.

        Args:
            name: how it is reported; in a validation pass with ``valid_`` before it. That of a metric, and ``loss``, are
                taken, but by an updater that returns no loss.
            value: a scalar that is a mean over the samples.
            batch_size: how many these are; None: those of the batch.
        """
        self._trainable.numbers.logged.log(name, value, batch_size)

    def bind(
        self,
        phase: str,
        optim_schedulers: Mapping[str, OptimScheduler],
        context: Context | None = None,
        patience: int | None = 3,
    ) -> None:
        """Prepare this Brain for a phase and its optimizers; the default network and runner stages and ``fit`` call it.

        Args:
            phase: its name, for messages.
            optim_schedulers: name -> scheduler that one of its losses drives.
            context: the run's, for its hooks; None: there are none.
            patience: how many non-finite batches a pass may have before training ends; None does not check.
        """
        self._trainable.bind(
            phase,
            list(optim_schedulers.values()),
            counters=None if context is None else context["train_state"],
            patience=patience,
            sync_batchnorm=context is not None and getattr(context.peek("runner"), "sync_batchnorm", False),
            keeps_outputs=context is not None and hook_or_none(context["hooks"], "after_batch") is not None,
        )
        self._watch_first_loss()
        if context is not None:
            self._hold(optim_schedulers)
