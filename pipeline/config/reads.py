"""Which values of a config were read while it ran, and so which of them nobody read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.config.tree import DEFAULT, Node, Origin
from pipeline.errors import nearest

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values


_SECTIONS = ("dataset", "phase", "runner")


class Reads:
    """The addresses that were read, or looked for in vain.

    Attributes:
        found: what was read; reading a value reads all that is in it.
        missed: what was asked for and isn't there.
        everything: whether somebody had the whole config as plain data, of which nobody knows what was read.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.missed: set[str] = set()
        self.everything = False

    def unread(self, tree: Node, runners: Collection[str]) -> list[str]:
        """A line for each thing that was written and not read; a whole item has one.

        Args:
            tree: the config.
            runners: the names of those that ran. The others were left out on purpose, and perhaps what only they use.
        """
        if self.everything:
            return []
        sections = {name: list(node.children()) for name in _SECTIONS if (node := tree.child(name))}
        some_left_out = len(runners) < len(sections["runner"])
        kept = {"optimizer"} if some_left_out else set()
        node = tree.child("hyper_parameters")
        lines = [line for name, line in self._lines(node, "hyper_parameters").items() if name not in kept]
        for section, items in sections.items():
            for name, item in items:
                unread = self._lines(item, f"{section}.{name}")
                is_whole = len(unread) == sum(_is_written(key, each) for key, each in item.children())
                if section == "runner":
                    lines += unread.values() if name in runners else []
                elif not is_whole:
                    lines += unread.values()
                elif not some_left_out:
                    lines.append(_line(f"{section}.{name}", item.origin, ""))
        return lines

    def _lines(self, node: Node | None, address: str) -> dict[str, str]:
        asked = [each.rpartition(".")[2] for each in self.missed | self.found if each.rpartition(".")[0] == address]
        return {
            name: _line(f"{address}.{name}", each.key or each.origin, nearest(name, asked))
            for name, each in (node.children() if node else ())
            if _is_written(name, each) and not self._has(f"{address}.{name}")
        }

    def _has(self, address: str) -> bool:
        parts = address.split(".")
        above = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        return bool(above & self.found) or any(each.startswith(f"{address}.") for each in self.found)


class ReadDict(dict[str, Any]):
    """A mapping of the config that notes which of its keys are read. A copy of it is a plain dict."""

    def __init__(self, values: Mapping[str, Any], address: str, reads: Reads) -> None:
        super().__init__(values)
        self._address = address
        self._reads = reads

    def _note(self, key: object) -> None:
        (self._reads.found if dict.__contains__(self, key) else self._reads.missed).add(f"{self._address}.{key}")

    def __getitem__(self, key: str) -> Any:
        """The value."""
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        """Whether the key is there: who asks, knows it."""
        self._note(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default``."""
        self._note(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """The value, which is no longer there."""
        self._note(key)
        return super().pop(key, *default)

    def _all(self) -> None:
        self._reads.found.add(self._address)

    def items(self) -> dict_items[str, Any]:
        """All of it."""
        self._all()
        return super().items()

    def values(self) -> dict_values[str, Any]:
        """All of it."""
        self._all()
        return super().values()

    def __iter__(self) -> Iterator[str]:
        """The names; defined here so that ``{**mapping}`` asks for each value."""
        return super().__iter__()

    def __reduce__(self) -> tuple[Any, ...]:
        """A plain dict, for another process."""
        return dict, (dict(self),)


def _line(address: str, origin: Origin, hint: str) -> str:
    return f"{origin}: {address}: nobody read it, so it had no effect{hint or '; take it out, or check its name'}"


def _is_written(name: str, node: Node) -> bool:
    return node.origin is not DEFAULT and name != "name"
