import pytest

from penstock.units import amount


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
