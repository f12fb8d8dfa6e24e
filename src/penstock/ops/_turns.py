"""Experts that cannot all be in their stack at once: what stands in for `slot_of` when a kernel is called with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Turns(Protocol):
    """Brings experts into the stack while a kernel runs through it.

    What an iterator showed stays in the stack until it is asked for more. Other calls on the same stack come after it.
    """

    experts: int  # to choose from

    def by_expert(self, ids: Any) -> Iterator[Any]:
        """`slot_of` arrays in which only the experts of a turn are present; each chosen expert has one turn."""
        ...

    def by_token(self, ids: Any) -> Iterator[tuple[slice, Any]]:
        """Tokens in order, some at a time, and a `slot_of` array in which all that they chose is present."""
        ...


def in_turns(slot_of: Any, ids: Any) -> Iterator[Any]:
    """The `slot_of` arrays by which a kernel reaches the experts ids: the one it was given, or those of its turns."""
    return slot_of.by_expert(ids) if isinstance(slot_of, Turns) else iter((slot_of,))


def token_turns(slot_of: Any, ids: Any) -> Iterator[tuple[slice, Any]]:
    """As `in_turns` for a kernel that needs all experts of a token at once."""
    return slot_of.by_token(ids) if isinstance(slot_of, Turns) else iter(((slice(None), slot_of),))
