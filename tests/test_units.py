import pytest

from penstock.errors import InvalidArgument
from penstock.units import amount, parse_size, spelled


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (14_720_000, "14.72 MB"),
        (999_000_000, "999.00 MB"),
        (10**9, "1.00 GB"),
        (223_170_000_000, "223.17 GB"),
        (-5_000_000, "-5.00 MB"),
    ],
)
def test_amount_takes_the_unit_that_leaves_a_digit(nbytes, text):
    assert amount(nbytes) == text


G = 1024**3


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12G", 12 * G),
        ("12g", 12 * G),
        ("12GiB", 12 * G),
        ("12gib", 12 * G),
        ("12GB", 12 * 10**9),
        ("500M", 500 * 2**20),
        ("500MB", 500 * 10**6),
        ("1.5G", 3 * G // 2),
        (".5K", 512),
        ("2T", 2 * 2**40),
        ("3TB", 3 * 10**12),
        ("4096", 4096),
        ("4096B", 4096),
        (" 7 MiB ", 7 * 2**20),
        ("0", 0),
        ("0.1GB", 10**8),  # no rounding through binary fractions
    ],
)
def test_parse_size_reads_what_people_type(text, nbytes):
    assert parse_size(text, "--expert-cache") == nbytes


@pytest.mark.parametrize(("text", "nbytes"), [("50%", 500), ("100 %", 1000), ("0%", 0), ("33.3%", 333)])
def test_parse_size_takes_a_share_of_the_whole(text, nbytes):
    assert parse_size(text, "--expert-cache", whole=1000) == nbytes


@pytest.mark.parametrize(
    "text", ["", "G", "12X", "-1G", "1e9", "12 G B", "1,5G", "12Gi", "auto", "nan", "٣G", "1" * 30]
)
def test_parse_size_refuses_anything_else(text):
    with pytest.raises(InvalidArgument, match=r"^--expert-cache: is '.*', expected a size such as 12G, 500M, 50%"):
        parse_size(text, "--expert-cache", whole=1000)


def test_parse_size_refuses_a_share_of_nothing_and_of_more_than_all():
    with pytest.raises(InvalidArgument, match=r"^--device-memory: is '50%', expected bytes such as 12G"):
        parse_size("50%", "--device-memory")
    with pytest.raises(InvalidArgument, match=r"^--expert-cache: is '100.1%', expected at most 100%"):
        parse_size("100.1%", "--expert-cache", whole=1000)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (6 * G, "6.00 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (5e16, "45474.74 TiB"),
    ],
)
def test_spelled_uses_the_units_that_parse_size_reads(nbytes, text):
    assert spelled(nbytes) == text
    assert parse_size(text, "x") == pytest.approx(nbytes, rel=0.005)
