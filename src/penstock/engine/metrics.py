"""What a scheduler counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class SchedulerMetrics:
    """What a scheduler is doing and has done. Counters only grow; bytes and pages are those of now."""

    running: int = 0  # requests that hold a sequence
    waiting: int = 0  # requests in the queue
    finished: int = 0  # ended by themselves
    cancelled: int = 0  # ended by their reader, by `close`, or because the reader took nothing
    failed: int = 0  # ended with an error
    refused: int = 0  # never started: queue full, or too large
    preemptions: int = 0  # sequences that were closed because their reader lagged behind while others waited
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # of prompts, taken from the prefix cache
    generated_tokens: int = 0
    prompt_seconds: float = 0.0  # of steps, by their tokens of prompts
    decode_seconds: float = 0.0  # and by those of answers
    decode_steps: int = 0  # steps with tokens of answers
    decode_rows: int = 0  # sum of the answers of all steps
    draft_tokens: int = 0  # drafts that were verified
    accepted_tokens: int = 0  # of them
    queue_seconds: float = 0.0  # sum over requests whose prompt was begun
    steps: int = 0
    host_seconds: float = 0.0  # of steps that a device runs: what launching them and handing tokens out takes
    pages_used: int = 0  # of keys and values
    pages_total: int = 0  # on a GPU that there are, else that there is memory for, about: pages of windows are smaller
    memory_used: int = 0  # bytes of pages and recurrent state in use or promised to running requests
    memory_total: int = 0
    prefix_entries: int = 0
    prefix_bytes: int = 0
    prefix_hits: int = 0  # requests that began with a stored prefix

    @property
    def mean_batch(self) -> float:
        """Answers per step."""
        return self.decode_rows / self.decode_steps if self.decode_steps else 0.0

    def ended(self, lost: int) -> SchedulerMetrics:
        """Of a scheduler that has ended with so many requests: what it has done stays, what it held is gone."""
        held = ("running", "waiting", "pages_used", "pages_total", "memory_used", "memory_total")
        gone = dict.fromkeys((*held, "prefix_entries", "prefix_bytes"), 0)
        return replace(self, failed=self.failed + lost, **gone)


def total(metrics: Iterable[SchedulerMetrics]) -> SchedulerMetrics:
    """What several schedulers are doing and have done together."""
    each = list(metrics)
    return SchedulerMetrics(**{one.name: sum(getattr(m, one.name) for m in each) for one in fields(SchedulerMetrics)})


@dataclass
class Work:
    """Counters that steps alone change."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    decode_rows: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    queue_seconds: float = 0.0
    steps: int = 0
    host_seconds: float = 0.0
    prefix_hits: int = 0
    preemptions: int = 0
