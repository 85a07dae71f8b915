"""``KEY=VALUES``: the values of a sweep, as they are written on the command line, and the trials that a grid has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import click

# They say where a run is, and each trial has its place in the folder of the sweep.
_PLACES = ("output_dir", "name")
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:\w*)?")
_OPENING, _CLOSING = "[{(", "]})"


@dataclass(frozen=True)
class Range:
    """A range of numbers, from which a search draws.

    Attributes:
        low, high: its ends, which are in it; integers where both are written so.
        log: whether it is the logarithms that are drawn evenly.
    """

    low: int | float
    high: int | float
    log: bool = False

    def text(self, value: float) -> str:
        """A number that was drawn, for the command line: six digits of it tell as much as all."""
        short = value if isinstance(value, int) else float(f"{value:.6g}")
        return repr(min(max(short, self.low), self.high))


@dataclass(frozen=True)
class Values:
    """The values of one address.

    Attributes:
        address: ``hyper_parameters.width``; with a ``+`` before it where the word has one.
        texts: the values, as they are written; of a range its two ends.
        range: the range; None: there is none.
    """

    address: str
    texts: tuple[str, ...]
    range: Range | None = None

    def words(self) -> list[str]:
        """The override that each value makes."""
        return [f"{self.address}={text}" for text in self.texts]


def parse(words: Sequence[str], fixed: Sequence[str] = ()) -> list[Values]:
    """The values that the words of a command line say; ``fixed``: the overrides that all trials have.

    Raises:
        click.UsageError: a word makes no sense, or sets what another sets.
    """
    values = [_parse_word(word) for word in words]
    if not values:
        raise click.UsageError("name values, e.g. hyper_parameters.width=16,32; for one run: pipeline run")
    addresses = [override.partition("=")[0] for override in fixed]
    for one in values:
        if one.address.lstrip("+") in [address.lstrip("+") for address in addresses]:
            raise click.UsageError(f"{one.address}: is set twice; leave one of them out")
        addresses.append(one.address)
    return values


def _parse_word(word: str) -> Values:
    address, _, text = word.partition("=")
    if address.lstrip("+") in _PLACES:
        remedy = f"set it for all of them, with -o {address}=…"
        raise click.UsageError(f"{word}: all trials of a sweep are in one folder; {remedy}")
    if match := _RANGE.fullmatch(text.strip()):
        return _parse_range(word, address, *match.groups())
    texts = tuple(_split(text))
    if len(texts) > 1 and "" in texts:
        raise click.UsageError(f"{word}: has a value of nothing; write null for none, or leave out a comma")
    if len(set(texts)) < len(texts):
        raise click.UsageError(f"{word}: has a value twice; leave one of them out")
    if several := [text for text in texts if len(texts) > 1 and _RANGE.fullmatch(text)]:
        raise click.UsageError(f"{word}: the range {several[0]} is one of several values; a range stands alone")
    return Values(address, texts)


def _parse_range(word: str, address: str, first: str, last: str, scale: str | None) -> Values:
    is_whole = all(re.fullmatch(r"[-+]?\d+", text) for text in (first, last))
    low, high = (int(text) if is_whole else float(text) for text in (first, last))
    if scale not in {None, ":log"}:
        raise click.UsageError(f"{word}: '{scale}' is no scale; write {first}..{last}:log, or {first}..{last}")
    if not low < high:
        raise click.UsageError(f"{word}: {first} is not below {last}; write the smaller one first")
    if scale and low <= 0:
        raise click.UsageError(f"{word}: {first} has no logarithm; begin above 0, or leave out :log")
    return Values(address, (first, last), Range(low, high, bool(scale)))


def _split(text: str) -> Iterator[str]:
    """The values between the commas that are outside of brackets and quotes."""
    value, depth, quote = "", 0, ""
    for place, character in enumerate(text):
        if quote:
            is_escaped = quote == '"' and re.search(r"(?<!\\)(\\\\)*\\\Z", text[:place])
            quote = "" if character == quote and not is_escaped else quote
        elif character in "'\"" and not re.search(r"[^\s,:\[{(']\Z", value):
            # In the middle of a word it is an apostrophe, and two of them in quotes are one.
            quote = character
        else:
            depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth == 0 and not quote:
            yield value.strip()
            value = ""
        else:
            value += character
    yield value.strip()


def grid(values: Sequence[Values]) -> list[list[str]]:
    """The words of each trial of a grid: every value of one with every value of the others, the last changing first.

    Raises:
        click.UsageError: there is a range, which has no end of values.
    """
    for one in values:
        if one.range:
            word = f"{one.address}={'..'.join(one.texts)}"
            raise click.UsageError(
                f"{word}: a grid takes no range; name its values, or draw from it: --search random --trials 20"
            )
    return [list(words) for words in product(*(one.words() for one in values))]


def titles(addresses: Sequence[str]) -> dict[str, str]:
    """Address -> as much of its end as tells it from the others."""
    titles = {}
    for address in addresses:
        parts, count = address.lstrip("+").split("."), 1
        others = [other.lstrip("+").split(".") for other in addresses if other != address]
        while count < len(parts) and any(parts[-count:] == other[-count:] for other in others):
            count += 1
        titles[address] = ".".join(parts[-count:])
    return titles
