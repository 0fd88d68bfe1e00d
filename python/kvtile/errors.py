"""Exceptions of the package, one for each status of the C ABI.

The text of each reads "argument: got X, wanted Y". Nothing was launched or written when one is
raised, and the next call is not affected.
"""


class KvtileError(RuntimeError):
    """Base of every error; `argument` is the name the text opens with."""

    @property
    def argument(self) -> str:
        return str(self).partition(":")[0]


class InvalidArgument(KvtileError, ValueError):
    """An argument of the wrong type, dtype, device, shape, stride or value."""


class Unsupported(KvtileError):
    """A combination that no backend (or not the one named) computes."""


class WorkspaceTooSmall(KvtileError):
    """Fewer workspace bytes than `workspace_bytes` states."""


class OutOfRange(KvtileError, IndexError):
    """A slot, block or length outside what it indexes."""


class ValueOverflow(KvtileError):
    """A checked encode met a value that the format cannot hold."""


class NonFinite(KvtileError):
    """A checked encode met NaN or infinity."""


class Unavailable(KvtileError):
    """A backend, device or library that this build or machine lacks."""


# By kvtile_status.
BY_STATUS = (None, InvalidArgument, Unsupported, WorkspaceTooSmall, OutOfRange, ValueOverflow,
             NonFinite, Unavailable)
