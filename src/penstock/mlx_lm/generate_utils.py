"""What a batch has done, as mlx-lm counts it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchCounters", "BatchStats"]


@dataclass(kw_only=True)
class BatchCounters:
    """Tokens, seconds and steps of the two phases."""

    prompt_tokens: int = 0
    prompt_time: float = 0.0
    generation_tokens: int = 0
    generation_steps: int = 0
    decode_time: float = 0.0

    @property
    def prompt_tps(self) -> float:
        return self.prompt_tokens / self.prompt_time if self.prompt_time > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second of steps alone."""
        return self.generation_tokens / self.decode_time if self.decode_time > 0 else 0.0


@dataclass(kw_only=True)
class BatchStats(BatchCounters):
    """What was done in `wall_time` seconds; peak_memory in GB."""

    wall_time: float = 0.0
    peak_memory: float = 0.0

    @property
    def generation_time(self) -> float:
        """Seconds without those of prompts."""
        return max(0.0, self.wall_time - self.prompt_time)

    @property
    def generation_tps(self) -> float:
        return self.generation_tokens / self.generation_time if self.generation_time > 0 else 0.0

    @property
    def overhead_time(self) -> float:
        """Seconds in neither phase."""
        return max(0.0, self.wall_time - self.prompt_time - self.decode_time)

    def __iadd__(self, other: BatchStats) -> BatchStats:
        for name in (
            "prompt_tokens",
            "prompt_time",
            "generation_tokens",
            "generation_steps",
            "decode_time",
            "wall_time",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.peak_memory = max(self.peak_memory, other.peak_memory)
        return self
