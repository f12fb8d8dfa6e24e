"""What the server takes from its clients at most."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bytes, seconds and counts; every one is on by default."""

    body: int = 16 << 20  # bytes of a request's body
    bodies: int = 256 << 20  # bytes of all bodies that are arriving at one time
    values: int = 200_000  # of a body's JSON: numbers, texts, lists, objects
    headers: int = 64 << 10  # bytes of a request's head
    header_count: int = 256
    header_seconds: float = 20.0  # from the connection, or the first byte of a request, to the end of its head
    body_seconds: float = 60.0  # from there to the end of its body
    linger_seconds: float = 5.0  # to read on in a body that was refused, so that its sender gets to see why
    idle_seconds: float = 75.0  # between two requests of a connection
    write_seconds: float = 60.0  # a client may leave written data unread before it counts as gone
    request_seconds: float = 3600.0  # from the request to the end of its answer
    shutdown_seconds: float = 10.0  # requests under way may still take when the server has to end
    connections: int = 4096
    queue: int = 256  # requests that wait for their turn
    tokens: int | None = None  # of an answer, whatever the request asks for; None: what the context leaves
    choices: int = 128  # answers to one request
    tokenized: int = 262_144  # tokens that /tokenize answers with
