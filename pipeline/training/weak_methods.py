"""Bound methods that do not keep their object alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def own_method(owner: Any, name: str) -> Callable[..., Any]:
    """Return a method of an object for one of its attributes, without a reference to the object.

    An object that keeps one of its own bound methods is part of a reference cycle. Only the garbage
    collector frees such an object, and the data workers that it has started run until then.
    What is not a method of this object is returned as it is.
    """
    method = getattr(owner, name)
    if getattr(method, "__self__", None) is owner:
        return WeaklyBound(method)
    return method  # type: ignore[no-any-return]


class WeaklyBound:
    """A bound method that does not keep its object alive.

    Args:
        method: the bound method. The object that it belongs to must outlive the calls.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._reference = WeakMethod(method)
        self._name = method.__qualname__

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The bound method, of which ``inspect`` shows the signature.

        Raises:
            ReferenceError: its object no longer exists.
        """
        method = self._reference()
        if method is None:
            raise ReferenceError(f"{self._name}: its object no longer exists; keep a reference to it")
        return method

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the method."""
        return self.__wrapped__(*args, **keywords)

    def __reduce__(self) -> Any:
        """Make the copy of an object refer to the methods of the copy."""
        return WeaklyBound, (self.__wrapped__,)
