"""The command line of a training script: a file of hyperparameters, run options, and values that replace hyperparameters.

The names are SpeechBrain's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import yaml

from pipeline.config import yaml_text
from pipeline.config.tree import Origin
from pipeline.errors import ConfigError
from pipeline.training.option_rules import NOT_TAKEN, RULES, checked_value, refuse_unknown

_WHERE = "command line"
_TAGGED = (yaml.ScalarEvent, yaml.CollectionStartEvent)
_USAGE = (
    "write PARAM_FILE [--NAME VALUE]…, and a truth value as --NAME or --NAME=false; "
    f"the run options are {', '.join(RULES)}; any other name replaces a hyperparameter"
)


def parse_arguments(arg_list: Sequence[str] | None = None) -> tuple[str, dict[str, Any], str]:
    """Take a command line apart: ``hyperparams.yaml --device cuda:1 --seed 10``.

    A run option is written ``--name value`` or ``--name=value``; one that is true or false ``--debug``, ``--debug=true``
    or ``--debug=false``; a list of names ``--jit_module_keys encoder decoder``, up to the next option. Any other name
    needs a value, ``--name value`` or ``--name=value``; SpeechBrain makes null of one without.

    Args:
        arg_list: the words of the command line; None takes ``sys.argv[1:]``.

    Returns:
        The file of hyperparameters, as it was written; the run options that were given, and no others (SpeechBrain
        returns them all, so its command line could not leave any to the hyperparameters); and the other names as lines
        of YAML, ``seed: 10``, in their order. Such a value is what YAML makes of a number, truth value, null, or a
        list or mapping in brackets; what has a tag or quotes stays as it is; everything else is a string, and quoted
        where YAML would take it for something else.

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
        if name in RULES:
            run_opts[name] = checked_value(name, value, _WHERE)
        else:
            overrides[name] = _yaml_of(name, value)
    if len(files) != 1:
        what = f"names {len(files)} files ({', '.join(files)})" if files else "names no file of hyperparameters"
        raise ConfigError(f"{_WHERE}: {what}; {_USAGE}")
    return files[0], run_opts, "\n".join(f"{yaml_text.one_line(name)}: {value}" for name, value in overrides.items())


def _name_and_value(word: str, words: list[str]) -> tuple[str, Any]:
    """The option that a word begins; its value is taken from ``words`` where the word has none."""
    name, equals, text = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name:
        raise ConfigError(f"{_WHERE}: '{word}' is neither a file nor an option; write --NAME VALUE")
    if name in NOT_TAKEN or name.replace("-", "_") in RULES.keys() - {name}:
        refuse_unknown(name, _WHERE)
    kind = RULES[name].kind if name in RULES else None
    if kind is bool and not equals:
        return name, True
    if kind is list and not equals:
        return name, _up_to_the_next_option(words)
    if not equals:
        if not words or words[0].startswith("--"):
            remedy = f"write --{name} VALUE" if kind else f"write --{name} VALUE, or --{name}=true for a truth value"
            raise ConfigError(f"{_WHERE}: --{name} has no value; {remedy}")
        text = words.pop(0)
    if kind is None:
        return name, text
    value = _plain(text)
    return name, [value] if kind is list and isinstance(value, str) else value


def _up_to_the_next_option(words: list[str]) -> list[str]:
    taken = []
    while words and not words[0].startswith("--"):
        taken.append(words.pop(0))
    return taken


def _plain(text: str) -> Any:
    """What a text means as a value: a number, truth value, null, list, mapping or quoted string of YAML, else itself."""
    try:
        value = yaml_text.parse(text, Origin(_WHERE)).plain()
    except ConfigError:
        if text.startswith(("[", "{")):
            raise
        return text
    if isinstance(value, list | dict):
        return value if text.startswith(("[", "{")) else text
    if text.startswith(("'", '"')):
        return value
    return text if isinstance(value, str) or "#" in text else value


def _yaml_of(name: str, text: str) -> str:
    """A value for a hyperparameter as YAML on one line; tags are left to whoever loads the file."""
    where = f"{_WHERE}: --{name} is '{text}'"
    try:
        nodes = [each for each in yaml.parse(text, Loader=yaml.SafeLoader) if isinstance(each, _TAGGED)]
    except yaml.YAMLError as error:
        if text.startswith(("[", "{", "!")):
            raise ConfigError(f"{where}, which is no YAML: {str(error).splitlines()[0]}; mend or quote it") from error
        nodes = []
    if any(each.tag for each in nodes) and "\n" not in text and text.startswith(("!", "[", "{")):
        return text
    return yaml_text.one_line(_plain(text))
