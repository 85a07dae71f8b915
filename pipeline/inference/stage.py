"""A stage as the trainer runs it, and a plugin as the hooks call it."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline import classes, source
from pipeline.inference.account import Account, Frame
from pipeline.inference.flow import Flow
from pipeline.inference.statements import follow
from pipeline.inference.values import Object, Ref, literal


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
    account = Account(facts or {}, follow)
    frame = Frame(definition.module, {})
    stage = Object(definition)
    function, constructor = stage.method(method), stage.method("__init__")
    _, complete = classes.ancestry(definition)
    if function is None or not complete:
        account.give_up(definition.place, frame)
    # A base that cannot be read may do anything before, after or instead.
    account.sure = complete
    if constructor:
        follow(
            account, constructor, [Ref()], {name: literal(value) for name, value in (arguments or {}).items()}, frame
        )
    if function:
        follow(account, function, [Ref()], {}, frame)
    return account.flow()


def flow_of_plugin(definition: source.Definition, hooks: Mapping[str, object], arguments: Mapping[str, object]) -> Flow:
    """What a plugin may do with the context in any of its hooks.

    Args:
        definition: the class of the plugin.
        hooks: the names of all hooks.
        arguments: those that the config gives the constructor.
    """
    account = Account({}, follow)
    frame = Frame(definition.module, {})
    plugin = Object(definition)
    above, complete = classes.ancestry(definition)
    if not complete:
        account.give_up(definition.place, frame)
    account.sure = False
    constructor = plugin.method("__init__")
    if constructor:
        follow(account, constructor, [], {name: literal(value) for name, value in arguments.items()}, frame)
    for name in {name for each in above for name in classes.methods(each) if name in hooks}:
        if function := plugin.method(name):
            follow(account, function, [], {"context": Ref()}, frame)
    return account.flow()
