"""A stage as the trainer runs it, and a plugin as the hooks call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pipeline.inference.account import Account
from pipeline.inference.calls import value as called
from pipeline.inference.expressions import value_of
from pipeline.inference.flow import Flow, Use
from pipeline.inference.frame import Frame
from pipeline.inference.functions import follow
from pipeline.inference.given import Given
from pipeline.inference.ledger import TooLongError
from pipeline.inference.members import ancestry, member
from pipeline.inference.objects import bound
from pipeline.inference.plain import literal
from pipeline.inference.statements import block
from pipeline.inference.values import Object, Ref
from pipeline.user_code import source


def flow_of(
    definition: source.Definition,
    method: str,
    arguments: Mapping[str, object] | None = None,
    facts: Mapping[str, object] | None = None,
) -> Flow:
    """What a stage does with the context, from its source alone.

    Args:
        definition: the class of the stage.
        method: the method that the trainer calls.
        arguments: those that the config gives the constructor.
        facts: keys of the context whose value is known before anything runs: ``{"is_infer": False}``.
    """
    account = _account(definition, facts or {})

    def stage() -> None:
        owner = Object(definition)
        # A base that cannot be read may do anything before, after or instead.
        account.sure = _is_plain(definition)
        if not account.sure:
            account.give_up()
        named = {name: literal(value) for name, value in (arguments or {}).items()}
        _call(owner, "__init__", Given([Ref()], named), account)
        _call(owner, method, Given([Ref()], {}), account)

    return _followed(stage, account, definition)


def flow_of_plugin(definition: source.Definition, hooks: Mapping[str, object], arguments: Mapping[str, object]) -> Flow:
    """What a plugin may do with the context in any of its hooks.

    Args:
        definition: the class of the plugin.
        hooks: the names of all hooks.
        arguments: those that the config gives the constructor.
    """
    account = _account(definition, {})

    def plugin() -> None:
        owner = Object(definition)
        account.sure = False
        if not _is_plain(definition):
            account.give_up()
        named = {name: literal(value) for name, value in arguments.items()}
        _call(owner, "__init__", Given([], named), account)
        # From one hook to the next, it may keep anything.
        account.share(owner)
        for name in hooks:
            if member(definition, name):
                _call(owner, name, Given([], {"context": Ref()}), account)

    return _followed(plugin, account, definition)


def reads_of_hook(
    definition: source.Definition, hook: str, arguments: Mapping[str, object], given: Mapping[str, object]
) -> list[Use]:
    """What a hook of a plugin reads of the context on every way through it, and fails without.

    Args:
        definition: the class of the plugin.
        hook: its name.
        arguments: those that the config gives the constructor.
        given: arguments of the hook whose value is known.
    """
    if member(definition, hook) is None:
        return []
    account = _account(definition, {})

    def called_once() -> None:
        owner = Object(definition)
        if not _is_plain(definition):
            account.give_up()
        with account.perhaps():
            _call(owner, "__init__", Given([], {name: literal(each) for name, each in arguments.items()}), account)
            account.share(owner)
        known = {name: literal(each) for name, each in given.items()}
        _call(owner, hook, Given([], {"context": Ref(), **known}), account)

    return list(_followed(called_once, account, definition).demands())


def _account(definition: source.Definition, facts: Mapping[str, object]) -> Account:
    return Account((definition.node, Frame(definition.module)), facts, value_of, block, follow)


def _is_plain(definition: source.Definition) -> bool:
    """Whether all bases of a class can be read, and its objects are made as objects are."""
    return ancestry(definition)[1] and member(definition, "__new__") is None


def _call(owner: Object, name: str, given: Given, account: Account) -> None:
    found = member(owner.definition, name)
    if found:
        called(bound(found, owner, account), given, account)
    elif name != "__init__":
        account.give_up()


def _followed(steps: Callable[[], None], account: Account, definition: source.Definition) -> Flow:
    """The account after following some steps; where they are too many or too deep, nothing is sure."""
    try:
        steps()
    except (TooLongError, RecursionError):
        flow = account.flow()
        return replace(flow, uses=tuple(replace(use, sure=False) for use in flow.uses), unknown=definition.place)
    return account.flow()
