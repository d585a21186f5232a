"""The errors of views, in addition to those of the log."""

from __future__ import annotations

from indilog import IndilogError


class ViewsError(IndilogError):
    """Base of the errors of BokiViews."""


class InvalidValueError(ViewsError):
    """A name, key, value or command that cannot be stored; nothing was appended."""


class ValueTypeError(ViewsError):
    """A stored value does not fit the type with which the object was opened."""


class ViewKindError(ViewsError):
    """The object exists and has another kind; the command or transaction had no effect."""

    def __init__(self, name: str, kind: str, wanted: str) -> None:
        super().__init__(f"Object {name!r} is a {kind}, not a {wanted}; use another name.")


class NotHostedError(ViewsError):
    """This process keeps no view of the object, because `Views(hosts=)` does not name it, or
    because `Views(machines=)` lacks its kind.
    """


class ViewsVersionError(ViewsError):
    """Another version of BokiViews, or of a state machine, wrote a record that this program cannot
    read.
    """


class MachineFailedError(ViewsError):
    """A state machine raised an error for a command in the log. The views of this process are
    unusable until the machine is corrected and the process started again.
    """
