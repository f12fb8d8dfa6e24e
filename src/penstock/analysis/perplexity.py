"""Perplexity of a model on text, and how far its predictions are from those of a reference model.

Text is cut into windows of equal length, and each is a request that is read from an empty context. Logits never lie in
memory for more than a chunk of a window: 256 rows of a vocabulary of 250 000 tokens are a quarter of a gigabyte. Those
of a reference that cannot be loaded beside the model wait in a file (`StoredLogits`).
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.engine.admission import all_memory
from penstock.engine.engine import Engine
from penstock.engine.execution import most_rows
from penstock.engine.request import Request, Timings, reading_request
from penstock.engine.scheduler import Scheduler
from penstock.errors import BackendError, InvalidArgument
from penstock.machine import usable_threads
from penstock.text.tokenizer import Tokenizer
from penstock.units import amount

_BLOCK = 1 << 20  # bytes of logits that are looked at together: they stay in a core's cache


@dataclass(frozen=True)
class Divergence:
    """Predictions of a model against those of a reference, over the same tokens; `_error` is a standard error.

    kl: the Kullback-Leibler divergence KL(reference ‖ model) of a prediction, in nats. same_top: the share of
    predictions whose likeliest token is the reference's. rms_probability: the root mean square of how much the
    probability of the true token changed.
    """

    perplexity: float  # the reference's
    perplexity_error: float
    ratio: float  # the model's perplexity by the reference's
    ratio_error: float
    kl_mean: float
    kl_error: float
    kl_median: float
    kl_95: float
    kl_99: float
    kl_max: float
    same_top: float
    same_top_error: float
    rms_probability: float


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of windows of text: exp of the mean of −log p over all predicted tokens."""

    perplexity: float
    perplexity_error: float
    predictions: int
    windows: int
    length: int
    seconds: float
    divergence: Divergence | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.predictions / self.seconds if self.seconds else 0.0


def windows(
    tokens: Seq[int], length: int, count: int | None = None, prefix: Seq[int] = (), seed: int | None = None
) -> np.ndarray:
    """Windows of `length` tokens, int32 [n, length]: `prefix` (a BOS), then the text goes on where the last one ended.

    count: how many, all by default; from the start of the text, or drawn from all of them with a seed. The end of the
    text that fills no window is left out. Raises InvalidArgument for a text that is shorter than one window.
    """
    if length < 2 + len(prefix):
        raise InvalidArgument(f"perplexity: a window is {length} tokens, expected at least {2 + len(prefix)}")
    if count is not None and count < 1:
        raise InvalidArgument(f"perplexity: {count} windows are asked for, expected at least 1")
    step = length - len(prefix)
    whole = len(tokens) // step
    if not whole:
        raise InvalidArgument(f"perplexity: the text has {len(tokens)} tokens, expected at least {step} (one window)")
    chosen = np.arange(whole) if seed is None else np.random.default_rng(seed).permutation(whole)
    chosen = chosen[:count]
    rows = np.empty((len(chosen), length), np.int32)
    rows[:, : len(prefix)] = prefix
    rows[:, len(prefix) :] = np.asarray(tokens[: whole * step], np.int32).reshape(whole, step)[chosen]
    return rows


def evaluate(
    engine: Engine,
    rows: np.ndarray,
    reference: Engine | StoredLogits | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Evaluation:
    """Perplexity over the windows `rows` [n, length], and the divergence from `reference` if there is one: a model that
    is there, or what one has left behind.

    In each window all tokens but the first are predicted from those before them. Both models read a window chunk by
    chunk, one after the other. `progress` is called after each window with the number of windows that are done and the
    perplexity so far. Raises InvalidArgument for windows that do not fit the model or models whose vocabularies differ,
    BackendError for logits that are not finite.
    """
    _check(engine, rows, reference)
    engines = [engine, reference] if isinstance(reference, Engine) else [engine]
    step = min(map(most_rows, engines))
    found: list[np.ndarray] = []
    total, start = 0.0, time.perf_counter()
    with ThreadPoolExecutor(usable_threads()) as threads, contextlib.ExitStack() as opened:
        schedulers = [opened.enter_context(_scheduler(each)) for each in engines]
        for number, row in enumerate(rows):
            with contextlib.ExitStack() as stack:
                reading = [_chunks(each, row[:-1], step) for each in schedulers]
                if isinstance(reference, StoredLogits):
                    reading.append(reference.chunks(number, step))
                chunks = [stack.enter_context(contextlib.closing(each)) for each in reading]
                for at, *logits in zip(range(1, len(row), step), *chunks, strict=True):
                    measured = _measured(threads, row[at : at + step], *logits)
                    if not np.isfinite(measured).all():
                        raise BackendError(
                            f"perplexity: logits of window {number} are not finite, expected numbers; "
                            "penstock verify looks for damaged weights"
                        )
                    found.append(measured)
                    total += measured[0].sum()
            if progress is not None:
                progress(number + 1, _exp(total / ((number + 1) * (len(row) - 1))))
    seconds = time.perf_counter() - start + (reference.seconds if isinstance(reference, StoredLogits) else 0.0)
    all_found = np.concatenate(found, axis=1)
    mean, error = _mean(all_found[0])
    perplexity = _exp(mean)
    divergence = None if reference is None else _divergence(all_found)
    return Evaluation(perplexity, perplexity * error, all_found.shape[1], len(rows), rows.shape[1], seconds, divergence)


class StoredLogits:
    """Logits of an engine after all tokens of windows but their last: float32 [n, length − 1, vocab], in a temporary
    file.

    `progress` is called after each window. Raises InvalidArgument for windows that do not fit the model, and with the
    bytes for a file that does not fit the disk.
    """

    def __init__(self, engine: Engine, rows: np.ndarray, progress: Callable[[], None] | None = None) -> None:
        _check(engine, rows, None)
        self.vocab, self.windows, self._per_window = engine.model.config.vocab_size, len(rows), rows.shape[1] - 1
        folder = tempfile.gettempdir()
        need, free = len(rows) * self._per_window * self._row_bytes, shutil.disk_usage(folder).free
        if need > free:
            raise InvalidArgument(
                f"perplexity: {folder}: {amount(free)} are free, and logits of {len(rows)} windows take "
                f"{amount(need)}, expected fewer windows or another TMPDIR"
            )
        start = time.perf_counter()
        self._file = tempfile.TemporaryFile(prefix="penstock-")  # noqa: SIM115 (closed by `__exit__`)
        try:
            with _scheduler(engine) as scheduler:
                for row in rows:
                    for chunk in _chunks(scheduler, row[:-1], most_rows(engine)):
                        self._file.write(np.ascontiguousarray(chunk, np.float32).data)
                    if progress is not None:
                        progress()
        except BaseException:
            self._file.close()
            raise
        self.seconds = time.perf_counter() - start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @property
    def _row_bytes(self) -> int:
        return 4 * self.vocab

    def chunks(self, number: int, step: int) -> Generator[np.ndarray]:
        """Those of a window, at most `step` rows at a time."""
        self._file.seek(number * self._per_window * self._row_bytes)
        for start in range(0, self._per_window, step):
            count = min(step, self._per_window - start)
            yield np.frombuffer(self._file.read(count * self._row_bytes), np.float32).reshape(count, self.vocab)


def _check(engine: Engine, rows: np.ndarray, reference: Engine | StoredLogits | None) -> None:
    if rows.ndim != 2 or not len(rows) or rows.shape[1] < 2:
        raise InvalidArgument(f"perplexity: windows have shape {rows.shape}, expected [n, length] with two tokens each")
    for each in (engine, reference):
        if isinstance(each, Engine) and rows.shape[1] > each.max_context:
            raise InvalidArgument(
                f"perplexity: a window is {rows.shape[1]} tokens, expected at most {each.max_context} (the context)"
            )
    if isinstance(reference, StoredLogits) and reference.windows != len(rows):
        raise InvalidArgument(f"perplexity: logits of {reference.windows} windows are stored, expected {len(rows)}")
    if reference is not None:
        own = engine.model.config.vocab_size
        other = reference.vocab if isinstance(reference, StoredLogits) else reference.model.config.vocab_size
        if own != other:
            raise InvalidArgument(f"perplexity: the reference has {other} tokens in its vocabulary, expected {own}")


class _Model:
    """An engine as a scheduler takes it: for requests that read token ids and draw none."""

    text_tokenizer = None

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def tokenizer(self) -> Tokenizer:
        raise InvalidArgument("tokenizer: windows of token ids have none, expected no text")

    def request(self, prompt: Any, max_tokens: int = 256, stop: str | Seq[str] = (), **options: Any) -> Request:
        return reading_request(self.engine.limits, prompt)

    def add_timings(self, timings: Seq[Timings]) -> None:
        """Nobody counts them."""


def _scheduler(engine: Engine) -> Scheduler:
    """A scheduler for one window at a time."""
    memory = all_memory(engine) if engine.cache_memory is None else engine.cache_memory
    return Scheduler(_Model(engine), max_sequences=1, prefix_cache=False, memory=memory, allocate=False)


def _chunks(scheduler: Scheduler, ids: np.ndarray, step: int) -> Generator[np.ndarray]:
    """Logits after each token of a window, float32 [rows, vocab], at most `step` rows at a time."""
    found: deque[np.ndarray] = deque()
    handle = scheduler.submit(scheduler.request(ids.tolist()), rows=found.append)
    try:
        while not handle.ready:
            handle.poll()
            while found:
                chunk = found.popleft()
                for start in range(0, len(chunk), step):
                    yield chunk[start : start + step]
        handle.result()  # raises what the request has failed with
    finally:
        handle.cancel()


def _measured(threads: ThreadPoolExecutor, targets: np.ndarray, *logits: np.ndarray) -> np.ndarray:
    """Of each row: −log p of its target; with logits of a reference also the reference's, KL, and equal tops (0, 1)."""
    block = max(1, _BLOCK // logits[0][0].nbytes)
    parts = [slice(start, start + block) for start in range(0, len(targets), block)]

    def measure(part: slice) -> np.ndarray:
        chosen = targets[part]
        own = _Softmax(logits[0][part], chosen)
        if len(logits) == 1:
            return own.losses[None]
        other = _Softmax(logits[1][part], chosen)
        return np.stack([own.losses, other.losses, other.divergence(own), own.tops == other.tops])

    return np.concatenate(list(threads.map(measure, parts)), axis=1)


class _Softmax:
    """Rows of logits [n, vocab] as predictions: exponentials in float32, their sums in float64."""

    def __init__(self, logits: np.ndarray, targets: np.ndarray) -> None:
        self.logits = logits
        self.tops = logits.argmax(axis=1)
        rows = np.arange(len(logits))
        with np.errstate(invalid="ignore"):  # infinite logits end as NaN, which the caller refuses
            self._weights = np.exp(logits - logits[rows, self.tops][:, None])
        self._sums = self._weights.sum(axis=1, dtype=np.float64)
        self.log_sums = logits[rows, self.tops] + np.log(self._sums)
        self.losses = self.log_sums - logits[rows, targets]

    def divergence(self, other: _Softmax) -> np.ndarray:
        """Σ p · (log p − log q), p these predictions and q the other's."""
        with np.errstate(invalid="ignore"):
            weighted = self._weights * (self.logits - other.logits)
        shift = weighted.sum(axis=1, dtype=np.float64) / self._sums
        return np.maximum(shift - (self.log_sums - other.log_sums), 0.0)  # below 0 by rounding alone


def _mean(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error, 0 for a single value."""
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return float(values.mean()), spread / math.sqrt(len(values))


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # float64 ends at exp(709)


def _divergence(found: np.ndarray) -> Divergence:
    own, other, kl, same = found
    base, base_error = _mean(other)
    ratio, ratio_error = _mean(own - other)
    kl_mean, kl_error = _mean(kl)
    quantiles: Any = np.quantile(kl, (0.5, 0.95, 0.99, 1.0))
    share, share_error = _mean(same)
    change = np.exp(-own) - np.exp(-other)
    return Divergence(
        perplexity=_exp(base),
        perplexity_error=_exp(base) * base_error,
        ratio=_exp(ratio),
        ratio_error=_exp(ratio) * ratio_error,
        kl_mean=kl_mean,
        kl_error=kl_error,
        kl_median=float(quantiles[0]),
        kl_95=float(quantiles[1]),
        kl_99=float(quantiles[2]),
        kl_max=float(quantiles[3]),
        same_top=share,
        same_top_error=share_error,
        rms_probability=float(np.sqrt(np.mean(change * change))),
    )
