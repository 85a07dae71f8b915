"""Resuming a run: which one, from which checkpoint, and what has changed since."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger
from torch.distributed.distributed_c10d import Store

from pipeline.checkpoint import layout, reader, storage, store
from pipeline.checkpoint.storage import short, storing
from pipeline.config import yaml_tree
from pipeline.config.load import Config
from pipeline.config.schema import ABOUT, RunnerSchema, is_long_form, seconds_of, time_is_over
from pipeline.config.yaml_tree import MAX_BYTES, Origin, differences
from pipeline.distributed.world import World
from pipeline.errors import CheckpointError, ConfigError, ExitCode, PipelineError, StorageError, one_of, printable
from pipeline.run.directory import DONE, MADE_BY, RunDirectory, is_run_directory, new_folder, parse_command
from pipeline.run.provenance import ELSEWHERE, Provenance

NEVER, AUTO = "never", "auto"

# Key of the run directory in what the attempts of a run have in common.
RUN_DIR = "run_dir"

# Exit codes that an attempt leaves with again.
_LASTING = (ExitCode.USAGE, ExitCode.DIVERGED, ExitCode.BUG)


class LastAttemptError(PipelineError):
    """The attempt of torch's launcher before this one has failed, and this one would fail in the same way.

    Args:
        message: what has failed.
        code: what that attempt has left with.
    """

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = code


class PreviousRun(NamedTuple):
    """A run that is to be resumed.

    Attributes:
        directory: its directory.
        checkpoint: the one to resume from; None: the newest that is valid.
    """

    directory: RunDirectory
    checkpoint: Path | None = None


def find_previous(
    output_dir: Path, config: Config, resume: str | Path, attempts: Store | None = None
) -> PreviousRun | None:
    """The run that is to be resumed; None for a new one.

    Args:
        output_dir: where run directories are.
        config: what is to be run.
        resume: ``never``, ``auto``, the path of a run directory, of a checkpoint in one, or of an empty folder.
        attempts: where the attempt before has left its run directory, under ``RUN_DIR``.

    Raises:
        ConfigError: the path is that of neither.
        PipelineError: the attempt before has left with a code that another would leave with too.
    """
    resume = _after_attempt(attempts, resume)
    if resume == NEVER:
        return None
    if resume == AUTO:
        newest = RunDirectory.newest(output_dir, config.name, lambda run_dir: _is_run_of(config, run_dir))
        if newest is None:
            _log_why_new(output_dir, config)
        return PreviousRun(newest) if newest else None
    run_dir, checkpoint = split_path(Path(resume))
    directory = RunDirectory.at(run_dir)
    if checkpoint and not checkpoint.is_dir():
        names = ", ".join(path.name for path in layout.committed_checkpoints(checkpoint.parent)) or "none"
        raise ConfigError(f"{checkpoint}: there is no such checkpoint; there are: {names}")
    return PreviousRun(directory, checkpoint)


def _after_attempt(attempts: Store | None, resume: str | Path) -> str | Path:
    """What is to be resumed: after an attempt that torch's launcher has ended, its own run, whatever was asked."""
    run_dir = Path(attempts.get(RUN_DIR).decode() if attempts and attempts.check([RUN_DIR]) else "")
    if not is_run_directory(run_dir):
        return resume
    status = RunDirectory(run_dir).read_status()
    for code in (code for code in _LASTING if code == status.get("exit_code")):
        raise LastAttemptError(f"{run_dir}: the attempt before has left with {code}: {status['reason']}", code)
    logger.info("the launcher has started this run again, and it goes on")
    return run_dir


def train_on(previous: PreviousRun, config: Config) -> PreviousRun:
    """A run from the last checkpoint of the first runner that was done and is to train for longer now; else as it is."""
    directory = previous.directory
    with suppress(*_UNREADABLE):
        config_before, _ = _split_plugins(_read(directory.path / "config.yaml"))
        before = {runner["name"]: runner for runner in config_before["runner"]}
        for runner in config.runners if previous.checkpoint is None else ():
            checkpoints = layout.committed_checkpoints(directory.path / runner.name / "checkpoints")
            why = directory.stop_reasons([runner.name])
            is_done = bool(checkpoints) and directory.is_done(runner.name)
            if is_done and _is_longer(runner, before.get(runner.name, {}), why):
                logger.info(f"{runner.name} was finished, and is to train for longer now")
                return PreviousRun(directory, checkpoints[-1])
    return previous


def _is_longer(runner: RunnerSchema, before: dict[str, Any], why: str) -> bool:
    """Whether what has ended a runner lies further than it did: its ``max_time``, or one of the limits without a reason."""
    if why:
        now, timed = runner.max_time, before.get("max_time", "")
        return why == time_is_over(timed) and (now is None or seconds_of(now) > seconds_of(timed))
    limits = [(getattr(runner, key), before.get(key)) for key in ("epochs", "max_steps", "optimizer_step_limit")]
    return any(old is not None and (new is None or new > old) for new, old in limits)


def split_path(path: Path) -> tuple[Path, Path | None]:
    """What ``--resume`` names: (run directory, None), or the run directory of a checkpoint, and that checkpoint."""
    path = Path(os.path.abspath(path))
    if layout.step_of(path) is None or path.suffix == layout.NEW or path.parent.name != "checkpoints":
        return path, None
    # The path of the run directory may be a link; so may the folder of its checkpoints, but that leads out of it.
    run_dir = path.parents[2].resolve()
    return run_dir, run_dir.joinpath(*path.parts[-3:])


def read_command(run_dir: Path) -> dict[str, str]:
    """The content of a run directory's ``command.txt``; empty if it cannot be read."""
    return parse_command(_text(run_dir / "command.txt"))


def refuse_strangers(run_dir: Path) -> None:
    """Refuse a run directory that others may have written: it names code to run.

    Raises:
        ConfigError: it is one.
    """
    for path in (run_dir, run_dir / "command.txt", run_dir / "config.yaml"):
        try:
            about = path.stat(follow_symlinks=path == run_dir)
        except OSError:
            # What is not there is told of when it is read.
            continue
        if about.st_uid != os.getuid():
            raise ConfigError(f"{path}: belongs to user {about.st_uid}, and names code to run; run the config yourself")
        if about.st_mode & 0o022 and not stat.S_ISLNK(about.st_mode):
            raise ConfigError(f"{path}: others may write to it, and it names code to run; chmod go-w it if it is yours")


def resume_command(config: Config, run_dir: Path, world: World, resume: str | Path) -> str:
    """The command that goes on with a run, to be copied into a shell; for a config from Python, what is to be called there.

    Args:
        config: what is run.
        run_dir: its directory, whose files are written.
        world: the processes that it is shared out to.
        resume: what this run was to resume itself; ``auto``: it is begun again by the same command.
    """
    if config.path is None:
        return f"GeneralTrainer(config, resume={str(run_dir)!r}).run()"
    again = ["run", short(config.path.absolute()), *config.overrides, "--resume"]
    words = [*again, AUTO] if resume == AUTO else ["resume", short(run_dir)]
    try:
        refuse_strangers(run_dir)
    except ConfigError:
        words = [*again, AUTO if resume == AUTO else short(run_dir)]
    several = world.size > 1 and world.size == world.local_size
    command = shlex.join(["pipeline", *words, *(["--nproc", str(world.size)] if several else [])])
    return f"torchrun … -m {command}" if world.size > world.local_size else command


def changed_copies(directory: RunDirectory, workspace: Path | None) -> list[str]:
    """In what the user code of a run is not as it was, of several lines each; ``workspace``: where it is now."""
    changes = Changes()
    for name in sorted(_source_copies(directory)):
        elsewhere = name.parts[:2] == ELSEWHERE.parts
        file = Path("/", name.relative_to(ELSEWHERE)) if elsewhere else (workspace or Path()) / Path(*name.parts[1:])
        _compare_source(directory, name, file, changes)
    return changes.messages


def _is_run_of(config: Config, run_dir: Path) -> bool:
    """Whether a run was made with this config file, or with a config of the same ``name``, and not by ``resume-test``.

    One that was interrupted before it wrote its first file may be anybody's.
    """
    command, name = read_command(run_dir), config.settings.name
    if RunDirectory(run_dir).is_empty():
        return True
    same_file = config.path is not None and command.get("config") == str(config.path.resolve())
    same_name = name is not None and command.get("name") == name
    return (same_file or same_name) and not os.path.exists(run_dir / MADE_BY)


def _log_why_new(output_dir: Path, config: Config) -> None:
    """Log why a new run starts: this config has none, or its file was elsewhere."""
    if config.path is None and config.settings.name is None:
        logger.warning("a config from Python is known by its `name:` alone, and this one has none; beginning a new run")
        return
    other = RunDirectory.newest(output_dir, config.name, _has_lost_its_config)
    other = other or RunDirectory.newest(output_dir, config.name)
    if other is None:
        logger.info(f"{output_dir / config.name}: there is no run to go on with; beginning one")
        return
    remedy = f"to go on with it, name it in the place of {AUTO}: {other.path}"
    logger.warning(f"{other.path}: {_owner(other.path)}, so it is none of this config; beginning a new run; {remedy}")


def _has_lost_its_config(run_dir: Path) -> bool:
    """Whether the config file of a run is gone; its folder may have been moved."""
    path = read_command(run_dir).get("config", "None")
    return path != "None" and not os.path.exists(path)


def _owner(run_dir: Path) -> str:
    """Which config a run is of, or which command made it, in words."""
    if os.path.exists(run_dir / MADE_BY):
        return f"was made by {(run_dir / MADE_BY).read_text(encoding='utf-8').strip()}"
    path = read_command(run_dir).get("config", "a config that its command.txt does not name")
    lost = ", which is not there any more" if _has_lost_its_config(run_dir) else ""
    return f"is a run of {'a config from Python' if path == 'None' else path}{lost}"


def with_original_links(config: Config, previous: PreviousRun) -> Config:
    """The config with its links as they were when the run started; the log says which lead elsewhere now."""
    original = dict[str, str]()
    with suppress(*_UNREADABLE):
        links = json.loads(read_command(previous.directory.path).get("links", "{}"))
        original = {path: led for path, led in links.items() if isinstance(led, str)}
    for path, leads in config.link_targets().items():
        if leads != original.get(path, leads):
            logger.info(f"{path} leads to {leads} now; the run goes on with {original[path]}, to which it led")
    return config.leading(original)


def reconcile(previous: PreviousRun, provenance: Provenance, runners: Sequence[str]) -> None:
    """Go back to the checkpoint that was named; say what has changed, and keep a backup of what is replaced.

    Args:
        previous: the run, whose directory is locked.
        provenance: what the directory is to keep from now on.
        runners: those of the run, in order.

    Raises:
        ConfigError, NoCheckpointError: the run cannot be resumed from the checkpoint; nothing has changed.
        StorageError: the storage refuses, or the directory is a copy of the one whose checkpoints it would write among.
    """
    directory, checkpoint = previous
    original = Path(read_command(directory.path).get("run_dir", directory.path))
    for runner in runners:
        if checkpoint or not directory.is_done(runner):
            store.refuse_copy(directory.path, original, runner)
    logger.info(f"going on in {short(directory.path)}")
    backup = Backup(directory)
    if checkpoint:
        rewind(directory, checkpoint, runners, backup)
    changes = compare(directory, provenance)
    for message in changes.messages:
        logger.warning(message)
    if not changes.messages:
        logger.info("config, plugins, code and versions are as they were")
    if all(directory.is_done(runner) for runner in runners):
        # It stays as it was run.
        return
    for name in sorted(changes.files):
        # What is in the workspace are copies of sources.
        backup.move(name) if name.parts[0] == "workspace" else backup.copy(name)
    if (changes.messages or checkpoint) and backup.folder:
        logger.info(f"what is replaced is kept in {short(backup.folder)}")
    provenance.write(directory, changes.files)


class Backup:
    """The folder for what one resume replaces; it is made when the first file goes there.

    Args:
        directory: the run directory, which is locked.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.folder: Path | None = None

    def copy(self, name: Path) -> None:
        """Keep a copy of a file that is about to be replaced, if it exists.

        Raises:
            StorageError: the storage refuses.
        """
        source = self.directory.path / name
        if source.is_file() and not source.is_symlink():
            with storing(source):
                shutil.copyfile(source, self._target(name))

    def move(self, name: Path) -> None:
        """Move a file or folder, whatever it is, if it exists; the disk has it when this returns.

        Raises:
            StorageError: the storage refuses.
        """
        source = self.directory.path / name
        if not os.path.lexists(source):
            return
        with storing(source):
            # The disk has the new entry before the old one goes: it may be in both places, but never in none.
            storage.move_into_place(source, self._target(name))
            storage.DISK.fsync_folder(source.parent)

    def _target(self, name: Path) -> Path:
        if self.folder is None:
            self.folder = new_folder(self.directory.path, "before-")
        target = self.folder / name
        storage.make_folder(target.parent)
        return target


def rewind(directory: RunDirectory, checkpoint: Path, runners: Sequence[str], backup: Backup) -> None:
    """Make a checkpoint the newest of the run, as if the run had been interrupted there.

    The runners after that of the checkpoint begin again. If the process ends on the way, what is left is the run as it
    was interrupted at a later moment.

    Args:
        directory: the run directory, which is locked.
        checkpoint: ``<run directory>/<runner>/checkpoints/step-…``.
        runners: those of the run, in order.
        backup: takes what came after it, but for checkpoints, which may be on another disk.

    Raises:
        ConfigError: the run has no such runner.
        NoCheckpointError: the checkpoint is damaged; nothing has changed.
        CheckpointError: its training state cannot be read; nothing has changed.
        StorageError: the storage refuses.
    """
    runner = checkpoint.parent.parent.name
    if runner not in runners:
        raise ConfigError(f"{checkpoint}: the run has no runner '{runner}'{one_of(runner, runners)}")
    store.verify(checkpoint)
    # Reading the state raises if it has another format.
    _ = reader.read_checkpoint(checkpoint).state
    # From the end on: what is left at any moment goes together.
    for later in reversed(runners[runners.index(runner) + 1 :]):
        _reset_runner(directory, later, backup)
    newer = store.later_checkpoints(checkpoint)
    if newer or (directory.path / runner / DONE).exists():
        for name in ("metrics.jsonl", "timing.jsonl"):
            backup.copy(Path(runner, name))
    for name in (DONE, "results.json"):
        backup.move(Path(runner, name))
    _set_aside(newer)
    if backup.folder:
        logger.warning(f"going back to {short(checkpoint)}: numbers and results of what came after it are replaced")


def _reset_runner(directory: RunDirectory, runner: str, backup: Backup) -> None:
    """Take away all that a runner has made: first its done mark, so that it is never skipped without its results."""
    folder = directory.path / runner
    with storing(folder):
        paths = [path for path in folder.iterdir() if path.name != "checkpoints"] if folder.is_dir() else []
    for path in sorted(paths, key=lambda path: path.name != DONE):
        backup.move(path.relative_to(directory.path))
    _set_aside(layout.committed_checkpoints(folder / "checkpoints"))


def _set_aside(checkpoints: Sequence[Path]) -> None:
    """Set checkpoints aside, the newest first, so that the others have no gap."""
    for path in reversed(checkpoints):
        logger.warning(f"{path}: comes after what the run goes on from; it is now {store.quarantine(path).name}")


# So many lines are logged of a file, or of the config.
MAX_LINES = 20

_ENVIRONMENT = ("host", "platform", "python", "packages", "hardware", "git")

_UNREADABLE = (CheckpointError, StorageError, ConfigError, ValueError, RecursionError, AttributeError, TypeError)


@dataclass
class Changes:
    """What has changed since the run was made.

    Attributes:
        messages: of several lines each.
        files: those of the run directory that are not right any more, relative to it; some may not exist.
    """

    messages: list[str] = field(default_factory=list)
    files: set[Path] = field(default_factory=set)

    def add(self, file: Path, what: str, lines: list[str]) -> None:
        """Report lines that differ, if any do."""
        if lines:
            more = [f"… and {len(lines) - MAX_LINES} more lines"] if len(lines) > MAX_LINES else []
            self._report(file, "\n  ".join([what, *lines[:MAX_LINES], *more]))

    @contextmanager
    def comparing(self, file: Path) -> Iterator[None]:
        """Report that a file cannot be compared, where the block cannot read it."""
        try:
            yield
        except _UNREADABLE as error:
            self._report(file, f"{file} of the run directory cannot be compared: {error}")

    def _report(self, file: Path, message: str) -> None:
        self.messages.append(printable(message, keep="\t\n"))
        self.files.add(file)


def compare(directory: RunDirectory, now: Provenance) -> Changes:
    """Compare the files of a run directory with what they would contain now."""
    changes = Changes()
    _compare_config(directory, now, changes)
    _compare_environment(directory, now, changes)
    _compare_sources(directory, now, changes)
    # Reported already, or of no weight: the command line itself may be another each time.
    if {**read_command(directory.path), "command": ""} != {**now.command, "command": ""}:
        changes.files.add(Path("command.txt"))
    if _text(directory.path / "swaps.txt") != now.swaps:
        changes.files.add(Path("swaps.txt"))
    return changes


def _compare_config(directory: RunDirectory, now: Provenance, changes: Changes) -> None:
    file, (config, plugins) = Path("config.yaml"), _split_plugins(now.config)
    with changes.comparing(file):
        config_before, plugins_before = _split_plugins(_read(directory.path / file))
        lines = list(differences(config_before, config))
        # Which code runs comes first, so that it is never left out.
        lines.sort(key=lambda line: not re.match(r"runner\.[^.:]+\.\w+_class", line))
        changes.add(file, "the config is not as it was:", lines)
        lines = list(differences(plugins_before, plugins, "plugins"))
        changes.add(file, "the plugins are not as they were:", lines)


def _split_plugins(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config without its plugins and what is about the run, and these: class path -> arguments, or name -> the long form."""
    config = yaml_tree.parse(text, Origin("config.yaml", None)).plain(expanded=False)
    if not isinstance(config, dict):
        raise ConfigError("is no mapping")
    for name in ABOUT:
        config.pop(name, None)
    plugins: dict[str, Any] = {}
    for item in config.pop("plugins", None) or []:
        if is_long_form(item):
            plugins[str(item.get("name", item.get("class_path")))] = item
        else:
            plugins |= item if isinstance(item, dict) else {str(item): {}}
    return config, plugins


def _compare_environment(directory: RunDirectory, now: Provenance, changes: Changes) -> None:
    file = Path("environment.json")
    # As it comes back from JSON.
    present = json.loads(json.dumps(now.environment, default=str))
    with changes.comparing(file):
        written = json.loads(_read(directory.path / file))
        old, new = ({name: values.get(name) for name in _ENVIRONMENT} for values in (written, present))
        # What is imported on the way is in one of them only.
        both = old["packages"].keys() & new["packages"].keys()
        for values in (old, new):
            values["packages"] = {name: values["packages"][name] for name in both}
        changes.add(file, "the environment is not as it was:", list(differences(old, new)))


def _compare_sources(directory: RunDirectory, now: Provenance, changes: Changes) -> None:
    copies = _source_copies(directory)
    for name in sorted(copies | now.sources.keys()):
        if name not in now.sources:
            changes.add(name, f"{name}: is no part of the run any more", [f"it was {directory.path / name}"])
        elif name not in copies:
            changes.add(name, f"{name}: is new", [f"it is {now.sources[name]}"])
        else:
            _compare_source(directory, name, now.sources[name], changes)


def _source_copies(directory: RunDirectory) -> set[Path]:
    paths = (directory.path / "workspace").rglob("*")
    # A copy that was being made when the process ended is none.
    copies = [path for path in paths if not (path.name.startswith(".") and path.name.endswith(".tmp"))]
    return {path.relative_to(directory.path) for path in copies if path.is_symlink() or not path.is_dir()}


def _compare_source(directory: RunDirectory, name: Path, file: Path, changes: Changes) -> None:
    with changes.comparing(name):
        before, now = (storage.read_small(path, MAX_BYTES) for path in (directory.path / name, file.resolve()))
        if before == now:
            return
        # Decoded only to be shown; bytes that are no text may show no difference.
        old, new = (content.decode("utf-8", "replace").splitlines() for content in (before, now))
        lines = list(difflib.unified_diff(old, new, "as it was", "as it is", lineterm="", n=1))
        changes.add(name, f"{name}: is not as it was:", lines or [f"{len(before)} bytes -> {len(now)} bytes"])


def _read(path: Path) -> str:
    """A small file of a run directory: no link is followed, and no pipe waited for."""
    return storage.read_small(path, MAX_BYTES).decode("utf-8", "surrogateescape")


def _text(path: Path) -> str:
    with suppress(*_UNREADABLE):
        return _read(path)
    return ""
