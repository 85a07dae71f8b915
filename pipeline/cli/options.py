"""What the commands have in common: the config, the overrides, the swaps, the log level."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeline.check.runner import runners_of_mode
from pipeline.config.load import ConfigBuilder
from pipeline.config.yaml_tree import DEFAULT, Node, one_line
from pipeline.context import STAGES

_F = TypeVar("_F", bound=Callable[..., Any])

# ``train_runner=./startup.py``.
_OF_ONE_RUNNER = re.compile(r"([\w-]+)=(.*)", re.DOTALL)


def config_and_overrides(function: Callable[..., None]) -> Callable[..., None]:
    """``[CONFIG] [KEY=VALUE]…`` and the like; the command is called with the config and the overrides."""

    @wraps(function)
    def command(config: str | None, words: Sequence[str], options: Sequence[str], **others: Any) -> None:
        swaps = {stage: others.pop(stage) for stage in STAGES}
        function(*split(config, words, options, swaps), **others)

    return config_options(command)


def config_options(function: _F, words: str = "[CONFIG] [KEY=VALUE]…") -> _F:
    """``[CONFIG] [KEY=VALUE]…``, also as ``-m CONFIG`` and ``-o KEY=VALUE``, and an option for each stage.

    The command calls :func:`split` with all of it; ``words`` is how the help shows the words.
    """
    example = "Set a value, e.g. runner.train_runner.epochs=3."
    same = "The config, or its folder; the same as naming it first. Without one: config.yaml."
    complete = click.Path().shell_complete
    for stage in reversed(STAGES):
        text = f"Swap the {stage} stage, e.g. ./{stage}.py."
        option = click.option(f"--{stage}", multiple=True, shell_complete=complete, metavar="[RUNNER=]CLASS", help=text)
        function = option(function)
    function = click.argument("words", nargs=-1, metavar=words, shell_complete=complete)(function)
    function = click.option("-o", "--override", "options", multiple=True, metavar="KEY=VALUE", help=example)(function)
    return click.option("-m", "--model", "config", metavar="CONFIG", help=same)(function)


def log_level(function: _F) -> _F:
    """``-q`` and ``-v``, which are the ``level`` from which up lines are logged; None without them."""
    function = click.option("-v", "--verbose", "level", flag_value="DEBUG", help="Log details too.")(function)
    return click.option("-q", "--quiet", "level", flag_value="WARNING", help="Log warnings and errors only.")(function)


def processes(function: _F) -> _F:
    """``--nproc``, a number, ``auto`` or None, and ``--max-restarts``."""
    again = "How often all processes are started again after one has failed, from the newest checkpoint."
    several = "Processes to start on this host; auto: one for each GPU. By default worker_num of the config, else none."
    function = click.option("--max-restarts", type=click.IntRange(min=0), default=0, metavar="K", help=again)(function)
    return click.option("--nproc", type=_processes, metavar="N|auto", help=several)(function)


def _processes(value: str) -> str:
    if value != "auto" and not re.fullmatch("[1-9][0-9]*", value):
        raise click.BadParameter(f"'{value}' is no number of processes; write 2, or auto")
    return value


def split(
    config: str | None, words: Sequence[str], options: Sequence[str], swaps: Mapping[str, Sequence[str]]
) -> tuple[str, list[str]]:
    """(config, overrides) of a command line; ``swaps``: stage -> what its options say.

    Raises:
        click.UsageError: there is no config, or two; or a class is set twice.
    """
    overrides = [*(word for word in words if "=" in word), *options]
    configs = [word for word in words if "=" not in word]
    if config:
        configs.insert(0, config)
    if len(configs) > 1:
        several = f"name one config, not {len(configs)}: {' '.join(configs)}"
        raise click.UsageError(f"{several}; an override has the form KEY=VALUE")
    path = _config_file(configs[0] if configs else os.curdir)
    return path, [*overrides, *_swap_overrides(path, overrides, swaps)]


def _config_file(path: str) -> str:
    """The file that a command line names: ``config.yaml`` in a folder."""
    # Of os.path, which says of a name too long that nothing is there.
    if not os.path.isdir(path):
        return path
    file = Path(path, "config.yaml")
    if all(file.with_name(name).is_file() for name in ("lock", "command.txt")):
        remedy = f"to go on with it: pipeline resume {path}; for a new run of its config, name {file}"
        raise click.UsageError(f"{path}: is a run directory; {remedy}")
    if not file.is_file():
        others = ", ".join(sorted(other.name for other in file.parent.glob("*.y*ml"))[:5])
        what = f"{os.path.abspath(path)}: has no config.yaml{others and f', only {others}'}"
        raise click.UsageError(f"{what}; name a config or its folder, or write one: pipeline new DIR")
    return str(file)


def _swap_overrides(path: str, overrides: Sequence[str], swaps: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The overrides that do the same as ``--startup [RUNNER=]CLASS`` and the like.

    Raises:
        click.UsageError: two of them, or one and an override, set the same.
    """
    if not any(swaps.values()):
        return
    # Without a tree, what is wrong with the config is all there is to say.
    tree = ConfigBuilder(path, overrides).tree or Node({}, DEFAULT)
    everyone, setters = list(runners_of_mode(tree)), dict[str, str]()
    for stage, value in ((stage, value) for stage, values in swaps.items() for value in values):
        one = _OF_ONE_RUNNER.fullmatch(value)
        runners, class_path = ([one[1]], one[2]) if one else (everyone, value)
        for name in runners:
            address, setter = f"runner.{name}.{stage}_class_path", f"--{stage} {value}"
            node = tree.find(address)
            before = setters.get(address, str(node.origin) if node else "")
            if before.startswith(("--", "override ")):
                raise click.UsageError(f"{address}: is set by {before} and by {setter}; leave one of them out")
            setters[address] = setter
            yield f"{address}={one_line(class_path)}"
