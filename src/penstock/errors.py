"""Everything penstock raises. A message names the op or file, the argument, what came and what was expected."""

from collections.abc import Iterator
from contextlib import contextmanager


class PenstockError(Exception):
    """Base of all errors raised on purpose by penstock."""


class InvalidArgument(PenstockError, ValueError):
    """A size or value that an op, function or setting does not take."""


class TooManyTokens(InvalidArgument):
    """A text of more tokens than its reader takes."""


class ShapeError(InvalidArgument):
    """An array whose shape or memory layout does not fit the op or the other arguments."""


class DTypeError(InvalidArgument, TypeError):
    """An array of the wrong dtype, or an argument of the wrong type."""


class KernelNotFound(PenstockError, LookupError):
    """No kernel of that name, device or variant is registered."""


class BackendError(PenstockError):
    """A backend cannot run here, or a kernel met a limit of its own."""


class NonFiniteLogits(BackendError):
    """A model produced NaN or infinity: its weights are damaged, or its activations overflowed."""


class CheckpointError(PenstockError):
    """A model file or folder that cannot be read or does not make sense."""


class OutOfMemory(PenstockError, MemoryError):
    """The work does not fit into the memory there is."""


class QueueFull(PenstockError):
    """Too many requests are waiting; `retry_after` is a guess at the seconds until there is room again."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Cancelled(PenstockError):
    """A request that ended early although its reader wanted more: the model is being closed, or he took nothing."""


class EngineDied(PenstockError):
    """The process that runs the model has ended, and the request with it."""


@contextmanager
def no_panic(doing: str) -> Iterator[None]:
    """What a library written in Rust raises, as PenstockError: bare Exception, and where its code panics a
    BaseException, which would pass every `except Exception` on its way out. Other exceptions stay what they are.
    """
    try:
        yield
    except BaseException as error:
        known = isinstance(error, Exception | KeyboardInterrupt | SystemExit | GeneratorExit)
        if known and type(error) is not Exception:
            raise
        reason = " ".join(str(error).split())[:300]
        raise PenstockError(f"{doing}: a library failed: {reason or type(error).__name__}") from None
