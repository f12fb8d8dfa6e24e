"""Stop strings: against str.find on the whole text for any way to cut it, and what is refused."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import DTypeError, InvalidArgument
from penstock.text.stop import StopStrings


def run(stops, pieces):
    """What comes out, piece by piece, and the stop string met."""
    filter_ = StopStrings(stops)
    out = [filter_.add(piece) for piece in pieces]
    return [*out, filter_.finish()], filter_.stopped


def expected(stops, text):
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    at, _, stop = min(found)
    return text[:at], stop


@settings(max_examples=400)
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("abc", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=12),
)
def test_stop_strings_do_what_find_does_for_any_cut(stops, text, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    out, stopped = run(stops, pieces)
    assert ("".join(out), stopped) == expected(stops, text)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), text=st.text("abx", max_size=20))
def test_stop_strings_hold_back_only_what_may_begin_one(stops, text):
    filter_, seen, out = StopStrings(stops), "", ""
    for letter in text:
        seen += letter
        out += filter_.add(letter)
        if filter_.stopped is not None:
            return
        held = seen[len(out) :]
        assert any(stop.startswith(held[: len(stop)]) for stop in stops) if held else True
        longest = max((n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
        assert len(held) >= longest


@pytest.mark.parametrize(
    "stops, pieces, out, stopped",
    [
        ((), ["a", "", "b"], ["a", "", "b", ""], None),
        (None, ["a"], ["a", ""], None),
        ("END", ["the E", "N", "D more", "x"], ["the ", "", "", "", ""], "END"),
        ("END", ["the E", "N", "Ex"], ["the ", "", "ENEx", ""], None),
        ("END", ["the EN"], ["the ", "EN"], None),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", "", ""], "\n\n"),
        (["ab", "abc"], ["abc"], ["", ""], "ab"),
        (["abcd", "c"], ["abc", "d"], ["", "", ""], "abcd"),
        (["abcd", "c"], ["abc", "x"], ["", "ab", ""], "c"),
        (["abcd", "c"], ["abc"], ["", "ab"], "c"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], "aab"),
        (["é😀"], ["xé", "😀"], ["x", "", ""], "é😀"),
        ("x", [], [""], None),
    ],
)
def test_stop_strings_by_hand(stops, pieces, out, stopped):
    assert run(stops, pieces) == (out, stopped)


def test_stop_strings_do_not_wait_for_a_longer_one_at_the_same_place():
    filter_ = StopStrings(["ab", "abc"])
    assert (filter_.add("xab"), filter_.stopped) == ("x", "ab")
    assert (filter_.add("more"), filter_.finish()) == ("", "")


@pytest.mark.parametrize(
    "stops, error, message",
    [
        ("", InvalidArgument, r"^stop\[0\] is empty, expected at least one character"),
        (["a", ""], InvalidArgument, r"^stop\[1\] is empty"),
        (["x"] * 65, InvalidArgument, "^stop has 65 strings, expected at most 64"),
        (["a", 3], DTypeError, r"^stop\[1\] is a int, expected a string"),
        (3, DTypeError, "^stop is a int, expected a string or a sequence of strings"),
        (b"ab", DTypeError, "^stop is a bytes"),
        ({"a"}, DTypeError, "^stop is a set"),
    ],
)
def test_stop_strings_refuse(stops, error, message):
    with pytest.raises(error, match=message):
        StopStrings(stops)


def test_stop_strings_take_64():
    assert run([f"<{i}>" for i in range(64)], ["a<6", "3>b"]) == (["a", "", ""], "<63>")
