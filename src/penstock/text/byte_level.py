"""How byte-level vocabularies write bytes: each is a character that can be printed."""


def _byte_of_characters() -> dict[str, int]:
    """The alphabet of byte-level vocabularies: printable Latin-1 stands for itself, the other bytes for U+0100 up."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_of_characters()  # by character
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
