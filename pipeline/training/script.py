"""For experiments that are scripts: ``parse_arguments`` and ``create_experiment_directory``."""

from __future__ import annotations

import atexit
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from datetime import UTC, datetime
from importlib.metadata import distributions
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from loguru import logger

from pipeline.checkpoint import storage
from pipeline.config import yaml_tree
from pipeline.config.yaml_tree import Origin
from pipeline.distributed import device
from pipeline.distributed.main_process import main_process_only
from pipeline.errors import ConfigError
from pipeline.run import log
from pipeline.training.run_options import NAMES, NOT_TAKEN, RunOptions, kind_of, refuse_unknown, values_of
from pipeline.user_code.tracebacks import with_traceback

_MAPPING = "tag:yaml.org,2002:map"

_log = ExitStack()


def create_experiment_directory(
    experiment_directory: str | os.PathLike[str],
    hyperparams_to_save: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | str | None = None,
    log_config: None = None,
    save_env_desc: bool = True,
) -> None:
    """Make the folder of an experiment, or use an existing one, and copy into it what the experiment is made of.

    ``hyperparams.yaml`` has the hyperparameters with the overrides, the script that calls this is copied, ``env.log``
    names python and the packages, and ``log.txt`` gets every log line, until the next experiment directory or the end of
    the process, and the traceback of what ends that. A file that is there with another content is kept as
    ``<name>.<UTC time>``. Unlike SpeechBrain's this leaves ``sys.excepthook`` alone. Of several processes rank 0 does it,
    and the others wait.

    Args:
        experiment_directory: the folder.
        hyperparams_to_save: a YAML file. Nothing in it is built or resolved: tags such as ``!ref <seed>`` stay in it.
            Without overrides it is copied as it is; with them it loses its comments.
        overrides: what replaces values of it, as a mapping or as YAML text; a mapping in it goes into the one that is there.
        log_config: SpeechBrain's setting of standard logging, which is not taken.
        save_env_desc: whether to write ``env.log``.

    Raises:
        ConfigError: the hyperparameters or overrides are no YAML mapping.
        StorageError: the storage refuses.
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
    """Add to a log the traceback of the error that has ended the process, which python has kept; ``before``: another's."""
    error = getattr(sys, "last_value", None)
    if error is not None and error is not before:
        with suppress(OSError), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(with_traceback("the process was ended by this error:", error) + "\n")


@atexit.register
def end_log() -> None:
    """Stop writing log lines into the newest experiment directory."""
    # Whoever called logger.remove() has taken the place away already.
    with suppress(ValueError):
        _log.close()


def _put(path: Path, content: bytes) -> None:
    """Write a file; an existing one with other content is renamed with the time."""
    if path.exists():
        if path.read_bytes() == content:
            return
        path.rename(path.with_name(f"{path.name}.{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"))
    storage.replace_durably(path, content, "choose another folder")


def _environment() -> str:
    """Python, the system, the hardware, and every installed package."""
    facts = {"python": sys.version, "platform": platform.platform(), **device.describe_hardware()}
    packages = sorted({f"{package.name}=={package.version}" for package in distributions()}, key=str.lower)
    return "".join(f"{line}\n" for line in [*(f"{name}: {value}" for name, value in facts.items()), "", *packages])


def _resolved(path: Path, overrides: Mapping[str, Any] | str | None) -> str:
    """The text of a YAML file with some values replaced."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else error.reason
        raise ConfigError(f"{path}: cannot be read: {what}; name a YAML file") from error
    try:
        replaced = overrides if isinstance(overrides, str) else yaml_tree.dump(dict(overrides or {}))
    except yaml.YAMLError as error:
        raise ConfigError(f"overrides: hold what YAML cannot: {error}; keep them plain") from error
    base, over = _mapping(text, str(path)), _mapping(replaced, "overrides")
    if not over.value:
        return text
    return yaml.serialize(_merged(base, over), Dumper=yaml.SafeDumper, allow_unicode=True)


def _mapping(text: str, where: str) -> yaml.MappingNode:
    """YAML text as nodes; no objects are built."""
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
    """``over``, or two mappings merged into a copy, so that an alias elsewhere keeps its value."""
    if not isinstance(base, yaml.MappingNode) or not isinstance(over, yaml.MappingNode) or over.tag != _MAPPING:
        return over
    base, new = deepcopy(base), {key.value: (key, value) for key, value in over.value}
    for index, (key, value) in enumerate(base.value):
        if isinstance(key, yaml.ScalarNode) and key.value in new:
            base.value[index] = key, _merged(value, new.pop(key.value)[1])
    base.value += new.values()
    return base


_WHERE = "command line"

_USAGE = (
    "write PARAM_FILE [--NAME VALUE]…, and a truth value as --NAME or --NAME=false; "
    f"the run options are {', '.join(NAMES)}; any other name replaces a hyperparameter"
)


def parse_arguments(arg_list: Sequence[str] | None = None) -> tuple[str, RunOptions, str]:
    """Split a command line: ``hyperparams.yaml --device cuda:1 --seed 10``.

    A run option is written ``--name value`` or ``--name=value``; one that is true or false ``--debug``, ``--debug=true``
    or ``--debug=false``; a list of names ``--jit_module_keys encoder decoder``, up to the next option. Any other name
    needs a value, ``--name value`` or ``--name=value``; SpeechBrain makes null of one without.

    Args:
        arg_list: the words of the command line; None takes ``sys.argv[1:]``.

    Returns:
        The file of hyperparameters, as it was written; the run options, a mapping that knows which were given (these go
        over the hyperparameters), and whose ``device`` is the one to compute on; and the other names as lines of YAML,
        ``seed: 10``, in their order. Such a value is what YAML makes of a number, truth value, null, or a list or mapping
        in brackets; what has a tag or quotes stays as it is; everything else is a string, and quoted where YAML would
        take it for something else.

    Raises:
        ConfigError: there is no file, or two; a name comes twice, a value is missing, or is not what the option takes.
    """
    words = list(getattr(sys, "argv", ())[1:] if arg_list is None else arg_list)
    if "--help" in words or "-h" in words:
        raise ConfigError(f"{_WHERE}: asks for help; {_USAGE}")
    files: list[str] = []
    run_opts: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            files.append(word)
            continue
        name, value = _name_and_value(word, words)
        if name in run_opts or name in overrides:
            raise ConfigError(f"{_WHERE}: --{name} is given twice; keep one")
        if name in NAMES:
            run_opts |= values_of({name: value}, _WHERE)
        else:
            overrides[name] = _yaml_of(name, value)
    if len(files) != 1:
        what = f"names {len(files)} files ({', '.join(files)})" if files else "names no file of hyperparameters"
        raise ConfigError(f"{_WHERE}: {what}; {_USAGE}")
    options = RunOptions.from_dictionary(run_opts)
    return files[0], options, "\n".join(f"{yaml_tree.one_line(name)}: {value}" for name, value in overrides.items())


def _name_and_value(word: str, words: list[str]) -> tuple[str, Any]:
    """Name and value of an option; the value is taken from ``words`` if the word has none."""
    name, equals, text = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name:
        raise ConfigError(f"{_WHERE}: '{word}' is neither a file nor an option; write --NAME VALUE")
    if name in NOT_TAKEN or (name not in NAMES and name.replace("-", "_") in NAMES):
        refuse_unknown(name, _WHERE)
    kind = kind_of(name) if name in NAMES else None
    if not equals and kind is bool:
        return name, True
    if not equals and kind is list:
        values = list(takewhile(lambda word: not word.startswith("--"), words))
        del words[: len(values)]
        return name, values
    if not equals and (not words or words[0].startswith("--")):
        remedy = f"write --{name} VALUE" if kind else f"write --{name} VALUE, or --{name}=true for a truth value"
        raise ConfigError(f"{_WHERE}: --{name} has no value; {remedy}")
    text = text if equals else words.pop(0)
    value = _plain(text) if kind else text
    return name, [value] if kind is list and isinstance(value, str) else value


def _plain(text: str) -> Any:
    """The value of a text: a number, truth value, null, list, mapping or quoted string of YAML, else the text."""
    try:
        value = yaml_tree.parse(text, Origin(_WHERE)).plain()
    except ConfigError:
        if text.startswith(("[", "{")):
            raise
        return text
    is_yaml = text.startswith(("'", '"')) or not (isinstance(value, str) or "#" in text)
    if isinstance(value, list | dict):
        is_yaml = text.startswith(("[", "{"))
    return value if is_yaml else text


def _yaml_of(name: str, text: str) -> str:
    """A value for a hyperparameter as YAML on one line; tags are left to whoever loads the file."""
    if text.startswith(("!", "[", "{")):
        try:
            has_tag = any(getattr(event, "tag", None) for event in yaml.parse(text, Loader=yaml.SafeLoader))
        except yaml.YAMLError as error:
            what = f"--{name} is '{text}', which is no YAML: {str(error).splitlines()[0]}"
            raise ConfigError(f"{_WHERE}: {what}; mend or quote it") from error
        if has_tag and "\n" not in text:
            return text
    return yaml_tree.one_line(_plain(text))
