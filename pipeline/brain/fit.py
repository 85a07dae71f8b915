"""What ``Brain.fit`` and ``Brain.evaluate`` do: train and test a Brain without a config."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from loguru import logger
from rich.progress import MofNCompleteColumn, Progress
from torch.utils.data import Dataset

from pipeline.brain.checkpointer import Checkpointer
from pipeline.brain.run_options import HasRunOptions, RunOptions, options_of
from pipeline.checkpoint import storage
from pipeline.checkpoint.checkpoint_store import CheckpointStore
from pipeline.checkpoint.reader import LoadedCheckpoint
from pipeline.checkpoint.run_checkpointer import RunCheckpointer
from pipeline.compute.evaluation import evaluate
from pipeline.compute.stage import Stage
from pipeline.compute.trainable import Computation, trainable_of
from pipeline.compute.unregistered import require_registered
from pipeline.config.load import Config, ConfigBuilder
from pipeline.context import CHECKPOINT, Context, Phase
from pipeline.data.batch import on_device
from pipeline.data.loader import LimitedLoader, end_workers, length, refuse_unshared, without_state
from pipeline.distributed.world import current_world
from pipeline.engine.client import Client
from pipeline.engine.pass_engine import PassEngine
from pipeline.engine.phase import begin_on_ranks
from pipeline.engine.train_pass import TrainPass
from pipeline.errors import CheckpointError, ConfigError, PluginError
from pipeline.run.bar_console import BarConsole
from pipeline.run.failures import best_effort
from pipeline.run.hook_gradients import set_aside_in_hooks
from pipeline.run.log import on_terminal
from pipeline.run.run_context import listen, new_context
from pipeline.updater.updater import Updater
from pipeline.user_code.plugin_calls import register_plugins
from pipeline.user_code.plugins import Plugin, built_plugin, load_plugins, plugin_manager
from pipeline.user_code.uncalled import BRAIN_REMEDIES, uncalled_faults_of_class

# The name of the phase under which a Brain that trains without a config saves and reports.
NAME = "brain"

# The names of its datasets: the arguments of ``fit``.
TRAIN = "train_set"
VALID = "valid_set"

# The plugins that it has by default. Checkpoints do not keep their state.
DEFAULTS = ("progress_bar", "profiler")

# The number of iterations between two reports to the plugins.
EVERY = 50


class LoneBrain(Computation, HasRunOptions, Protocol):
    """A Brain that trains without a config."""

    checkpointer: Checkpointer | None
    hparams: Any

    def make_dataloader(
        self, dataset: Any, stage: Stage, ckpt_prefix: str | None = "dataloader-", **loader_kwargs: Any
    ) -> Iterable[Any]:
        """Return a loader of a dataset."""


def fit(
    brain: LoneBrain,
    numbers: Iterable[int],
    train: Any,
    valid: Any = None,
    *,
    show: bool | None = None,
    plugins: Iterable[Any] = (),
) -> None:
    """Train a Brain. With a checkpointer, continue from the newest checkpoint.

    Args:
        brain: the Brain. Its ``on_fit_start`` was called.
        numbers: the number of each epoch.
        train: the training batches.
        valid: the batches for the validation after each epoch. None: there is no validation.
        show: whether to show a progress bar. None shows one if stderr is a terminal, unless
            ``noprogressbar`` is set.
        plugins: as in ``Brain.fit``.

    Raises:
        CheckpointError: the checkpoints are of something else.
    """
    options = options_of(brain)
    wants_bar = on_terminal() and not options.noprogressbar if show is None else show
    # Rank 0 decides, because all ranks have the same config.
    is_shown = bool(current_world().broadcast(wants_bar))
    plugins = _listed(plugins or ())
    with ExitStack() as ending, ExitStack() as resources:
        loaders = {TRAIN: train, VALID: valid} if valid is not None else {TRAIN: train}
        config = _config(options, is_shown=is_shown, is_validated=valid is not None, plugins=plugins)
        context = _new_context(brain, config, loaders, plugins, resources)
        hooks = context["hooks"]
        # Called after the resources are closed.
        ending.callback(hooks.after_run, context=context)
        try:
            hooks.before_pipeline(context=context)
            context.enter("runner")
            hooks.before_stage(name="runner", context=context)
            _train(brain, numbers, context)
            hooks.after_stage(name="runner", context=context)
        except BaseException as error:
            context["error"] = error
            best_effort("on_stage_error", partial(hooks.on_stage_error, name="runner", context=context, error=error))
            best_effort("after_pipeline", partial(hooks.after_pipeline, context=context))
            raise
        hooks.after_pipeline(context=context)


def test(brain: LoneBrain, loader: Any, show: bool | None) -> float:
    """Return the mean loss over the samples of a test set; nan if no loss is computed.

    Args:
        brain: what is evaluated.
        loader: the batches.
        show: as in ``pass_progress``.
    """
    with pass_progress(brain, "test", length(loader), show) as bar:
        batches: Iterable[Any] = on_device(without_state(loader), brain.device)
        if not bar.disable:
            batches = bar.track(batches, task_id=bar.task_ids[0])
        return evaluate(brain, batches, Stage.TEST, {}, data="the test set").get("loss", math.nan)


@contextmanager
def pass_progress(brain: LoneBrain, title: str, batches: int | None, show: bool | None) -> Iterator[Progress]:
    """Return a block in which stderr has a progress bar. Its ``disable`` is True if it is not shown.

    Args:
        brain: the Brain whose pass it is.
        title: the text before the bar.
        batches: the number of batches; None if it is not known.
        show: whether to show the bar. None shows it if stderr is a terminal, unless the Brain has
            ``noprogressbar``. Only rank 0 shows it.
    """
    wants_bar = on_terminal() and not options_of(brain).noprogressbar if show is None else show
    world = current_world()
    with Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        console=BarConsole(quiet=not world.is_main),
        transient=True,
        disable=not world.broadcast(wants_bar),
    ) as bar:
        bar.add_task(title, total=batches)
        yield bar


def refuse_faults(brain: LoneBrain, base: type) -> None:
    """Raise for layers that would not be trained, and for methods that would not be called.

    In a run of a config, ``check`` reports such methods.

    Args:
        brain: what is trained or evaluated.
        base: the class ``Brain``.

    Raises:
        ConfigError: there is such a layer or method.
    """
    require_registered(brain.modules.values(), owner=brain)
    if trainable_of(brain).in_run:
        return
    faults = uncalled_faults_of_class(type(brain), base, BRAIN_REMEDIES)
    if faults:
        raise ConfigError("\n".join(faults))


def loader_of(brain: LoneBrain, data: Any, stage: Stage, keywords: Mapping[str, Any] | None, workers: ExitStack) -> Any:
    """Return the batches of a dataset or a loader. In a debug run, return only the first ones.

    Args:
        brain: what is trained or evaluated.
        data: a dataset, from which ``make_dataloader`` makes a loader, or a loader.
        stage: the pass that uses the batches.
        keywords: keyword arguments of the DataLoader.
        workers: ends the worker processes of a loader that is made here.

    Raises:
        ConfigError: keywords are given for a loader that is already made.
    """
    loader = data
    if hasattr(data, "__getitem__") or isinstance(data, Dataset):
        loader = brain.make_dataloader(data, stage, **(keywords or {}))
        workers.callback(end_workers, loader)
    elif keywords:
        what = f"{stage.name.lower()}_loader_kwargs would be ignored: {type(data).__name__} is a loader already"
        raise ConfigError(f"{what}; give fit the dataset, or leave it out")
    refuse_unshared(loader, f"{stage.name.lower()}_set")
    options = options_of(brain)
    return LimitedLoader(loader, options.debug_batches) if options.debug else loader


class FitContext(Context):
    """The context of a Brain that trains without a config."""

    def explain_missing(self, key: str, where: str) -> str:
        """Return why a key is missing."""
        if key != "run_dir":
            return super().explain_missing(key, where)
        what = f"context['run_dir'] was read ({where}), where plugins write"
        return f"{what}, and the Brain has no hyperparameter output_folder; add it to its hparams"


class FitClient(Client):
    """What an engine trains in ``Brain.fit``. Messages do not name the phase, which a user does not know.

    Args:
        context: the context of the training.
        saver: the Checkpointer of the Brain; None if it has none.
    """

    # As in SpeechBrain.
    restores_generators = False
    validates_in_order = False
    ends_saved = True

    def __init__(self, context: Context, saver: Checkpointer | None) -> None:
        super().__init__(context)
        self.saves = saver is not None
        self._has_warned = False
        self.session = saver.session if saver else None

    def address(self, phase: str) -> str:
        """Return the name of the training for messages."""
        return "fit"

    def errors(self, phase: str) -> AbstractContextManager[None]:
        """Return a block that does not change its errors."""
        return nullcontext()

    def save(self, save_checkpoint: Callable[[], None]) -> None:
        """Save a checkpoint if the Brain has a checkpointer. Otherwise warn once if one was requested."""
        if self.saves:
            save_checkpoint()
            return
        if CHECKPOINT in self.context.requests and not self._has_warned:
            self._has_warned = True
            logger.warning("fit: a checkpoint was requested, and the Brain has no checkpointer; give it one")
        self.context.clear_requests(CHECKPOINT)

    def bind(self, training: TrainPass, phase: Phase) -> None:
        """Do nothing: ``on_fit_start`` has prepared the Brain."""

    def order_of_pass(self, rounds: int, epoch: int) -> int:
        """Return the number of the epoch, as it was given."""
        return epoch


def _listed(plugins: Iterable[Any]) -> list[Any]:
    """Return the plugins as a list.

    Raises:
        PluginError: ``plugins`` is a single plugin.
    """
    if isinstance(plugins, str | Mapping) or not isinstance(plugins, Iterable):
        raise PluginError(f"fit: plugins is {plugins!r:.80}; write a list of plugins")
    return list(plugins)


def _config(options: RunOptions, *, is_shown: bool, is_validated: bool, plugins: Sequence[Any]) -> Config:
    """Return the config of a run that trains as the options of a Brain say.

    Args:
        options: the run options of the Brain.
        is_shown: whether there is a progress bar.
        is_validated: whether there is a validation after each epoch.
        plugins: as in ``Brain.fit``.

    Raises:
        ConfigError: a plugin is named wrongly.
    """
    saving = ["1 epoch"]
    if options.ckpt_interval_steps > 0:
        saving.append(f"{options.ckpt_interval_steps} iteration")
    if options.ckpt_interval_minutes > 0:
        saving.append(f"{round(options.ckpt_interval_minutes * 60)} second")
    runner = {
        "name": "fit",
        "class": "train",
        "seed": None,
        "optimizer_step_limit": options.optimizer_step_limit,
        "print_interval": EVERY if is_shown or plugins else None,
        "valid_interval": "1 epoch" if is_validated else None,
        "save_interval": saving,
        "nonfinite_patience": options.nonfinite_patience,
        "noprogressbar": not is_shown,
        "profile_training": options.profile_training,
        "profile_warmup": options.profile_warmup,
        "profile_steps": options.profile_steps,
    }
    phase = {"name": NAME, "dataset_name": TRAIN, "valid_dataset_name": VALID if is_validated else None}
    # Plugins that are objects do not go through the config.
    named = [plugin for plugin in plugins if isinstance(plugin, str | Mapping | type)]
    names = {name for plugin in named for name in (plugin if isinstance(plugin, Mapping) else [plugin])}
    added: list[dict[str, Any]] = []
    if is_shown and "progress_bar" not in names:
        added.append({"progress_bar": {"live": True}})
    if "metric_log" not in names:
        # It needs a run directory.
        added.append({"metric_log": False})
    tree = {"workspace": str(Path.cwd()), "runner": [runner], "phase": [phase], "plugins": [*added, *named]}
    builder = ConfigBuilder(tree, name="fit")
    if builder.config is None:
        raise ConfigError(builder.faults)
    return builder.config


def _new_context(
    brain: LoneBrain, config: Config, loaders: Mapping[str, Any], plugins: Sequence[Any], resources: ExitStack
) -> Context:
    """Return the context of the training, with registered plugins.

    Raises:
        ConfigError: ``profile_training`` is set, and there is no ``output_folder``.
        PluginError: a plugin does not take its arguments, one of its hooks does not exist, or it wraps the model.
    """
    world = current_world()
    [runner] = config.runners
    saver = brain.checkpointer
    trainable = trainable_of(brain)
    manager = plugin_manager()
    folder = getattr(brain.hparams, "output_folder", None)
    if folder is None and runner.profile_training:
        raise ConfigError("fit: profile_training writes into the hyperparameter output_folder; there is none, add it")
    chosen = _chosen_plugins(config, plugins)
    context = new_context(config, runner, world, FitContext)
    schedulers = {str(number): scheduler for number, scheduler in enumerate(trainable.schedulers)}
    entry = {"model": brain, "brain": brain, "optim_schedulers": schedulers, "updater": Updater(brain)}
    context |= {
        "hooks": manager.hook,
        "resources": resources,
        "device": brain.device,
        "train_state": trainable.counters,
        "checkpointer": saver or _no_checkpoints(resources),
        "hyper_parameters": vars(brain.hparams),
        "runner_name": "",
        "model": {NAME: Phase(NAME, entry)},
        "dataset": dict(loaders),
    }
    if folder is not None:
        run_dir = Path(folder).absolute()
        context["run_dir"] = run_dir
        if plugins or runner.profile_training:
            with storage.storing(run_dir, "set the hyperparameter output_folder"):
                storage.make_folder(run_dir)
    register_plugins(chosen, manager)
    resources.callback(set_aside_in_hooks(manager, context))
    listen(context, resources)
    if saver:
        for name, plugin in manager.list_name_plugin():
            if name not in DEFAULTS and hasattr(plugin, "state_dict") and hasattr(plugin, "load_state_dict"):
                saver.add_recoverable(f"plugin:{name}", plugin, optional_load=True)
                resources.callback(saver.recoverables.pop, f"plugin:{name}", None)
    return context


def _chosen_plugins(config: Config, plugins: Sequence[Any]) -> list[Plugin]:
    """Return the plugins of the config and those that are objects, as far as this rank has them.

    Raises:
        PluginError: a plugin does not take its arguments, two have the same name, or one wraps the model.
    """
    world = current_world()
    several = world.size > 1
    chosen = load_plugins(config.tree, config.workspace, several=several)
    for plugin in plugins:
        if not isinstance(plugin, str | Mapping | type):
            chosen.append(built_plugin(plugin, several=several))
    names = Counter(plugin.name for plugin in chosen)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        what = f"fit: two plugins have the name '{twice[0]}'"
        raise PluginError(f"{what}; give one of the objects another name in its attribute plugin_name")
    wrapping = [plugin.name for plugin in chosen if hasattr(plugin.target, "wrap_model")]
    if wrapping:
        what = f"fit: plugin '{wrapping[0]}' has the hook wrap_model, which comes before the optimizers are made"
        raise PluginError(f"{what}; wrap the module before the Brain gets it")
    if world.is_main:
        return chosen
    return [plugin for plugin in chosen if getattr(plugin.target, "every_rank", False) is True]


def _no_checkpoints(resources: ExitStack) -> RunCheckpointer:
    """Return a checkpointer without checkpoints, for plugins that look for some."""
    folder = resources.enter_context(TemporaryDirectory(prefix="fit-"))
    return RunCheckpointer(CheckpointStore(folder))


def _train(brain: LoneBrain, numbers: Iterable[int], context: Context) -> None:
    """Train the epochs that are left."""
    trainable = trainable_of(brain)
    saver = brain.checkpointer
    options = options_of(brain)
    # An earlier fit may have been interrupted in the middle of a window.
    brain.modules.zero_grad()
    begin_on_ranks([brain.modules], None)
    if saver:
        _restore(saver, context)
    updater: Updater = context["model"][NAME]["updater"]
    updater.set_state_dict({"iteration": context["train_state"]["iteration"], "epoch": updater.state.epoch})
    engine = PassEngine(context, FitClient(context, saver))
    if saver:
        # With multiple ranks nothing is woken: all of them look for requests together when it is time.
        saver.session.begin_fit(object if engine.agreement else engine.wake)
    is_overridden = not updater.is_plain(brain)
    most = options.debug_epochs if options.debug and options.debug_epochs > 0 else None
    count = 0
    with context.running_loop(engine), engine.running():
        for _ in engine.epochs(most, numbers):
            count += 1
            training = engine.train_pass(NAME)
            step = training.custom(brain.fit_batch, "fit_batch") if is_overridden else trainable.fit_batch
            training.run(step)
    if context.peek("is_exit"):
        iteration = context["train_state"]["iteration"]
        logger.info(f"fit: context['is_exit'] has ended the training after iteration {iteration}")
    elif not count:
        done = context["train_state"]["epoch"]
        updates = context["train_state"]["update"]
        why = context.stop_reason
        stopped = f", and it was stopped: {why}" if why else ""
        logger.info(f"fit: nothing is left to train; {done} epochs and {updates} updates are done{stopped}")


def _restore(saver: Checkpointer, context: Context) -> None:
    """Restore the newest checkpoint of an earlier fit.

    Raises:
        CheckpointError: it is of something else.
    """

    def check(checkpoint: LoadedCheckpoint) -> None:
        engine = checkpoint.state.engine if checkpoint.state else None
        # A run of a config may have a phase of this name, but it does not number its epochs.
        is_of_fit = engine and any(entry.epochs is not None for entry in engine.outer)
        if checkpoint.weights.keys() != {NAME} or not is_of_fit:
            what = f"{checkpoint.path}: was not saved by a fit of a Brain"
            raise CheckpointError(f"{what}; give the Brain a Checkpointer with another folder")
        saver.session.refuse_lacking(checkpoint)

    context["resources"].callback(saver.store.end_resume)
    saver.store.begin(context["model"])
    saver.store.restore(context, check)
    resumed = saver.store.resumed
    if resumed:
        context["hooks"].after_checkpoint_loaded(context=context, path=resumed.path)
