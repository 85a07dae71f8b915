"""Which values of a config were read during a run, and which were not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.config import keys
from pipeline.config.schema import SECTIONS
from pipeline.config.yaml_tree import DEFAULT, Node
from pipeline.errors import nearest

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values


_NEVER, _SO_FAR = "nobody read it, so it had no effect", "nobody has read it before the first batch"

_REMEDY = "; take it out, or check its name"


class UsageTracker:
    """The addresses that were read, and those that were looked up without success.

    Args:
        addresses: what other values of the config refer to.
        suspects: the hyper-parameters that, as far as the source tells, nobody reads.

    Attributes:
        addresses: what was read; reading a value reads all that is in it.
        missing: what was asked for and isn't there.
        everything: whether somebody had the whole config as plain data, of which nobody knows what was read.
    """

    def __init__(self, addresses: Iterable[str] = (), suspects: Iterable[str] = ()) -> None:
        self.addresses = set(addresses)
        self.missing: set[str] = set()
        self.everything = False
        self.suspects = set(suspects)
        self._reported: set[str] = set()

    def mark_everything_read(self) -> None:
        """Note that somebody had the whole config; nothing in it counts as unread."""
        self.everything = True

    def unread_so_far(self, tree: Node) -> list[str]:
        """A line for each hyper-parameter that nobody has read and no source names; each once."""
        lines = self._lines(tree.child("hyper_parameters"), "hyper_parameters", _SO_FAR)
        new = {name: line for name, line in lines.items() if name in self.suspects - self._reported}
        self._reported |= set(new)
        return list(new.values())

    def unread(self, tree: Node, runners: Collection[str]) -> list[str]:
        """A line for each value that was written and not read; a whole item has one.

        Args:
            tree: the config.
            runners: the names of those that ran. The others were left out on purpose, and perhaps what only they use.
        """
        if self.everything:
            return []
        some_left_out = len(runners) < len(tree.section("runner"))
        hyper_parameters = self._lines(tree.child("hyper_parameters"), "hyper_parameters")
        # What a source names may be for a runner that was left out.
        excused = set(hyper_parameters) - self.suspects if some_left_out else set[str]()
        lines = [line for name, line in hyper_parameters.items() if name not in self._reported | excused]
        for section in SECTIONS:
            for name, item in tree.section(section).items():
                unread = self._lines(item, f"{section}.{name}")
                is_whole = len(unread) == len(_user_values(item, f"{section}.{name}"))
                if section == "runner":
                    lines += unread.values() if name in runners else []
                elif not is_whole:
                    lines += unread.values()
                elif not some_left_out:
                    lines.append(f"{item.origin}: {section}.{name}: {_NEVER}{_REMEDY}")
        return lines

    def _lines(self, node: Node | None, address: str, what: str = _NEVER) -> dict[str, str]:
        # A key that is there, by default too, is not what another was meant to be.
        names = [missing.rpartition(".")[2] for missing in self.missing if missing.rpartition(".")[0] == address]
        written = _user_values(node, address).items()
        return {
            name: f"{child.key or child.origin}: {address}.{name}: {what}{nearest(name, names) or _REMEDY}"
            for name, child in written
            if not is_within(f"{address}.{name}", self.addresses)
        }


def is_within(address: str, addresses: Collection[str]) -> bool:
    """Whether one of the addresses is that of a value, of a part of it, or of what holds it."""
    return any(f"{address}.".startswith(f"{other}.") or other.startswith(f"{address}.") for other in addresses)


class TrackedDict(dict[str, Any]):
    """A mapping of the config that records which of its keys are read. A copy of it is a plain dict."""

    def __init__(self, values: Mapping[str, Any], address: str, reads: UsageTracker) -> None:
        super().__init__(values)
        self._address, self._reads = address, reads

    def _note(self, key: object) -> None:
        (self._reads.addresses if dict.__contains__(self, key) else self._reads.missing).add(f"{self._address}.{key}")

    def __getitem__(self, key: str) -> Any:
        """The value."""
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        """Whether the key exists; counts as a read."""
        self._note(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default``."""
        self._note(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove and return the value."""
        self._note(key)
        return super().pop(key, *default)

    def items(self) -> dict_items[str, Any]:
        """All of it."""
        self._reads.addresses.add(self._address)
        return super().items()

    def values(self) -> dict_values[str, Any]:
        """All of it."""
        self._reads.addresses.add(self._address)
        return super().values()

    def __iter__(self) -> Iterator[str]:
        """The names; defined here so that ``{**mapping}`` asks for each value."""
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        """A plain dict, for another process."""
        return dict, (dict(self),)


def _user_values(node: Node | None, address: str) -> dict[str, Node]:
    """The value at an address, unless it is the default."""
    values = {}
    for name, child in node.children() if node else ():
        key = keys.key_of(f"{address}.{name}")
        is_default = key and not key.inside and child.plain() == key.info.get_default(call_default_factory=True)
        if child.origin is not DEFAULT and name != "name" and not is_default:
            values[name] = child
    return values
