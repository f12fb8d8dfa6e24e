"""How many drafts the answers of a step get, where a device makes and accepts them by itself: as many as make tokens
come soonest, by what steps of so many answers and drafts take and by how often drafts were accepted; none if that is
best. Then some are tried now and then, ever more rarely while they do not pay. Another number than before has to bring
more by a factor of `GAIN`: what is known of both has errors of a few percent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.engine.speculate import GAIN, PROBE, Speculation, StepCosts

DRAFTED = (1, 2, 3, 7)  # of a sequence in a step
MOST_ANSWERS = 32
_SIZES = (1, 2, 4, 8, 16, MOST_ANSWERS)  # of answers, up to which steps are known apart
_TRY = 4  # steps: the first has no drafts yet
_RARELY = 16 * PROBE * _TRY
_FEW = 2  # first drafts seen up to which no more than the least number is taken: texts that drafts miss show soon
_OLD = 0.7  # what was known of drafts counts so much when some are tried again: a try is few steps


class DraftGate:
    """measured: seconds of a step of so many answers by the drafts of each, as far as they were measured ahead."""

    def __init__(self, measured: Callable[[int], Mapping[int, float]] = lambda answers: {}) -> None:
        self._measured = measured
        self._costs: dict[int, StepCosts] = {}
        self._drafts = 0  # that seemed best for the last step
        self._plain = 0  # steps without since then
        self._every = PROBE * _TRY  # of them until some are tried
        self._trying = 0  # steps of a try that are left

    def may_draft(self, answers: Sequence[Speculation]) -> bool:
        """Whether the next step of these answers may have drafts: it is known what one without them takes."""
        if len(answers) > MOST_ANSWERS:
            return False
        return any(one.fixed for one in answers) or self._seconds(len(answers), 0) is not None

    def drafts(self, answers: Sequence[Speculation], sizes: Sequence[int] = DRAFTED) -> int:
        """Of each of these answers in the next step; sizes: numbers to choose from, beside 0."""
        if len(answers) > MOST_ANSWERS:
            return 0
        most = min(one.most for one in answers)
        if any(one.fixed for one in answers):
            return most
        plain = self._seconds(len(answers), 0)
        self._drafts, nearest = (0, 0) if plain is None else self._best(answers, plain, [n for n in sizes if n <= most])
        if self._drafts:
            self._plain, self._every, self._trying = 0, PROBE * _TRY, 0
            return self._drafts
        if self._trying:
            self._trying -= 1
            return nearest
        self._plain += 1
        if self._plain >= self._every:
            self._plain, self._every, self._trying = 0, min(2 * self._every, _RARELY), _TRY
            own = [one.acceptance for one in answers]
            for known in {*own, *(one.others for one in own)} - {None}:
                known.fade(answers[0].kind, _OLD)
        return 0

    def _best(self, answers: Sequence[Speculation], plain: float, sizes: list[int]) -> tuple[int, int]:
        """How many drafts make tokens come soonest, 0 if none do; and which number of them comes nearest to it. plain:
        seconds of a step without.
        """
        if self._measured(answers_of_size(len(answers))):  # others would be captured while requests wait
            sizes = [size for size in sizes if self._seconds(len(answers), size) is not None]
        if all(one.acceptance.seen(one.kind) <= _FEW for one in answers):
            sizes = sizes[:1]
        if not sizes:
            return 0, 0
        gains = [0.0] * sizes[-1]
        for one in answers:
            for place, chance in enumerate(one.acceptance.chances(one.kind, sizes[-1])):
                gains[place] += chance
        best, rate = 0, self._favoured(0) * len(answers) / plain
        least = plain  # what a step of more drafts takes at the least
        nearest, near = 1, 0.0
        for size in sizes:
            tokens = len(answers) + sum(gains[:size])
            seconds = self._seconds(len(answers), size)
            if seconds is None:
                if tokens / least > rate:  # it may pay: it is taken until what it takes is known
                    return size, size
                continue
            least = max(least, seconds)
            found = tokens / seconds
            if found > near:
                nearest, near = size, found
            if found * self._favoured(size) > rate:
                best, rate = size, found * self._favoured(size)
        return best, nearest

    def _favoured(self, drafts: int) -> float:
        """By what the tokens per second of so many drafts count more than those of others."""
        return GAIN if drafts == self._drafts else 1.0

    def record(self, answers: int, drafts: int, seconds: float | None) -> None:
        """A step of answers alone, with so many drafts of each, took so long; None: something was captured in it."""
        if 0 < answers <= MOST_ANSWERS:
            self._costs_of(answers).record(1 + drafts, seconds)

    def _seconds(self, answers: int, drafts: int) -> float | None:
        """Of a step of so many answers with so many drafts of each, None if that is not known. What was measured ahead
        counts until some were met, in proportion to those that were: a replay right behind another takes less.
        """
        costs, measured = self._costs_of(answers), self._measured(answers_of_size(answers))
        if costs.settled(1 + drafts):
            return costs(1 + drafts)
        if drafts not in measured:
            return None
        met = [costs(1 + one) / seconds for one, seconds in measured.items() if costs.settled(1 + one)]
        return measured[drafts] * min(met, default=1.0)

    def _costs_of(self, answers: int) -> StepCosts:
        """Of a number of answers, by 1 + the drafts of each."""
        return self._costs.setdefault(answers_of_size(answers), StepCosts())


def answers_of_size(answers: int) -> int:
    """The most answers of steps that are known together with those of so many."""
    return next(size for size in _SIZES if size >= answers)
