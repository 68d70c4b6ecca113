"""Text from elsewhere, for a terminal and for a sentence: see `muster.printable`."""

from muster.printable import KEPT, in_one_line, printable

__all__ = ["KEPT", "in_one_line", "printable"]
