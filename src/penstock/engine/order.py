"""Who goes first: the order of requests that wait and of prompts under way, fair between clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq

from penstock.engine.execution import Part
from penstock.engine.state import RequestState


class Order:
    """Requests that wait and prompts under way have one order, counted in prompt tokens that are not stored already.

    A place is all that came before + twice its own: so a short prompt passes a long one, and those that pass a prompt
    of n tokens have fewer than n tokens together. Between clients the order is fair: the first request of one goes
    before the second of another, and their prompts take turns. alignment: of chunks.
    """

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._handed_in = 0  # prompt tokens so far
        self._served: set[Hashable] = set()  # clients with a request that was let in since the turn came round
        self._chunks = 0  # of prompts, chosen so far

    def place(self, state: RequestState, stored: int) -> None:
        """Give a request its place; stored: tokens of its prompt that need not be computed."""
        count = len(state.request.prompt) - stored
        state.order = self._handed_in + 2 * count
        self._handed_in += count

    def waiting(self, waiting: Seq[RequestState], running: Seq[RequestState]) -> list[RequestState]:
        """By how many requests of the same client come before, running or waiting; among equals clients take turns."""
        before = Counter(state.client for state in running)
        rank: dict[RequestState, tuple[int, bool]] = {}
        for state in sorted(waiting, key=_place):
            # place 0: it ran until a step failed
            rank[state] = (before[state.client], state.client in self._served) if state.order else (-1, False)
            before[state.client] += 1
        return sorted(rank, key=lambda state: (rank[state], _place(state)))

    def let_in(self, state: RequestState) -> None:
        """A request has got its sequence."""
        if state.client in self._served:  # all others that wait had their turn
            self._served.clear()
        self._served.add(state.client)
        state.turn = self._chunks

    def chunks(
        self,
        prompts: Seq[RequestState],
        running: Seq[RequestState],
        room: int,
        chunk: Callable[[RequestState, int], Part],
    ) -> list[Part]:
        """Chunks of prompts for a step of `room` tokens, at least one: first of the client whose last is the longest
        ago. `chunk` gives the next one of a prompt; it may cut it to the room that is left.
        """
        turns: dict[Hashable, int] = {}
        for state in running:
            turns[state.client] = max(state.turn, turns.get(state.client, 0))
        left = list(prompts)
        chosen: list[Part] = []
        coming: set[bytes] = set()  # digests of prefixes that prompts before will store
        while left and (room > 0 or not chosen):
            state = min(left, key=lambda state: (turns[state.client], _place(state)))
            left.remove(state)
            part = chunk(state, room)
            if not coming.isdisjoint(self._reusable(state)):
                continue  # it will not have to compute them
            coming |= self._stored(state)
            if chosen and part.end - part.at > room:
                break
            self._chunks += 1
            state.turn = turns[state.client] = self._chunks
            room -= part.end - part.at
            chosen.append(part)
        return chosen

    def _reusable(self, state: RequestState) -> list[bytes]:
        """Digests of the chunk ends that a prompt could begin behind."""
        return state.digests[
            state.opened.length // self._alignment : (len(state.request.prompt) - 1) // self._alignment
        ]

    def _stored(self, state: RequestState) -> set[bytes]:
        """Digests of the chunk ends where a prompt will be stored."""
        return {state.digests[n // self._alignment - 1] for n in state.points if n > state.opened.length}


def _place(state: RequestState) -> int:
    assert state.order is not None
    return state.order
