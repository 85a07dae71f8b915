"""``${hyper_parameters.embedding_dim}`` and ``${env:HOME}``: references to other values."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from pipeline.config import keys, yaml_tree
from pipeline.config.yaml_tree import DEFAULT, MAX_BYTES, MAX_DEPTH, Node, Origin
from pipeline.errors import ConfigError, Fault, nearest

REFERENCE = re.compile(r"\$\{([^{}]*)\}")


class References:
    """Replaces the references of a tree in place.

    A string that is one reference takes the value, type and all (an environment variable is typed as YAML); within a
    longer string the value is written out. A key that is not written has its default. A relative path that is taken so
    belongs to the file that wrote its beginning.

    Attributes:
        faults: references to nothing, circles, and those that would make a config of any size out of a small one.
        used: the addresses that were referred to.
    """

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.faults: list[Fault] = []
        self.used: set[str] = set()
        self._active: list[str] = []
        self._done: set[int] = set()
        self._depth = 0
        self._size = 0
        self._reported = False

    def resolve(self, node: Node, address: str = "") -> None:
        """Replace every reference in ``node`` and below."""
        if id(node) in self._done:
            return
        self._done.add(id(node))
        self._depth += 1
        if isinstance(node.value, str) and "${" in node.value and node.origin is not DEFAULT:
            self._active.append(address)
            whole = REFERENCE.fullmatch(node.value)
            if not whole:
                self._expand_parts(node, address)
            elif source := self._lookup(whole[1], node, address):
                value = _typed(source.value, node.origin) if whole[1].startswith("env:") else source.value
                node.expand(value, source.unexpanded, source.origin.folder)
            else:
                # It stays in the config, and a fault says what is wrong with it.
                node.expand(node.value, node.unexpanded)
            self._active.pop()
        for part, child in list(node.children()):
            self.resolve(child, f"{address}.{part}" if address else part)
        self._depth -= 1

    def _expand_parts(self, node: Node, address: str) -> None:
        """Expand a longer string with references in it."""
        text = node.value
        sources = {match.start(): self._lookup(match[1], node, address) for match in REFERENCE.finditer(text)}

        def value_of(match: re.Match[str]) -> str:
            source = sources[match.start()]
            return match[0] if source is None else self._text(source, match[0], node, address)

        is_env = any(source and source.unexpanded is not None for source in sources.values())
        first = sources.get(0)
        unexpanded = text if is_env else node.unexpanded
        node.expand(REFERENCE.sub(value_of, text), unexpanded, first.origin.folder if first else None)

    def _text(self, source: Node, reference: str, node: Node, address: str) -> str:
        if isinstance(source.value, dict | list):
            kind = f"'{reference}' is a {type(source.value).__name__} and cannot stand within a string"
            self._fault(node, address, f"{kind}; refer to one value of it")
            return reference
        # As YAML writes them, not as Python does.
        return json.dumps(source.value) if source.value is None or isinstance(source.value, bool) else str(source.value)

    def _lookup(self, target: str, node: Node, address: str) -> Node | None:
        """A copy of the value of a reference; None, and a fault, if there is none or it is too large."""
        if target.startswith("env:"):
            name = target.removeprefix("env:")
            if name in os.environ:
                return Node(os.environ[name], node.origin, unexpanded=f"${{{target}}}")
            self._fault(node, address, f"the environment variable '{name}' is not set; set it, or write a value")
            return None
        if target in self._active:
            circle = " -> ".join([*self._active[self._active.index(target) :], target])
            self._fault(node, address, f"refers to itself: {circle}; give one of them a value")
            return None
        source = keys.find_key(self.tree, target) if target else None
        if source is None:
            hint = nearest(target, sorted(keys.addresses_of(self.tree))) or "; check the address"
            self._fault(node, address, f"'${{{target}}}' refers to nothing{hint}")
            return None
        if isinstance(source.value, dict | list) and any(active.startswith(f"{target}.") for active in self._active):
            self._fault(node, address, f"'${{{target}}}' holds itself; refer to one value of it")
            return None
        if self._depth < MAX_DEPTH:
            self.resolve(source, target)
        levels, size = _extent(source)
        self._size += size
        too_deep = self._depth + levels > MAX_DEPTH
        if too_deep or self._size > MAX_BYTES:
            if not self._reported:
                limit = f"{MAX_DEPTH} levels" if too_deep else f"{MAX_BYTES} characters"
                self._fault(node, address, f"more than {limit} once references are followed; make the config smaller")
            self._reported = True
            return None
        self.used.add(target)
        return source.copy()

    def _fault(self, node: Node, address: str, message: str) -> None:
        self.faults.append(node.origin.fault(address, message))


def _extent(node: Node) -> tuple[int, int]:
    """(levels, characters) of a value; each costs at least what fifty characters do."""
    below = [_extent(child) for _, child in node.children()]
    own = max(50, len(node.value)) if isinstance(node.value, str) else 50
    return 1 + max((levels for levels, _ in below), default=0), own + sum(size for _, size in below)


def _typed(text: str, origin: Origin) -> Any:
    """A scalar is typed as YAML, like an override's; anything else stays text."""
    try:
        value = yaml_tree.parse(text, origin).value
    except ConfigError:
        return text
    return text if isinstance(value, dict | list) else value
