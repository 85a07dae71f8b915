"""What a pickle would do, found out without doing it: only what the weights of ``torch.save`` need is let through."""

from __future__ import annotations

import pickletools
from typing import Any

from pipeline.errors import CheckpointError

MAX_STEPS = 2_000_000
"""Opcodes; a tensor takes about 20."""
MAX_TUPLE = 10_000
"""Values in a tuple, with those of the tuples in it: a few lines of pickle make one of 2^40, which is slow to hash."""

_STEPS = {
    "PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1",
    "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "BINGET", "LONG_BINGET", "BINPUT",
    "LONG_BINPUT",
}  # fmt: skip
_GLOBALS = {
    "collections OrderedDict", "torch Size", "torch._utils _rebuild_parameter", "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3", "torch.storage UntypedStorage", "torch uint16", "torch uint32", "torch uint64",
    "torch float8_e4m3fn", "torch float8_e5m2", "torch FloatStorage", "torch DoubleStorage", "torch HalfStorage",
    "torch BFloat16Storage", "torch LongStorage", "torch IntStorage", "torch ShortStorage", "torch CharStorage",
    "torch ByteStorage", "torch BoolStorage", "torch ComplexFloatStorage", "torch ComplexDoubleStorage",
}  # fmt: skip
_RESAVE = "save a state_dict, or use .safetensors"
_MARK = -1


def check(content: bytes) -> None:
    """Go through a pickle without running it.

    Raises:
        CheckpointError: it names code that weights do not need, takes too many steps, or is no pickle.
    """
    stack: list[int] = []
    memo: dict[Any, int] = {}
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count == MAX_STEPS:
                raise CheckpointError(f"its pickle takes more than {MAX_STEPS} steps; {_RESAVE}")
            if opcode.name not in _STEPS:
                raise CheckpointError(f"its pickle does {opcode.name}, which weights do not need; {_RESAVE}")
            if opcode.name == "GLOBAL" and argument not in _GLOBALS:
                raise CheckpointError(f"its pickle names '{str(argument)[:80]}', which weights do not need; {_RESAVE}")
            _step(opcode, argument, stack, memo)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(f"its pickle is damaged ({error}); use another") from error


def _step(opcode: pickletools.OpcodeInfo, argument: Any, stack: list[int], memo: dict[Any, int]) -> None:
    """Do to a stack of sizes what an opcode does to the stack of values."""
    if opcode.name in {"BINPUT", "LONG_BINPUT"}:
        memo[argument] = stack[-1]
    elif opcode.name in {"BINGET", "LONG_BINGET"}:
        stack.append(memo[argument])
    elif opcode.name == "MARK":
        stack.append(_MARK)
    else:
        size = 1 + _taken(opcode, stack)
        if opcode.name.startswith("TUPLE") and size > MAX_TUPLE:
            raise CheckpointError(f"its pickle makes a tuple of {size} values; {_RESAVE}")
        stack.extend([size] * len(opcode.stack_after))


def _taken(opcode: pickletools.OpcodeInfo, stack: list[int]) -> int:
    """Take off the stack what an opcode takes; how large that was."""
    total = 0
    before = list(opcode.stack_before)
    if pickletools.stackslice in before:
        while (size := stack.pop()) != _MARK:
            total += size
        before = before[: before.index(pickletools.markobject)]
    for _ in before:
        size = stack.pop()
        if size == _MARK:
            raise ValueError("a mark where a value should be")
        total += size
    return total
