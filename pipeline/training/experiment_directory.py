"""The folder of an experiment that a script runs by itself. Names are SpeechBrain's; a config's run has a run directory."""

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

from pipeline import log
from pipeline.checkpoint import files
from pipeline.config import yaml_text
from pipeline.distributed import launch
from pipeline.errors import ConfigError, StorageError
from pipeline.training.option_rules import NOT_TAKEN

_MAPPING = "tag:yaml.org,2002:map"
_log = ExitStack()


def create_experiment_directory(
    experiment_directory: str | os.PathLike[str],
    hyperparams_to_save: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | str | None = None,
    log_config: None = None,
    save_env_desc: bool = True,
) -> None:
    """Make the folder of an experiment, or use the one that is there, and put into it what the experiment is made of.

    ``hyperparams.yaml`` has the hyperparameters with the overrides, the script that calls this is copied, ``env.log``
    names python and the packages, and ``log.txt`` gets every log line, until the next experiment directory or the end of
    the process. A file that is there with another content is kept as ``<name>.<UTC time>``. Unlike SpeechBrain's this
    leaves ``sys.excepthook`` alone.

    Args:
        experiment_directory: the folder.
        hyperparams_to_save: a YAML file. Nothing in it is built or resolved: tags such as ``!ref <seed>`` stay in it.
            Without overrides it is copied as it is; with them it loses its comments.
        overrides: what replaces values of it, as a mapping or as YAML text; a mapping in it goes into the one that is there.
        log_config: SpeechBrain's setting of standard logging, which is not taken.
        save_env_desc: whether to write ``env.log``.

    Raises:
        ConfigError: the hyperparameters or overrides are no YAML mapping, or a launcher has started several processes.
        StorageError: the storage refuses.
    """
    launch.refuse_several_processes()
    if log_config is not None:
        raise ConfigError(f"create_experiment_directory: log_config is {log_config!r}; {NOT_TAKEN['log_config']}")
    contents = {}
    if hyperparams_to_save is not None:
        contents["hyperparams.yaml"] = _resolved(Path(hyperparams_to_save), overrides).encode()
    elif overrides:
        raise ConfigError(
            "create_experiment_directory: overrides without hyperparams_to_save; name the file that they are for"
        )
    if save_env_desc:
        contents["env.log"] = _environment().encode()
    folder = Path(experiment_directory)
    script = sys._getframe(1).f_globals.get("__file__")
    try:
        if script and Path(script).is_file():
            contents[Path(script).name] = Path(script).read_bytes()
        files.make_folder(folder)
        for name, content in contents.items():
            _put(folder / name, content)
        end_log()
        _log.enter_context(log.to_file(folder / "log.txt", rank=0, otherwise="choose another folder"))
    except OSError as error:
        what = f"{error.filename or folder}: cannot be read or written: {error.strerror}"
        raise StorageError(f"{what}; free or repair the storage, or choose another folder") from error
    logger.info(f"experiment directory {folder}, made by {shlex.join(getattr(sys, 'argv', ()))}")


@atexit.register
def end_log() -> None:
    """Write no more log lines into the newest experiment directory."""
    # Whoever called logger.remove() has taken the place away already.
    with suppress(ValueError):
        _log.close()


def _put(path: Path, content: bytes) -> None:
    """Write a file; one of another content is kept under a name with the time."""
    if path.exists():
        if path.read_bytes() == content:
            return
        path.rename(_free(path.with_name(f"{path.name}.{datetime.now(UTC):%Y%m%d-%H%M%S}")))
    files.replace(path, content)


def _free(path: Path) -> Path:
    """This path, or one like it that is not there."""
    count = 1
    free = path
    while free.exists():
        count += 1
        free = path.with_name(f"{path.name}-{count}")
    return free


def _environment() -> str:
    """Python, the system, the hardware, and every installed package."""
    facts = {"python": sys.version, "platform": platform.platform(), **launch.hardware()}
    packages = sorted({f"{each.name}=={each.version}" for each in distributions()}, key=str.lower)
    return "".join(f"{line}\n" for line in [*(f"{name}: {value}" for name, value in facts.items()), "", *packages])


def _resolved(path: Path, overrides: Mapping[str, Any] | str | None) -> str:
    """The text of a YAML file with some values replaced."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else error.reason
        raise ConfigError(f"{path}: cannot be read: {what}; name a YAML file") from error
    there, over = _mapping(text, str(path)), _mapping(_text(overrides), "overrides")
    if not over.value:
        return text
    resolved: str = yaml.serialize(_merged(there, over), Dumper=yaml.SafeDumper, allow_unicode=True)
    return resolved


def _text(overrides: Mapping[str, Any] | str | None) -> str:
    if overrides is None or isinstance(overrides, str):
        return overrides or ""
    try:
        return yaml_text.dump(dict(overrides))
    except yaml.YAMLError as error:
        raise ConfigError(f"overrides: hold what YAML cannot: {error}; keep them plain") from error


def _mapping(text: str, where: str) -> yaml.MappingNode:
    """YAML text as nodes, of which nothing is built; no text is no mapping's worth."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: is no YAML: {str(error).splitlines()[0]}; mend it") from error
    if node is None:
        return yaml.MappingNode(_MAPPING, [])
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: is no mapping; write `key: value` lines")
    return node


def _merged(there: yaml.Node | None, over: yaml.Node) -> yaml.Node:
    """``over``; but one mapping goes into a copy of another, with its tag: an alias elsewhere means what it meant."""
    if not isinstance(there, yaml.MappingNode) or not isinstance(over, yaml.MappingNode) or over.tag != _MAPPING:
        return over
    there, new = deepcopy(there), {key.value: (key, value) for key, value in over.value}
    pairs = [
        (key, _merged(value, new.pop(key.value)[1]))
        if isinstance(key, yaml.ScalarNode) and key.value in new
        else (key, value)
        for key, value in there.value
    ]
    return yaml.MappingNode(there.tag, [*pairs, *new.values()], flow_style=there.flow_style)
