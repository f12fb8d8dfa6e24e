"""Everything penstock raises. A message names the op or file, the argument, what came and what was expected."""


class PenstockError(Exception):
    """Base of all errors raised on purpose by penstock."""


class InvalidArgument(PenstockError, ValueError):
    """A size or value that an op, function or setting does not take."""


class ShapeError(InvalidArgument):
    """An array whose shape or memory layout does not fit the op or the other arguments."""


class DTypeError(InvalidArgument, TypeError):
    """An array of the wrong dtype, or an argument of the wrong type."""


class KernelNotFound(PenstockError, LookupError):
    """No kernel of that name, device or variant is registered."""


class BackendError(PenstockError):
    """A backend cannot run here, or a kernel met a limit of its own."""


class CheckpointError(PenstockError):
    """A model file or folder that cannot be read or does not make sense."""


class OutOfMemory(PenstockError, MemoryError):
    """The work does not fit into the memory there is."""
