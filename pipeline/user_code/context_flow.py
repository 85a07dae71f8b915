"""What stages read and write: declared in ``reads`` and ``writes`` or inferred, and checked against the context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pipeline.context import WRITERS, Context, PipelineStage
from pipeline.errors import ContextError, nearest
from pipeline.user_code import source
from pipeline.user_code.classes import calls_super

Action: TypeAlias = Literal["read", "write", "delete"]

# A name that the source doesn't tell.
ANY = "*"


@dataclass(frozen=True)
class Use:
    """One use of a key.

    Attributes:
        key: the key.
        action: what is done with it.
        place: ``file.py:14``.
        sure: whether it happens on every way through the stage; for a read also, that it fails without the key and that
            the stage didn't write the key itself before.
        item: the name that is looked up in the value: ``context["model"][item]``.
    """

    key: str
    action: Action
    place: str
    sure: bool
    item: str = ""


@dataclass
class Flow:
    """What one stage does with the context.

    Attributes:
        uses: in the order of the source.
        declared_writes: the keys that it declares to write.
        optional: the keys that are read with a default in their place.
        opaque: the keys in whose values it may put other names.
        unknown: where it does something to the context that cannot be followed; ``""`` where there is no such place.
        statuses: what it may write to ``context["status"]``.
        ours: what of ours may use the context, and of the context's loop: name -> whether it certainly runs.
        inexact: where a resumed run would take other batches: ``next`` in a counted loop.
        misnamed: where it calls a method that the context does not have: place -> its name.
    """

    uses: dict[Use, None] = field(default_factory=dict)
    declared_writes: dict[str, None] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)
    unknown: str = ""
    statuses: set[str] = field(default_factory=set)
    ours: dict[str, bool] = field(default_factory=dict)
    inexact: dict[str, None] = field(default_factory=dict)
    misnamed: dict[str, str] = field(default_factory=dict)

    def mark_unknown(self, place: str) -> None:
        """Note that from a place on nothing is known; the first such place stays."""
        self.unknown = self.unknown or place

    def note_status(self, status: str, *, sure: bool) -> None:
        """Note a status that is written; one that is sure to be written replaces those before."""
        if sure:
            self.statuses.clear()
        self.statuses.add(status)

    def demands(self) -> Iterator[Use]:
        """The reads that certainly fail without their key, or without the name that is looked up in it; each once."""
        first: dict[tuple[str, str], Use] = {}
        for use in self.uses:
            if use.action == "read" and use.sure:
                first.setdefault((use.key, use.item), use)
        yield from first.values()

    def reads(self) -> list[str]:
        """The keys that are read, or may be."""
        return list(dict.fromkeys(use.key for use in self.uses if use.action == "read"))

    def writes(self) -> list[str]:
        """The keys that are written, or may be."""
        return list(dict.fromkeys([*(use.key for use in self.uses if use.action == "write"), *self.declared_writes]))

    def certain_writes(self) -> set[str]:
        """The keys that are certainly written."""
        return {use.key for use in self.uses if use.action == "write" and use.sure}

    def removed_keys(self) -> set[str]:
        """The keys that are certainly gone afterwards."""
        last = {use.key: use for use in self.uses if use.action != "read"}
        # What is not sure to be written where it stands may be written later.
        uncertain = {use.key for use in self.uses if use.action == "write" and not use.sure}
        removed = {key for key, use in last.items() if use.action == "delete" and use.sure}
        return removed - uncertain - set(self.declared_writes)


def check_reads(stage: PipelineStage, method: str, place: str, context: Context) -> None:
    """Before a stage runs its method: what it declares to read must be there.

    Raises:
        ContextError: a key is missing.
    """
    if (key := _missing_key(stage, method, "reads", context)) is not None:
        near = key not in WRITERS and nearest(key, context)
        hint = near or "; write it in an earlier stage, or take it out of `reads`"
        what = f"{place} declares that it reads context['{key}'], which nothing wrote"
        raise ContextError(f"{what}; written so far: {', '.join(context)}{hint}")


def check_writes(stage: PipelineStage, method: str, place: str, context: Context) -> None:
    """After a stage has run its method: what it declares to write must be there.

    Raises:
        ContextError: a key is missing.
    """
    if (key := _missing_key(stage, method, "writes", context)) is not None:
        what = f"{place} declares that it writes context['{key}'] but did not"
        raise ContextError(f"{what}; write it, or take it out of `writes`")


def _missing_key(stage: PipelineStage, method: str, attribute: str, context: Context) -> str | None:
    """The first key that is missing of those that the stage declares, or a base whose method it certainly calls."""
    for owner in (stage, *type(stage).__mro__):
        if attribute in vars(owner):
            return next((key for key in vars(owner)[attribute] if key not in list(context)), None)
        if method in vars(owner):
            definition = source.class_definition(owner) if isinstance(owner, type) else None
            if not (definition and calls_super(definition, method)):
                break
    return None
