"""Several engines of one model behind the interface of one scheduler, and which of them gets a request."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from penstock.engine.channel import Ready
from penstock.engine.metrics import SchedulerMetrics, total
from penstock.engine.remote import RemoteScheduler
from penstock.engine.request import Request
from penstock.engine.response import ResponseHandle
from penstock.errors import EngineDied, QueueFull

BLOCK = 16  # tokens
REMEMBERED = 1 << 16  # blocks of each replica; about 150 bytes each

_SAME_EVERYWHERE = ("weight_bytes",)  # of the model's stats; all others are sums


class Candidate(NamedTuple):
    """A replica that a request may go to.

    shared: tokens of the prompt that an earlier request there began with. load: requests that run or wait. slots: that
    run at a time. turn: of its last request among all, 0 before the first.
    """

    shared: int
    load: int
    slots: int
    turn: int


class Choice(NamedTuple):
    number: int
    by_prefix: bool


def choose(length: int, candidates: Sequence[Candidate]) -> Choice:
    """Which of the candidates gets a request of `length` tokens.

    The one with the longest shared prefix if that is more than 0.3 of the prompt, else the one with the least load; the
    least load alone counts while the busiest has more than its slots above, and more than 1.5 times, the idlest. Of
    equal ones the less loaded, then the one that has waited longest for a request.
    """

    def rank(number: int) -> tuple[int, int]:
        return candidates[number].load, candidates[number].turn

    everyone = range(len(candidates))
    least = min(everyone, key=rank)
    idlest, busiest = candidates[least].load, max(candidates, key=lambda one: one.load)
    uneven = busiest.load > idlest + busiest.slots and 2 * busiest.load > 3 * idlest
    longest = max(one.shared for one in candidates)
    if uneven or 10 * longest <= 3 * length:
        return Choice(least, False)
    return Choice(min((n for n in everyone if candidates[n].shared == longest), key=rank), True)


def block_digests(tokens: Sequence[int]) -> list[int]:
    """One number for each block of a prompt, the last of which may be short; it stands for all tokens up to its end."""
    found, digest = [], 0
    for start in range(0, len(tokens), BLOCK):
        digest = hash((digest, *tokens[start : start + BLOCK]))
        found.append(digest)
    return found


class PrefixMemory:
    """Beginnings of prompts, block by block, up to a number of blocks; the least recently used go first."""

    def __init__(self, blocks: int = REMEMBERED) -> None:
        self._blocks = blocks
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def shared(self, digests: Sequence[int], length: int) -> int:
        """How many tokens of a prompt of `length` were seen, as whole blocks, or all of them."""
        for block, digest in enumerate(digests):
            if digest not in self._seen:
                return block * BLOCK
        return length

    def add(self, digests: Sequence[int]) -> None:
        """A prompt was seen. Of equal age are its blocks, and the last one goes first."""
        for digest in reversed(digests):
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self._blocks:
            self._seen.popitem(last=False)


class _Replica:
    """An engine, and what the front remembers of requests that went there."""

    def __init__(self, scheduler: RemoteScheduler) -> None:
        self.scheduler = scheduler
        self.turn = 0
        self._loaded = scheduler.ready
        self._memory = PrefixMemory()

    @property
    def memory(self) -> PrefixMemory:
        """Empty after each start of the engine: stored prefixes end with the process."""
        if self._loaded is not self.scheduler.ready:
            self._loaded, self._memory = self.scheduler.ready, PrefixMemory()
        return self._memory


class Replicas:
    """Has the interface of `RemoteScheduler` over several of them; each request goes to one (see `choose`).

    make: starts the engine of a number, with what is to be called when it is given up; all are started together. While
    one is not available the others get its requests. notify is told of one that is given up, given_up is called with
    the reason of the last. Returns when all are ready; raises what one of them failed with, and ends the others.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[int, Callable[[str], None]], RemoteScheduler],
        *,
        notify: Callable[[str], None] = lambda note: None,
        given_up: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._count, self._notify, self._given_up = count, notify, given_up
        self._lock = threading.Lock()  # guards what follows
        self._gone: set[int] = set()
        self._turn = 0
        self._chosen: Counter[tuple[int, bool]] = Counter()
        self._passed_on = 0  # refusals by one replica after which another one took the request

        def gone(number: int) -> Callable[[str], None]:
            return lambda reason: self._replica_gone(number, reason)

        with ThreadPoolExecutor(count, thread_name_prefix="penstock-replica") as threads:
            started = [threads.submit(make, number, gone(number)) for number in range(count)]
        failed = [error for one in started if (error := one.exception()) is not None]
        made = [one.result() for one in started if one.exception() is None]
        if failed:
            for scheduler in made:
                scheduler.close(0)
            raise failed[0]
        self._replicas = [_Replica(scheduler) for scheduler in made]

    @property
    def schedulers(self) -> list[RemoteScheduler]:
        return [replica.scheduler for replica in self._replicas]

    @property
    def available(self) -> list[int]:
        """The numbers of replicas that take requests."""
        return [n for n, scheduler in enumerate(self.schedulers) if scheduler.unavailable is None]

    @property
    def unavailable(self) -> str | None:
        """Why no replica takes requests now; None if one does."""
        reasons = [scheduler.unavailable for scheduler in self.schedulers]
        return None if None in reasons else reasons[0]

    @property
    def ready(self) -> Ready:
        """Of all together: the model with the shortest context that one of them has room for, sums of the others."""
        each = [scheduler.ready for scheduler in self.schedulers]
        context = min(one.model["max_context"] for one in each)
        model = each[0].model | {"max_context": context}
        return Ready(model, sum(one.max_sequences for one in each), sum(one.queue for one in each))

    @property
    def max_sequences(self) -> int:
        return sum(scheduler.max_sequences for scheduler in self.schedulers)

    @property
    def closing(self) -> bool:
        return any(scheduler.closing for scheduler in self.schedulers)

    @property
    def stats(self) -> dict[str, Any]:
        """Of the model: sums over the replicas."""
        found: dict[str, Any] = {}
        for scheduler in self.schedulers:
            for name, value in scheduler.stats.items():
                if value is None or name in _SAME_EVERYWHERE:
                    found.setdefault(name, value)
                elif isinstance(value, list):  # counts by place; one replica may have seen more places
                    pairs = itertools.zip_longest(found.get(name) or [], value, fillvalue=(0, 0))
                    found[name] = [[sum(both) for both in zip(*pair, strict=True)] for pair in pairs]
                else:
                    found[name] = (found.get(name) or 0) + value
        return found

    @property
    def chosen(self) -> Counter[tuple[int, bool]]:
        """Requests that went to each replica: by its number, and whether for a shared prefix."""
        with self._lock:
            return Counter(self._chosen)

    def request(self, prompt: str | Sequence[int], max_tokens: int = 256, stop: Any = (), **options: Any) -> Request:
        """A request for `submit`, which every replica can take. Raises InvalidArgument or DTypeError."""
        narrowest = min(self.schedulers, key=lambda scheduler: scheduler.ready.model["max_context"])
        return narrowest.request(prompt, max_tokens, stop, **options)

    def submit(self, request: Request, client: str | None = None) -> ResponseHandle:
        """Hand a request in. Raises as `RemoteScheduler.submit`, when no replica takes it."""
        digests, length, left = block_digests(request.prompt), len(request.prompt), self.available
        if request.reading is not None:  # it stores no prefix, and uses none
            digests, length = [], 0
        error: Exception = EngineDied(self.unavailable or "no replica takes requests")
        refused = False
        while left:
            choice = self._choose(digests, length, left)
            try:
                handle = self.schedulers[choice.number].submit(request, client)
            except (QueueFull, EngineDied) as raised:
                with self._lock:
                    self._passed_on += refused
                refused, error = isinstance(raised, QueueFull), raised
                left.remove(choice.number)
                continue
            self._remember(choice, digests, refused)
            return handle
        raise error

    def metrics(self) -> SchedulerMetrics:
        """Of a moment ago, all replicas together."""
        each = [scheduler.metrics() for scheduler in self.schedulers]
        return total([*each, SchedulerMetrics(refused=-self._passed_on)])

    def close(self, deadline: float | None = None) -> None:
        """As `RemoteScheduler.close`, all at once."""
        with ThreadPoolExecutor(self._count, thread_name_prefix="penstock-replica") as threads:
            list(threads.map(lambda scheduler: scheduler.close(deadline), self.schedulers))

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(0)

    def _choose(self, digests: Sequence[int], length: int, among: Sequence[int]) -> Choice:
        with self._lock:
            replicas = [self._replicas[number] for number in among]
            candidates = [
                Candidate(one.memory.shared(digests, length), one.scheduler.load, one.scheduler.max_sequences, one.turn)
                for one in replicas
            ]
        found = choose(length, candidates)
        return Choice(among[found.number], found.by_prefix)

    def _remember(self, choice: Choice, digests: Sequence[int], refused: bool) -> None:
        with self._lock:
            self._turn += 1
            replica = self._replicas[choice.number]
            replica.turn = self._turn
            replica.memory.add(digests)
            self._chosen[choice.number, choice.by_prefix] += 1
            self._passed_on += refused

    def _replica_gone(self, number: int, reason: str) -> None:
        with self._lock:
            self._gone.add(number)
            left = self._count - len(self._gone)
        if left:
            self._notify(f"penstock: replica {number} is given up: {reason}; {left} of {self._count} go on")
        else:
            self._given_up(reason)
