"""``create_experiment_directory``: the folder of an experiment that is a script."""

from __future__ import annotations

import atexit
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from copy import deepcopy
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml
from loguru import logger

from pipeline.brain.main_process import main_process_only
from pipeline.brain.option_values import NOT_TAKEN
from pipeline.checkpoint import storage
from pipeline.config import yaml_tree
from pipeline.distributed import device
from pipeline.errors import ConfigError
from pipeline.run import log
from pipeline.user_code.tracebacks import with_traceback

_MAPPING = "tag:yaml.org,2002:map"

# Writes log lines into the newest experiment directory.
_log = ExitStack()


def create_experiment_directory(
    experiment_directory: str | os.PathLike[str],
    hyperparams_to_save: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | str | None = None,
    log_config: None = None,
    save_env_desc: bool = True,
) -> None:
    """Make the folder of an experiment, or use an existing one, and copy into it what the experiment is made of.

    The folder then has these files:

    - ``hyperparams.yaml``: the hyperparameters with the overrides.
    - a copy of the script that calls this function.
    - ``env.log``: the versions of Python and of the packages.
    - ``log.txt``: every log line, until the next experiment directory or the end of the process. If an
      error ends the process, its traceback is there too.

    An existing file with other content is renamed to ``<name>.<UTC time>``. Unlike in SpeechBrain,
    ``sys.excepthook`` does not change. With multiple ranks, rank 0 writes the files, and the other ranks wait.

    Args:
        experiment_directory: the folder.
        hyperparams_to_save: a YAML file. Nothing in it is built or resolved: tags such as ``!ref <seed>``
            stay. Without overrides, it is copied unchanged. With overrides, it loses its comments.
        overrides: values that replace values of the file, as a mapping or as YAML text. A mapping is merged
            into the mapping in the file.
        log_config: SpeechBrain's setting of standard logging. It must be None.
        save_env_desc: whether to write ``env.log``.

    Raises:
        ConfigError: the hyperparameters or overrides are not a YAML mapping.
        StorageError: a file cannot be written.

    Example::

        Path("train.yaml").write_text("{seed: 1, lr: 0.1}")
        create_experiment_directory("results/first", "train.yaml", {"seed": 10})
        assert "seed: 10" in Path("results/first/hyperparams.yaml").read_text()
    """
    if log_config is not None:
        raise ConfigError(f"create_experiment_directory: log_config is {log_config!r}; {NOT_TAKEN['log_config']}")
    script = sys._getframe(1).f_globals.get("__file__")
    _fill(Path(experiment_directory), script, hyperparams_to_save, overrides, save_env_desc)


@main_process_only
def _fill(folder: Path, script: Any, hyperparams_to_save: Any, overrides: Any, save_env_desc: bool) -> None:
    """Write everything into the folder of an experiment."""
    contents = {}
    if hyperparams_to_save is not None:
        contents["hyperparams.yaml"] = _resolved(Path(hyperparams_to_save), overrides).encode()
    elif overrides:
        raise ConfigError("create_experiment_directory: overrides without hyperparams_to_save; name their file")
    if save_env_desc:
        contents["env.log"] = _environment().encode()
    with storage.storing(folder, "choose another folder"):
        if script and Path(script).is_file():
            contents[Path(script).name] = Path(script).read_bytes()
        storage.make_folder(folder)
        for name, content in contents.items():
            with storage.storing(folder / name, "choose another folder"):
                _put(folder / name, content)
        end_log()
        _log.callback(_keep_traceback, folder / "log.txt", getattr(sys, "last_value", None))
        _log.enter_context(log.to_file(folder / "log.txt", rank=0, otherwise="choose another folder"))
    logger.info(f"experiment directory {folder}, made by {shlex.join(getattr(sys, 'argv', ()))}")


def _keep_traceback(path: Path, before: BaseException | None) -> None:
    """Add the traceback of the error that has ended the process to a log.

    Args:
        path: the log.
        before: the error that Python kept before the log was opened. It is not added.
    """
    error = getattr(sys, "last_value", None)
    if error is not None and error is not before:
        with suppress(OSError), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(with_traceback("the process was ended by this error:", error) + "\n")


@atexit.register
def end_log() -> None:
    """Stop writing log lines into the newest experiment directory."""
    # If the script has called logger.remove(), the log is already closed.
    with suppress(ValueError):
        _log.close()


def _put(path: Path, content: bytes) -> None:
    """Write a file. Rename an existing file with other content, so that its name has the time."""
    if path.exists():
        if path.read_bytes() == content:
            return
        path.rename(path.with_name(f"{path.name}.{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"))
    storage.replace_durably(path, content, "choose another folder")


def _environment() -> str:
    """Return a text with the versions of Python and the system, the hardware, and every installed package."""
    facts = {"python": sys.version, "platform": platform.platform(), **device.describe_hardware()}
    lines = [f"{name}: {value}" for name, value in facts.items()]
    packages = sorted({f"{package.name}=={package.version}" for package in distributions()}, key=str.lower)
    return "".join(f"{line}\n" for line in [*lines, "", *packages])


def _resolved(path: Path, overrides: Mapping[str, Any] | str | None) -> str:
    """Return the text of a YAML file with some values replaced.

    Raises:
        ConfigError: the file cannot be read, or the file or the overrides are not a YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else error.reason
        raise ConfigError(f"{path}: cannot be read: {what}; name a YAML file") from error
    try:
        replaced = overrides if isinstance(overrides, str) else yaml_tree.dump(dict(overrides or {}))
    except yaml.YAMLError as error:
        raise ConfigError(f"overrides: hold what YAML cannot: {error}; keep them plain") from error
    base = _mapping(text, str(path))
    over = _mapping(replaced, "overrides")
    if not over.value:
        return text
    return yaml.serialize(_merged(base, over), Dumper=yaml.SafeDumper, allow_unicode=True)


def _mapping(text: str, where: str) -> yaml.MappingNode:
    """Return YAML text as nodes. No objects are built.

    Raises:
        ConfigError: the text is not a YAML mapping. The message names ``where``.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: is no YAML: {str(error).splitlines()[0]}; mend it") from error
    if node is None:
        return yaml.MappingNode(_MAPPING, [])
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: is no mapping; write `key: value` lines")
    return node


def _merged(base: yaml.Node | None, over: yaml.Node) -> yaml.Node:
    """Return ``over``, or a copy of ``base`` with its items if both are mappings.

    Because ``base`` is copied, an alias of it elsewhere keeps its value.
    """
    if not isinstance(base, yaml.MappingNode) or not isinstance(over, yaml.MappingNode) or over.tag != _MAPPING:
        return over
    base = deepcopy(base)
    new = {key.value: (key, value) for key, value in over.value}
    for index, (key, value) in enumerate(base.value):
        if isinstance(key, yaml.ScalarNode) and key.value in new:
            base.value[index] = key, _merged(value, new.pop(key.value)[1])
    base.value += new.values()
    return base
