"""Errors for the user.

A `MusterError` is one sentence or a short paragraph that says what happened, what muster expected
and what to do, and names the key, file, row or rank. The command line prints it without a stack
trace; anything else that escapes is a bug in muster and keeps its trace.
"""

from muster.printable import sentence


class MusterError(Exception):
    """Something the user can fix. Each argument is a line of its own. A message quotes file names, keys and
    values of others: none of them adds a line, a control character or a page of text to it."""

    def __str__(self) -> str:
        return "\n".join(sentence(str(line)) for line in self.args)


class RecipeError(MusterError):
    """The recipe asks for something that does not exist, does not fit, or contradicts itself."""


class DataError(MusterError):
    """A file, a row or a column is not what training needs."""


class CheckpointError(MusterError):
    """A checkpoint is incomplete, damaged, or belongs to another recipe; or could not be written."""


class UnreadableError(MusterError, ValueError):
    """A file from elsewhere is damaged, too large, or not of its kind."""


class ReplicaError(MusterError):
    """A rank holds other weights than those that should hold the same: its device is faulty."""


class DeviceError(MusterError):
    """A rank's device computes wrong."""


class LaunchError(MusterError):
    """Ranks could not be started, the rendezvous failed, or a rank failed, with what the rank said."""

    def __str__(self) -> str:
        lines = (line for words in self.args for line in str(words).splitlines())
        return "\n".join(sentence(line) for line in lines)


class MemoryLimitError(MusterError):
    """A device or the host has no memory left for what a rank is about to do."""


class StartAgain(MusterError):
    """All ranks must start again from the last checkpoint, with a setting that one of them wrote down."""


AGAIN = 76  # exit code of a rank that raised StartAgain
