"""/metrics: what the server is doing and has done, in the text format of Prometheus.

Names are llama.cpp's; beside them stand those of vLLM that routers and dashboards read.
"""

from __future__ import annotations

import functools
import platform
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from penstock._version import __version__
from penstock.engine.metrics import SchedulerMetrics
from penstock.engine.replicas import Replicas
from penstock.machine import available_memory
from penstock.server.model_info import info_of
from penstock.server.service import Service
from penstock.server.static import FILES

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
        """A request was answered. All files of the page count as the page, and unknown paths together: a client must
        not be able to make up names.
        """
        known = "/" if path in FILES else path
        self._requests[known if known in self._paths else "other", status] += 1

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
        about = {"version": __version__, "python": platform.python_version()}
        yield _labelled(GaugeMetricFamily, "penstock:build_info", "1, what runs is in the labels.", about, 1)
        yield GaugeMetricFamily("penstock:up_seconds", "Since the server started.", time.time() - self._started)
        yield GaugeMetricFamily("penstock:load_progress", "Of the model, 1 when it is ready.", self._service.progress)
        yield GaugeMetricFamily(
            "penstock:memory_available_bytes", "That this process may still take.", available_memory()
        )
        loaded = self._service.loaded
        if loaded is None:
            return
        llm, scheduler = loaded
        yield _labelled(
            GaugeMetricFamily, "penstock:model_info", "1, the model is in the labels.", self._model_labels, 1
        )
        now, stats = scheduler.metrics(), llm.stats()
        counters = {
            "prompt_tokens": ("Tokens of prompts that were computed.", now.prompt_tokens),
            "prompt_seconds": ("Seconds in prompts.", now.prompt_seconds),
            "tokens_predicted": ("Tokens that were generated.", now.generated_tokens),
            "tokens_predicted_seconds": ("Seconds in decode steps.", now.decode_seconds),
            "n_decode": ("Decode steps.", now.decode_steps),
            "draft_tokens": ("Drafts that were verified.", now.draft_tokens),
            "draft_tokens_accepted": ("Drafts that were accepted, of requests that have ended.", now.accepted_tokens),
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
        if self._service.replicas is not None:
            yield from _replicas(self._service.replicas)
        yield from _as_vllm(self._service, now)
        for prefix in ("penstock", "vllm"):
            yield from _latencies(self._service, prefix)

    @functools.cached_property
    def _model_labels(self) -> dict[str, str]:
        """Of the loaded model; its sizes are found by a walk through the weights, so only once."""
        loaded = self._service.loaded
        assert loaded is not None
        info = info_of(loaded[0])
        return {
            "model_name": self._service.name,
            "quantization": info.quantization or "none",
            "device": info.device,
            "parameters": str(info.parameters),
        }


def _experts(stats: Any) -> Iterable[Metric]:
    """Numbers of streamed experts: fields of `LLM.stats()` named expert_..., where there are any."""
    for name, value in sorted(vars(stats).items()):
        if name.startswith("expert_") and isinstance(value, int | float) and not isinstance(value, bool):
            kind = GaugeMetricFamily if name.endswith(("_bytes", "_slots", "_budget", "_rate")) else CounterMetricFamily
            yield kind(f"penstock:{name}", f"Streamed experts: {name.removeprefix('expert_')}.", value)


def _replicas(replicas: Replicas) -> Iterable[Metric]:
    """The numbers of each replica that its choice depends on, or that show how it went."""
    each = [scheduler.metrics() for scheduler in replicas.schedulers]
    available, chosen = replicas.available, replicas.chosen
    gauges: dict[str, tuple[str, list[float]]] = {
        "ready": ("Whether it takes requests.", [n in available for n in range(len(each))]),
        "requests_processing": ("Engine requests that are running.", [one.running for one in each]),
        "requests_deferred": ("Engine requests in the queue.", [one.waiting for one in each]),
        "kv_cache_usage_ratio": ("Share of the pages.", [_rate(one.pages_used, one.pages_total) for one in each]),
    }
    counters: dict[str, tuple[str, list[float]]] = {
        "tokens_predicted": ("Tokens that were generated.", [one.generated_tokens for one in each]),
        "prompt_tokens": ("Tokens of prompts that were computed.", [one.prompt_tokens for one in each]),
        "cached_tokens": ("Tokens of prompts from the prefix cache.", [one.cached_tokens for one in each]),
    }
    for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (text, values) in families.items():
            family = kind(f"penstock:replica_{name}", text, labels=("replica",))
            for number, value in enumerate(values):
                family.add_metric((str(number),), value)
            yield family
    requests = CounterMetricFamily("penstock:replica_requests", "Sent there, by why.", labels=("replica", "choice"))
    for number in range(len(each)):
        for choice, by_prefix in (("prefix", True), ("load", False)):
            requests.add_metric((str(number), choice), chosen[number, by_prefix])
    yield requests


def _as_vllm(service: Service, now: SchedulerMetrics) -> Iterable[Metric]:
    """What routers and dashboards for vLLM read; of all replicas together."""
    looked_up = now.prompt_tokens + now.cached_tokens if service.options.prefix_cache else 0
    families: list[tuple[Any, str, str, float]] = [
        (GaugeMetricFamily, "num_requests_running", "Requests that are running.", now.running),
        (GaugeMetricFamily, "num_requests_waiting", "Requests in the queue.", now.waiting),
        (GaugeMetricFamily, "kv_cache_usage_perc", "Of 1.", _rate(now.pages_used, now.pages_total)),
        (CounterMetricFamily, "prompt_tokens", "Tokens of prompts that were computed.", now.prompt_tokens),
        (CounterMetricFamily, "generation_tokens", "Tokens that were generated.", now.generated_tokens),
        (CounterMetricFamily, "prefix_cache_queries", "Tokens of prompts that were looked up.", looked_up),
        (CounterMetricFamily, "prefix_cache_hits", "Tokens of prompts that were found.", now.cached_tokens),
    ]
    for kind, name, text, value in families:
        yield _labelled(kind, f"vllm:{name}", text, {"model_name": service.name}, value)


def _latencies(service: Service, prefix: str) -> Iterable[Metric]:
    """How long requests took: the same histograms under both prefixes."""
    found = service.latencies
    for name, text, histogram in (
        ("time_to_first_token_seconds", "From submission.", found.first_token),
        ("inter_token_latency_seconds", "Mean gap of a request, once for each of its gaps.", found.inter_token),
        ("e2e_request_latency_seconds", "From submission to the last token.", found.whole),
        ("request_queue_time_seconds", "Before the prompt was begun.", found.queue),
    ):
        made = HistogramMetricFamily(f"{prefix}:{name}", text, labels=("model_name",))
        made.add_metric((service.name,), histogram.buckets(), histogram.sum)
        yield made


def _labelled(kind: Any, name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    """A family with one sample."""
    family = kind(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def _rate(count: float, per: float) -> float:
    return count / per if per > 0 else 0.0
