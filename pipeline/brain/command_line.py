"""Splits the command line of a script into a file, run options and overrides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import yaml

from pipeline.brain.option_values import NAMES, NOT_TAKEN, kind_of, refuse_unknown, values_of
from pipeline.config import yaml_tree
from pipeline.config.yaml_tree import Origin
from pipeline.errors import ConfigError

_WHERE = "command line"

_USAGE = (
    "write PARAM_FILE [--NAME VALUE]…, and a truth value as --NAME or --NAME=false; "
    f"the run options are {', '.join(NAMES)}; any other name replaces a hyperparameter"
)


def split_arguments(arg_list: Sequence[str] | None = None) -> tuple[str, dict[str, Any], str]:
    """Split a command line as ``parse_arguments`` does.

    Args:
        arg_list: the words of the command line. None takes ``sys.argv[1:]``.

    Returns:
        The file of hyperparameters, the run options that were given, and the other names as lines of YAML.

    Raises:
        ConfigError: there is no file, or more than one; a name comes twice; a value is missing, or is not what the option
            takes.
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
    lines = [f"{yaml_tree.one_line(name)}: {value}" for name, value in overrides.items()]
    return files[0], run_opts, "\n".join(lines)


def _name_and_value(word: str, words: list[str]) -> tuple[str, Any]:
    """Return the name and the value of an option.

    Args:
        word: the word that starts with dashes.
        words: the words after it. Values that are not in ``word`` are taken from here.

    Raises:
        ConfigError: the option has no value, or no such name is taken.
    """
    name, equals, text = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name:
        raise ConfigError(f"{_WHERE}: '{word}' is neither a file nor an option; write --NAME VALUE")
    if name in NOT_TAKEN or (name not in NAMES and name.replace("-", "_") in NAMES):
        refuse_unknown(name, _WHERE)
    kind = kind_of(name) if name in NAMES else None
    if not equals and kind is bool:
        return name, True
    if not equals and kind is list:
        values = list(takewhile(lambda following: not following.startswith("--"), words))
        del words[: len(values)]
        return name, values
    if not equals and (not words or words[0].startswith("--")):
        remedy = f"write --{name} VALUE" if kind else f"write --{name} VALUE, or --{name}=true for a truth value"
        raise ConfigError(f"{_WHERE}: --{name} has no value; {remedy}")
    text = text if equals else words.pop(0)
    value = _plain(text) if kind else text
    return name, [value] if kind is list and isinstance(value, str) else value


def _plain(text: str) -> Any:
    """Return the value of a text.

    It is a number, truth value, null, list, mapping or quoted string if the text is such YAML, and the text
    otherwise.
    """
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
    """Return the value of a hyperparameter as YAML on one line. Tags are kept for the code that loads the file."""
    if text.startswith(("!", "[", "{")):
        try:
            has_tag = any(getattr(event, "tag", None) for event in yaml.parse(text, Loader=yaml.SafeLoader))
        except yaml.YAMLError as error:
            what = f"--{name} is '{text}', which is no YAML: {str(error).splitlines()[0]}"
            raise ConfigError(f"{_WHERE}: {what}; mend or quote it") from error
        if has_tag and "\n" not in text:
            return text
    return yaml_tree.one_line(_plain(text))
