"""Bound methods that do not keep their object alive."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import ref


def own_method(owner: Any, name: str) -> Callable[..., Any]:
    """Return a bound method of an object that the object can keep in one of its attributes.

    An object that keeps its bound method directly is part of a reference cycle. Only the garbage
    collector frees such an object, and the data workers that it has started run until then.

    Args:
        owner: the object.
        name: the name of the method. An attribute that is not a method of this object is returned
            as it is.
    """
    method = getattr(owner, name)
    if isinstance(method, MethodType) and method.__self__ is owner:
        return WeaklyBound(method)
    return method  # type: ignore[no-any-return]


class WeaklyBound:
    """A bound method that does not keep its object alive.

    Unlike ``weakref.WeakMethod`` it keeps the function, since nothing else may refer to it.

    Args:
        method: the bound method. The object that it belongs to must outlive the calls.
    """

    def __init__(self, method: MethodType) -> None:
        self._function = method.__func__
        self._owner = ref(method.__self__)

    @property
    def __wrapped__(self) -> MethodType:
        """The bound method. ``inspect`` shows its signature.

        Raises:
            ReferenceError: its object no longer exists.
        """
        owner = self._owner()
        if owner is None:
            name = getattr(self._function, "__qualname__", repr(self._function))
            raise ReferenceError(f"{name}: its object no longer exists; keep a reference to it")
        return MethodType(self._function, owner)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the method."""
        return self.__wrapped__(*args, **keywords)

    def __reduce__(self) -> Any:
        """Have the copy of an object refer to the methods of the copy."""
        return WeaklyBound, (self.__wrapped__,)
