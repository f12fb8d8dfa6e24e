"""How long requests took, in histograms."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Sequence

from penstock.engine.request import Timings

BOUNDS = tuple(round(digit * 10.0**power, 4) for power in range(-4, 4) for digit in (1, 2, 5))  # 0.1 ms to 5000 s


class Histogram:
    """Counts of seconds up to each of BOUNDS, and their sum."""

    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(BOUNDS) + 1)

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect.bisect_left(BOUNDS, seconds)] += times
        self.sum += seconds * times

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, as Prometheus writes them, with the number of observations up to each."""
        return list(zip([*map(str, BOUNDS), "+Inf"], itertools.accumulate(self._counts), strict=True))


class Latencies:
    """Of requests that have ended with at least one token, by the engine's clock.

    first_token: from submission. inter_token: of a request the mean gap between its tokens, counted once for each gap,
    so that nothing is done per token. whole: from submission to the last token. queue: before the prompt was begun.
    """

    def __init__(self) -> None:
        self.first_token, self.inter_token = Histogram(), Histogram()
        self.whole, self.queue = Histogram(), Histogram()
        self._lock = threading.Lock()

    def add(self, timings: Sequence[Timings]) -> None:
        with self._lock:
            for one in timings:
                if one.generated_tokens < 1:
                    continue
                first, gaps = one.queue_seconds + one.prompt_seconds, one.generated_tokens - 1
                self.queue.observe(one.queue_seconds)
                self.first_token.observe(first)
                self.whole.observe(first + one.generation_seconds)
                if gaps:
                    self.inter_token.observe(one.generation_seconds / gaps, gaps)
