"""Drafts of the next tokens, and how many of them a step verifies.

A step may append drafts behind the last token of an answer. The trunk's own token is drawn after each of them, and a
draft counts exactly if it is that token: the text is what it would be without drafts. What is drafted, and how many,
decides about time alone.

The gate compares what steps take (the lower quartile of the latest by their number of tokens) with what drafts bring
(moving averages of how often they were accepted, by request and by what they come from), and takes as many as make
tokens come soonest, none where that is best: a model's until they seem to lose a few percent, then until they seem to
gain as much. Where it takes none it tries some in one step of `PROBE`, and the other way around.
"""

from __future__ import annotations

import itertools
import numbers
import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from penstock.errors import DTypeError, InvalidArgument
from penstock.ops.drafts import made_up

MOST_DRAFTS = 7  # of a sequence in a step, which then has eight tokens of it
COPIED_TOKENS = 7  # of a run behind a copy of recurrent states: more are computed in chunks, with other bits
SPECULATE = ("off", "auto", "mtp", "ngram", "draft")
PROBE = 64  # steps, of which one may try what is not expected to be best
_RARELY = 16 * PROBE  # where drafts did not pay time after time
_REST = 7  # steps between two looks at whether a model's drafts pay

_BITS = 21  # of a token id in a key
_SHORT, _LONG = 2, 4  # tokens of the ends of a text that are looked up
_END = -1  # between texts
_RECENT = 1 << 16  # tokens of answers that are remembered, at the least
_SEEN = 32  # tokens up to which a match is measured
GAIN = 1.04  # what drafts, or another number of them, have to bring at the least, as a factor
_KEEP = 0.98  # and those of a model until they did not: how many are accepted is known to a few percent


def check_speculate(where: str, kind: object, drafts: object = None) -> int | None:
    """The number of drafts, None if it is not given. Raises InvalidArgument or DTypeError for what `speculate` and
    `num_draft_tokens` cannot be.
    """
    if kind is not None and (not isinstance(kind, str) or kind not in SPECULATE):
        raise InvalidArgument(f"{where}: speculate is {kind!r:.60}, expected one of {', '.join(SPECULATE)}")
    if drafts is None:
        return None
    if isinstance(drafts, bool) or not isinstance(drafts, numbers.Integral):
        raise DTypeError(f"{where}: num_draft_tokens is {drafts!r:.60}, expected an integer")
    count = int(drafts)
    if not 1 <= count <= MOST_DRAFTS:
        raise InvalidArgument(
            f"{where}: num_draft_tokens is {count}, expected 1 to {MOST_DRAFTS}: a step verifies no more of a sequence"
        )
    return count


# -- what was written before -----------------------------------------------------------------------------------------


class TokenIndex:
    """Texts of token ids, and where their last tokens have stood before."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._run = 0  # tokens of the last text
        self._key = 0  # its last tokens
        self._behind: dict[int, int] = {}  # where the token behind these two stood last
        self._behind_long: dict[int, int] = {}  # and behind these four

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with the last text."""
        key, run, at = self._key, self._run, len(self.tokens)
        for token in tokens:
            if run >= _SHORT:
                self._behind[key & _SHORT_KEY] = at
            if run >= _LONG:
                self._behind_long[key] = at
            key = (key << _BITS | token) & _LONG_KEY
            self.tokens.append(token)
            at, run = at + 1, run + 1
        self._key, self._run = key, run

    def end(self) -> None:
        """The next token begins another text."""
        if self._run:
            self.tokens.append(_END)
        self._run = 0

    def find(self, text: TokenIndex, least: int = _SHORT) -> tuple[int, int]:
        """Where what follows the end of `text` (this index or another) may stand here, and how many tokens before it
        are the same; (0, 0): nowhere.
        """
        at = self._behind_long.get(text._key) if text._run >= _LONG else None
        if at is None and least <= _SHORT <= text._run:
            at = self._behind.get(text._key & _SHORT_KEY)
        if at is None:
            return 0, 0
        most, same = min(_SEEN, at, text._run), 0
        while same < most and self.tokens[at - 1 - same] == text.tokens[-1 - same]:
            same += 1
        return at, same

    def following(self, at: int, most: int) -> list[int]:
        """Up to `most` tokens of a text from `at` on; behind the last one of all it goes on as they do."""
        found = self.tokens[at : at + most]
        if _END in found:
            return found[: found.index(_END)]
        while found and len(found) < most:
            found.append(found[at + len(found) - len(self.tokens)])
        return found


_SHORT_KEY, _LONG_KEY = (1 << _SHORT * _BITS) - 1, (1 << _LONG * _BITS) - 1


class RecentAnswers:
    """Answers of all requests, the latest of them."""

    def __init__(self) -> None:
        self._index, self._next = TokenIndex(), TokenIndex()

    def add(self, tokens: Sequence[int]) -> None:
        """An answer has ended."""
        for index in (self._index, self._next):
            index.extend(tokens)
            index.end()
        if len(self._index.tokens) >= 2 * _RECENT:
            self._index, self._next = self._next, TokenIndex()
        elif len(self._index.tokens) < _RECENT:
            self._next = TokenIndex()

    def find(self, text: TokenIndex) -> tuple[list[int], int]:
        """What followed the end of the text in one of them, and how many tokens before that are the same."""
        at, same = self._index.find(text, _LONG)
        return self._index.following(at, MOST_DRAFTS) if same else [], same


# -- what is known of drafts and steps -------------------------------------------------------------------------------

Group: TypeAlias = str
"""Where drafts come from: they are accepted about as often as each other."""


class _Memory(NamedTuple):
    """How long what is known counts."""

    kept: float  # of what is known of a place, behind another draft there
    faded: float  # and behind fewer drafts
    others: int  # drafts for which counts what others have seen
    usual: int  # and what is usual


# drafts of n-grams that are not taken are seen, too: those that seem bad by chance do not stay so
_OF_NGRAMS, _OF_MODELS = _Memory(0.95, 1.0, 2, 2), _Memory(0.98, 0.995, 16, 8)
_EXPECTED: dict[Group, float] = {"ngram 2": 0.3, "ngram 4": 0.6, "ngram 8": 0.85, "mtp": 0.8, "draft": 0.6}


class Acceptance:
    """How often the draft at each place is accepted if those before it are: moving averages, at first those of
    `others`, or what is usual.

    Of a model's three drafts of which the first n are accepted with 0.85, 0.64 and 0.41, twenty steps tell the tokens
    of a step to 9 % and fifty to 5 %. Where drafts are worth 1.2 a few unlucky steps would end them, and then nothing
    is learned. What is known of places that have no drafts fades, so that more drafts are tried again.
    """

    def __init__(self, others: Acceptance | None = None) -> None:
        self.others = others
        self._tries: dict[Group, list[float]] = {}
        self._hits: dict[Group, list[float]] = {}

    def chance(self, group: Group, place: int) -> float:
        """Of the draft at a place, if those before it are accepted."""
        return self._each(group, place + 1)[place]

    def _each(self, group: Group, count: int) -> list[float]:
        """The chance at each place; what is usual at a later one is that of the one before it."""
        (tries, hits), memory = self._counts(group), _memory(group)
        if self.others is not None:
            before = self.others._each(group, count)
            return [(hits[n] + memory.others * before[n]) / (tries[n] + memory.others) for n in range(count)]
        found, last = [], _EXPECTED[group]
        for n in range(count):
            last = (hits[n] + memory.usual * last) / (tries[n] + memory.usual)
            found.append(last)
        return found

    def chances(self, group: Group, count: int) -> list[float]:
        """That the first one is accepted, the first two, …"""
        return list(itertools.accumulate(self._each(group, count), operator.mul))

    def seen(self, group: Group) -> float:
        """By how many first drafts it is known, its own or those of others."""
        return max(self._counts(group)[0][0], 0.0 if self.others is None else self.others.seen(group))

    def record(self, group: Group, drafts: int, accepted: int) -> None:
        """So many of the drafts were accepted: those behind the first wrong one say nothing."""
        (tries, hits), memory = self._counts(group), _memory(group)
        for place in range(min(drafts, accepted + 1)):
            tries[place] = memory.kept * tries[place] + 1
            hits[place] = memory.kept * hits[place] + (place < accepted)
        self.fade(group, memory.faded, drafts)
        if self.others is not None:
            self.others.record(group, drafts, accepted)

    def fade(self, group: Group, share: float, first: int = 0) -> None:
        """What is known of places from `first` on counts less by a factor: it is old."""
        for counts in self._counts(group):
            counts[first:] = [share * count for count in counts[first:]]

    def _counts(self, group: Group) -> tuple[list[float], list[float]]:
        if group not in self._tries:
            self._tries[group], self._hits[group] = [0.0] * MOST_DRAFTS, [0.0] * MOST_DRAFTS
        return self._tries[group], self._hits[group]


def _memory(group: Group) -> _Memory:
    return _OF_NGRAMS if group.startswith("ngram") else _OF_MODELS


class StepCosts:
    """Seconds of steps of answers by their tokens: the lower quartile of the latest, between them straight lines.

    Not their mean: what interrupts steps falls on few of them, and on those of one size by chance.

    shared: with other programs, as a CPU is. They make all steps slower for a while, and sizes are met at different
    times: seconds count divided by the pace, which is what the last few steps of any size took as a factor of what is
    known of theirs. Where nothing else runs that would mix up sizes that are met often with those that are not.
    """

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.pace = 1.0
        self._factors: deque[float] = deque([1.0], maxlen=_PACED)
        self._latest: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        self._met: Counter[int] = Counter()

    def record(self, tokens: int, seconds: float | None) -> None:
        """The first steps of a size do not count: it is bound in one, and kernels may be loaded in the next. Nor do
        those without seconds, in which something was captured.
        """
        if seconds is None:
            self._met[tokens] = max(self._met[tokens], min(self._met[tokens] + 1, _UNCOUNTED))
            return
        self._met[tokens] += 1
        if self._met[tokens] <= _UNCOUNTED:
            return
        latest = self._latest_of(tokens)
        latest.append(seconds / self.pace)
        if not self.shared or len(latest) < _EACH or self._met[tokens] % _EACH == 0:
            self._seconds[tokens] = lower_quartile(latest)
        if self.shared:
            self._factors.append(seconds / self._seconds[tokens])
            self.pace = lower_quartile(self._factors)

    def _latest_of(self, tokens: int) -> deque[float]:
        return self._latest.setdefault(tokens, deque(maxlen=_LATEST_SHARED if self.shared else _LATEST))

    def known(self, tokens: int) -> bool:
        return tokens in self._seconds

    def settled(self, tokens: int) -> bool:
        """Whether enough steps of a size were met that one which had to wait does not count."""
        return self._met[tokens] >= _SETTLED

    def __call__(self, tokens: int) -> float:
        known = self._seconds
        if not known:
            return 1.0 + _ROW * (tokens - 1)
        if tokens in known:  # on a shared processor fewer tokens may seem to take longer than more
            return min(seconds for n, seconds in known.items() if n >= tokens) if self.shared else known[tokens]
        below = max((n for n in known if n < tokens), default=None)
        above = min((n for n in known if n > tokens), default=None)
        if below is not None and above is not None:
            share = (tokens - below) / (above - below)
            return self(below) + share * (self(above) - self(below))
        if self.shared and below is not None and below > 1:
            return known[below] * (1 + _MORE * (tokens - below))
        near = below if below is not None else above
        assert near is not None
        return known[near] * (1 + _ROW * (tokens - 1)) / (1 + _ROW * (near - 1))


def lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


_LATEST, _LATEST_SHARED = 16, 64  # steps of a size: more than other programs make slower at a time
_PACED = 12  # steps by which the pace is known
_EACH = 8  # of them between two looks at what they take
_UNCOUNTED, _SETTLED = 2, 5  # of the first ones, and so many that what they took is known well
_MORE = 0.1  # what a token costs more behind the most that were met, as a share of their step
_ROW = 0.25  # what a token of a step costs more than none, as a share of a step of one, before any was measured


Draft: TypeAlias = Callable[[dict[int, int]], dict[int, list[int]]]
"""Tokens that a model drafts, by the number of an answer and how many are wanted for it."""


@dataclass
class Proposal:
    """Drafts for one request: where they come from, and the tokens where these are known before how many are taken."""

    group: Group
    chances: list[float]  # that the first is accepted, the first two, …
    tokens: list[int]


def choose(
    chances: Sequence[Sequence[float]], cost: StepCosts, room: int, each: float = 0.0, least: float = GAIN
) -> list[int]:
    """How many drafts to take of each answer, of which the first n are accepted with chances[i][n − 1].

    room: tokens of the step beside one of each answer. each: seconds that drafting takes, for as many as the answer
    with the most has. The most likely ones first, as many as make the most tokens in a second, and more than none do
    by the factor `least`.
    """
    ranked = sorted(((-chance, place, i) for i, own in enumerate(chances) for place, chance in enumerate(own)))[:room]
    answers = len(chances)
    best, rate, gain, longest = 0, least * answers / cost(answers), float(answers), 0
    for taken, (chance, place, _) in enumerate(ranked, 1):
        gain, longest = gain - chance, max(longest, place + 1)
        found = gain / (cost(answers + taken) + each * longest)
        if found > rate:
            best, rate = taken, found
    counts = [0] * answers
    for _, _, i in ranked[:best]:
        counts[i] += 1
    return counts


def accepts(acceptance: Sequence[float], place: int, seed: int, position: int) -> bool:
    """Whether a draft counts by a made-up acceptance."""
    if place >= len(acceptance):
        return False
    return made_up(seed, position, acceptance[place])


# -- of one request --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Speculation:
    """What a request drafts with, and how that has gone.

    kind: of `SPECULATE`, but neither "off" nor "auto". most: drafts of a step.
    """

    kind: str
    most: int
    acceptance: Acceptance
    fixed: bool = False  # every step has as many drafts as it can
    pays: bool = True  # a model's drafts did not seem to be slower than none yet, or brought `GAIN` since
    text: TokenIndex = field(default_factory=TokenIndex)
    tokens: list[int] = field(default_factory=list)  # of the same text, for a second model
    _watched: tuple[Group, list[int]] | None = None  # drafts that were not taken
    _met: int = 0  # how many of them have come true

    @property
    def by_model(self) -> bool:
        """Whether a model drafts, so that the drafts are not known before they are wanted."""
        return self.kind != "ngram"

    @property
    def least(self) -> float:
        """What drafts have to bring to be taken. A model's are seen where they are taken alone: what is known of those
        that are not, for being a little unlucky, would stay as it is.
        """
        return _KEEP if self.by_model and self.pays else GAIN

    def extend(self, tokens: Iterable[int]) -> None:
        """Tokens that have come, of the prompt or of the answer. Drafts that were not taken tell as much as others."""
        if self.kind == "draft":
            self.tokens.extend(tokens)
        if self.by_model:
            return
        tokens = list(tokens)
        self.text.extend(tokens)
        for token in tokens:
            if self._watched is None:
                break
            group, drafts = self._watched
            same = drafts[self._met] == token
            self._met += same
            if not same or self._met == len(drafts):
                self.acceptance.record(group, len(drafts), self._met)
                self._watched = None

    def watch(self, proposal: Proposal) -> None:
        """These drafts are not taken."""
        if self._watched is None and proposal.tokens:
            self._watched, self._met = (proposal.group, proposal.tokens), 0

    def forget(self) -> None:
        """Drafts are taken: those that were not are no longer looked at."""
        self._watched = None

    def proposal(self, recent: RecentAnswers, most: int) -> Proposal | None:
        """What may be drafted, with the tokens where they are known already."""
        if not self.by_model:
            return self.ngram(recent, most)
        return Proposal(self.kind, self.acceptance.chances(self.kind, most), [])

    def ngram(self, recent: RecentAnswers, most: int) -> Proposal | None:
        """What followed the end of the text where it stood before: in the text itself, or in a recent answer."""
        at, same = self.text.find(self.text)
        tokens = self.text.following(at, most) if same else []
        if same < 2 * _LONG:
            others, longer = recent.find(self.text)
            if longer > same:
                tokens, same = others[:most], longer
        if not tokens:
            return None
        group = "ngram 8" if same >= 2 * _LONG else "ngram 4" if same >= _LONG else "ngram 2"
        return Proposal(group, self.acceptance.chances(group, len(tokens)), tokens)


class Speculator:
    """What all requests of a scheduler have in common: recent answers, how drafts fare, and what steps take.

    clock: of seconds that drafting takes, the same as of steps. Where this thread computes it is that of the thread:
    other programs on the processor make steps of one size longer than those of another by chance. shared: see
    `StepCosts`.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time, shared: bool = True) -> None:
        self._clock = clock
        self.recent = RecentAnswers()
        self.acceptance = Acceptance()
        self.costs = StepCosts(shared)
        self.seconds_each = 0.0  # of a model, for one draft of all answers: the lower quartile of the latest
        self.drafting = 0.0  # seconds of the drafts of this step, which are no part of what it takes
        self._each: deque[float] = deque(maxlen=_LATEST_SHARED if shared else _LATEST)
        self._timed = False  # its programs have been made
        self._same = 0  # steps since it last took drafts, or took none, as a try
        self._every = PROBE  # steps to the next try
        self._rest = 0  # steps in which a model's drafts, which did not pay just now, are not thought of

    def speculation(self, kind: str, most: int, fixed: bool = False) -> Speculation:
        return Speculation(kind, most, Acceptance(self.acceptance), fixed)

    def wants(self, speculation: Speculation) -> bool:
        """Whether one answer alone would take drafts behind what is known of it, or is to try some."""
        if speculation.fixed or self._same + 1 >= self._every:
            return True
        proposal = speculation.proposal(self.recent, speculation.most)
        if proposal is None:
            return False
        each = 0.0 if proposal.tokens else self.seconds_each
        return choose([proposal.chances], self.costs, MOST_DRAFTS, each, speculation.least)[0] > 0

    def rests(self, answers: Sequence[Speculation | None]) -> bool:
        """Whether the next step of these answers has no drafts, since those of a model did not pay just now. Asked once
        for each step, before `drafts`.
        """
        if not self._rest or any(one is not None and (one.fixed or not one.by_model) for one in answers):
            return False
        self._rest -= 1
        self._same += 1
        return True

    def drafts(
        self, answers: Sequence[tuple[Speculation | None, int]], room: int, draft: Draft
    ) -> list[Proposal | None]:
        """Drafts for each answer of a step, of which it may take so many; room: for all of them together.

        draft: gives the drafts of a model, for answers by number and how many of them are wanted.
        """
        found: list[Proposal | None] = []
        for speculation, most in answers:
            most = 0 if speculation is None else min(most, speculation.most)
            found.append(None if speculation is None or most < 1 else speculation.proposal(self.recent, most))
        if not any(found):
            return found
        models = [n for n, one in enumerate(found) if one is not None and not one.tokens]
        each = self.seconds_each if models else 0.0
        asking = [one for (one, _), own in zip(answers, found, strict=True) if one is not None and own is not None]
        least = max(one.least for one in asking)
        counts = choose([[] if one is None else one.chances for one in found], self.costs, room, each, least)
        if self.costs.known(len(answers)):
            for one in asking:
                one.pays = any(counts)
        else:  # what a step without a head's drafts takes is measured first
            heads = [one is not None and one.group == "mtp" for one in found]
            counts = [0 if head else count for head, count in zip(heads, counts, strict=True)]
        counts = self._tried(counts, found, room)
        self._rest = (
            0 if any(counts) or not self.costs.known(len(answers)) else min(_REST, self._every - self._same - 1)
        )
        for n, (speculation, _) in enumerate(answers):
            proposal = found[n]
            if speculation is not None and speculation.fixed and proposal is not None:
                counts[n] = len(proposal.chances)
        for n, (proposal, (speculation, _)) in enumerate(zip(found, answers, strict=True)):
            if proposal is None or speculation is None:
                continue
            if not counts[n]:
                speculation.watch(proposal)
                found[n] = None
            elif proposal.tokens:
                speculation.forget()
                proposal.tokens = proposal.tokens[: counts[n]]
        wanted = {n: counts[n] for n in models if counts[n]}
        if wanted:
            self._draft(wanted, found, draft)
        return found

    def leave_untimed(self) -> None:
        """The drafts that are being made take longer than others do: what they take does not count."""
        self._timed = False

    def _draft(self, wanted: dict[int, int], found: list[Proposal | None], draft: Draft) -> None:
        begin = self._clock()
        for n, tokens in draft(wanted).items():
            proposal = found[n]
            assert proposal is not None
            proposal.tokens = tokens
            if not tokens:
                found[n] = None
        seconds = self._clock() - begin
        self.drafting += seconds
        each = seconds / max(wanted.values())
        if self._timed:
            self._each.append(each / self.costs.pace)
            # each size of a head's steps is bound when it is first met: of a few the least counts
            self.seconds_each = lower_quartile(self._each) if len(self._each) >= _SETTLED else min(self._each)
        self._timed = True

    def _tried(self, counts: list[int], found: Sequence[Proposal | None], room: int) -> list[int]:
        """The counts, or in one step of `PROBE` others, so that what is known of costs does not grow old; where drafts
        did not pay, ever more rarely: a head has to read all that it has not seen before it drafts.
        """
        self._same += 1
        if any(counts):
            self._every = max(PROBE, self._every // 2)
        if self._same < self._every:
            return counts
        self._same = 0
        if any(counts):
            return [0] * len(counts)
        self._every = min(2 * self._every, _RARELY)
        likely = max((n for n, one in enumerate(found) if one is not None), key=lambda n: found[n].chances[0])  # type: ignore[union-attr]
        return [min(2, room, len(one.chances)) if n == likely and one is not None else 0 for n, one in enumerate(found)]
