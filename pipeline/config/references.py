"""``${hyper_parameters.embedding_dim}`` and ``${env:HOME}``: values that stand elsewhere."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from pipeline.config import yaml_text
from pipeline.config.tree import Node, Origin
from pipeline.errors import ConfigError, Fault, nearest

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


class References:
    """Replaces the references of a tree in place.

    A string that is one reference takes the value, type and all (an environment variable is typed as YAML); within a
    longer string the value is written out.

    Attributes:
        faults: references to nothing, and circles.
    """

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.faults: list[Fault] = []
        self._active: list[str] = []
        self._done: set[int] = set()

    def resolve(self, node: Node, address: str = "") -> None:
        """Replace every reference in ``node`` and below."""
        if id(node) in self._done:
            return
        self._done.add(id(node))
        if isinstance(node.value, str) and "${" in node.value:
            self._active.append(address)
            self._replace(node, address)
            self._active.pop()
        for part, child in list(node.children()):
            self.resolve(child, f"{address}.{part}" if address else part)

    def _replace(self, node: Node, address: str) -> None:
        text: str = node.value
        whole = _REFERENCE.fullmatch(text)
        if whole:
            found = self._lookup(whole[1], node, address)
            if found is not None:
                is_text = whole[1].startswith("env:")
                node.value = _typed(found.value, node.origin) if is_text else found.value
                node.unexpanded = found.unexpanded
            return
        node.value = _REFERENCE.sub(lambda match: self._text(match, node, address), text)

    def _text(self, match: re.Match[str], node: Node, address: str) -> str:
        found = self._lookup(match[1], node, address)
        if found is None:
            return match[0]
        if found.unexpanded is not None:
            node.unexpanded = match.string
        if isinstance(found.value, dict | list):
            kind = f"'{match[0]}' is a {type(found.value).__name__} and cannot stand within a string"
            self._fault(node, address, f"{kind}; refer to one value of it")
            return match[0]
        # As YAML writes them, not as Python does.
        return json.dumps(found.value) if found.value is None or isinstance(found.value, bool) else str(found.value)

    def _lookup(self, target: str, node: Node, address: str) -> Node | None:
        if target.startswith("env:"):
            return self._environment(target.removeprefix("env:"), node, address)
        if target in self._active:
            circle = " -> ".join([*self._active[self._active.index(target) :], target])
            self._fault(node, address, f"refers to itself: {circle}; give one of them a value")
            return None
        found = self.tree.find(target) if target else None
        if found is None:
            hint = nearest(target, [name for name, _ in self.tree.walk()]) or "; check the address"
            self._fault(node, address, f"'${{{target}}}' refers to nothing{hint}")
            return None
        if isinstance(found.value, dict | list) and any(each.startswith(f"{target}.") for each in self._active):
            self._fault(node, address, f"'${{{target}}}' holds itself; refer to one value of it")
            return None
        self.resolve(found, target)
        return found.copy()

    def _environment(self, name: str, node: Node, address: str) -> Node | None:
        if name not in os.environ:
            self._fault(node, address, f"the environment variable '{name}' is not set; set it, or write a value")
            return None
        return Node(os.environ[name], node.origin, unexpanded=f"${{env:{name}}}")

    def _fault(self, node: Node, address: str, message: str) -> None:
        self.faults.append(node.origin.fault(address, message))


def _typed(text: str, origin: Origin) -> Any:
    """A scalar is typed as YAML, like an override's; anything else stays text."""
    try:
        value = yaml_text.parse(text, origin).value
    except ConfigError:
        return text
    return text if isinstance(value, dict | list) else value
