"""Attributes of objects and classes that can be read: what is assigned, what their classes have, and ``super()``."""

from __future__ import annotations

import ast
from dataclasses import replace

from pipeline.inference.account import Account
from pipeline.inference.given import Given
from pipeline.inference.members import Member, mark, member
from pipeline.inference.names import decorated
from pipeline.inference.reach import carries
from pipeline.inference.values import Attribute, Class, Function, Object, Parent, Ref, Value

_BY_HAND = ("__getattr__", "__getattribute__", "__setattr__", "__delattr__")


def attribute(owner: Object, name: str, account: Account) -> Value:
    """An attribute of an object: its own, a method, a property's value, or a constant of its class."""
    if owner.shared and not carries(owner):
        # It cannot reach the context unless a call brings it.
        return Attribute(owner, name)
    if account.deferred:
        account.share(owner)
    if name.startswith("__"):
        owner.untold = owner.untold or name == "__dict__"
    if owner.untold or any(member(owner.definition, each) for each in _BY_HAND):
        account.escape(owner)
        return None
    if name in owner.attributes:
        return owner.attributes[name]
    found = member(owner.definition, name)
    if found is None:
        if name.startswith("__"):
            account.escape(owner)
        return None
    return bound(found, owner, account)


def of_parent(parent: Parent, name: str, account: Account) -> Value:
    """``super().name``."""
    cls = parent.owner.definition
    found = member(cls, name, after=parent.home)
    if found is None:
        # object's own: its __init__ does nothing.
        if name != "__init__":
            account.escape(parent.owner)
        return None
    return bound(found, parent.owner, account)


def of_class(cls: Class, name: str, account: Account) -> Value:
    """``Startup.startup``, to be called with the object as its first argument; or a constant of the class."""
    found = member(cls.definition, name)
    return bound(found, cls, account) if found else None


def bound(found: Member, owner: Object | Class, account: Account) -> Value:
    """What Python makes of a member when an object or class is asked for it."""
    node, module = found.node, found.home.module
    if account.is_patched(found.name):
        account.escape(owner)
        return None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if not found.is_plain:
            # It may be a function, or run one.
            account.escape(owner)
        return found.constant
    kind, instance = mark(node, module), isinstance(owner, Object)
    method = Function(node, module, owner if instance else None, found.home)
    if kind == "property" and instance:
        return account.follow(method, Given([], {}))
    if kind == "staticmethod":
        return Function(node, module, None, found.home)
    if kind == "classmethod":
        return Function(node, module, Class(owner.definition), found.home)
    if kind:
        made = _decorated(found, owner, account)
        if made is None:
            # A decorator that cannot be told makes something else of it.
            account.escape(method)
            account.escape(owner)
        return made
    return method


def _decorated(found: Member, owner: Object | Class, account: Account) -> Value:
    """A method as its decorators make it, where they stand outside of the class and can be read."""
    node = found.node
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    used = {part.id for each in node.decorator_list for part in ast.walk(each) if isinstance(part, ast.Name)}
    if any(member(found.home, name) for name in used):
        return None
    made = decorated(Function(node, found.home.module, None, found.home), account)
    return made and replace(made, owner=owner if isinstance(owner, Object) else None)


def assign(owner: Object, name: str, value: Value, account: Account) -> None:
    """``self.name = value``."""
    owner.untold = owner.untold or name.startswith("__")
    found = None if owner.shared else member(owner.definition, name)
    before = owner.attributes[name] if name in owner.attributes else _hidden(found, owner)
    if (found and not found.is_plain) or (
        not owner.shared and any(member(owner.definition, each) for each in _BY_HAND)
    ):
        # A setter takes it.
        account.escape(owner)
    if owner.shared and not (isinstance(value, Ref) and value == before):
        account.escape(value)
        account.escape(before)
        value = None
    elif (found or name in owner.attributes) and not account.firm:
        value = account.either(before, value)
    if name not in owner.attributes or owner.attributes[name] != value:
        account.changed(owner)
    owner.attributes[name] = value


def _hidden(found: Member | None, owner: Object) -> Value:
    """What the class has under a name that an object is about to hide."""
    if found and isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return Function(found.node, found.home.module, owner, found.home)
    return found.constant if found else None
