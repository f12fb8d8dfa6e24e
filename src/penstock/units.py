"""Numbers as messages and tables show them."""


def amount(nbytes: float) -> str:
    """Bytes in the largest decimal unit that leaves a digit before the point: 14.72 MB, never 0.01 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"
