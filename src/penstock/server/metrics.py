"""/metrics: what the server is doing and has done, in the text format of Prometheus, by the names of llama.cpp."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from penstock.machine import available_memory
from penstock.server.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """Counts requests; everything else comes from the model and its scheduler when the numbers are asked for."""

    def __init__(self, service: Service, paths: Iterable[str]) -> None:
        self._service, self._paths = service, frozenset(paths)
        self._requests: Counter[tuple[str, int]] = Counter()
        self._started = time.time()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count(self, path: str, status: int) -> None:
        """A request was answered. Unknown paths count together: a client must not be able to make up names."""
        self._requests[path if path in self._paths else "other", status] += 1

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "penstock:http_requests", "Answered requests by path and status.", labels=("path", "status")
        )
        for (path, status), count in sorted(self._requests.items()):
            requests.add_metric((path, str(status)), count)
        yield requests
        yield GaugeMetricFamily("penstock:up_seconds", "Since the server started.", time.time() - self._started)
        yield GaugeMetricFamily("penstock:load_progress", "Of the model, 1 when it is ready.", self._service.progress)
        yield GaugeMetricFamily(
            "penstock:memory_available_bytes", "That this process may still take.", available_memory()
        )
        loaded = self._service.loaded
        if loaded is None:
            return
        llm, scheduler = loaded
        now, stats = scheduler.metrics(), llm.stats()
        counters = {
            "prompt_tokens": ("Tokens of prompts that were computed.", now.prompt_tokens),
            "prompt_seconds": ("Seconds in prompts.", now.prompt_seconds),
            "tokens_predicted": ("Tokens that were generated.", now.generated_tokens),
            "tokens_predicted_seconds": ("Seconds in decode steps.", now.decode_seconds),
            "n_decode": ("Decode steps.", now.decode_steps),
            "cached_tokens": ("Tokens of prompts that were found in the prefix cache.", now.cached_tokens),
            "prefix_hits": ("Requests that began with a stored prefix.", now.prefix_hits),
            "preemptions": ("Sequences closed for others because their reader lagged behind.", now.preemptions),
            "queue_seconds": ("Seconds in the queue, of requests that were started.", now.queue_seconds),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"penstock:{name}", text, value)
        ends = CounterMetricFamily("penstock:requests", "Engine requests by how they ended.", labels=("end",))
        for end in ("finished", "cancelled", "failed", "refused"):
            ends.add_metric((end,), getattr(now, end))
        yield ends
        gauges = {
            "requests_processing": ("Engine requests that are running.", now.running),
            "requests_deferred": ("Engine requests in the queue.", now.waiting),
            "n_busy_slots_per_decode": ("Tokens per decode step.", now.mean_batch),
            "prompt_tokens_seconds": ("Tokens of prompts per second.", _rate(now.prompt_tokens, now.prompt_seconds)),
            "predicted_tokens_seconds": (
                "Generated tokens per second.",
                _rate(now.generated_tokens, now.decode_seconds),
            ),
            "kv_cache_usage_ratio": ("Share of the pages in use.", _rate(now.pages_used, now.pages_total)),
            "kv_pages_used": ("Pages of keys and values in use.", now.pages_used),
            "kv_pages_total": ("Pages of keys and values that the memory is good for.", now.pages_total),
            "sequence_memory_used_bytes": ("Pages and state in use or promised.", now.memory_used),
            "sequence_memory_total_bytes": ("For sequences and stored prefixes.", now.memory_total),
            "prefix_entries": ("Stored prefixes.", now.prefix_entries),
            "prefix_bytes": ("Of stored prefixes.", now.prefix_bytes),
            "weight_bytes": ("Of the model.", stats.weight_bytes),
            "cache_bytes": ("Allocated for sequences.", stats.cache_bytes),
            "memory_peak_bytes": ("The most memory in use so far.", stats.peak_memory),
            "context_size": ("Positions of a sequence.", llm.max_context),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"penstock:{name}", text, value)
        yield from _experts(stats)


def _experts(stats: Any) -> Iterable[Metric]:
    """Numbers of streamed experts: fields of `LLM.stats()` named expert_..., where there are any."""
    for name, value in sorted(vars(stats).items()):
        if name.startswith("expert_") and isinstance(value, int | float) and not isinstance(value, bool):
            kind = GaugeMetricFamily if name.endswith(("_bytes", "_slots", "_budget", "_rate")) else CounterMetricFamily
            yield kind(f"penstock:{name}", f"Streamed experts: {name.removeprefix('expert_')}.", value)


def _rate(count: float, per: float) -> float:
    return count / per if per > 0 else 0.0
