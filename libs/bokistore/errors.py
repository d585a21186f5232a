"""The errors of BokiStore, in addition to those of the log and `ConflictError`.

None of these errors is retryable. A refused operation has changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from indilog import IndilogError

if TYPE_CHECKING:
    from indilog.sdk import SeqNum


class StoreError(IndilogError):
    """Base of the errors of BokiStore."""


class InvalidObjectError(StoreError):
    """An invalid name, path or value; nothing was appended."""


class MismatchError(StoreError):
    """The operation does not fit the object's value at that path; it had no effect.

    The order of the log decides whether it fits, so every replay gets the same answer.

    Attributes:
        name: the object.
        path: the path in the object, as written in messages.
    """

    def __init__(self, name: str, path: str, *, wanted: str, found: str) -> None:
        where = f"at {path!r} of {name!r}" if path else f"as the whole of {name!r}"
        super().__init__(f"There must be {wanted} {where}, not {found}; nothing was changed.")
        self.name = name
        self.path = path


class ObjectTooLargeError(StoreError):
    """The operation would make the object larger than the limit of its size; it had no effect.

    Attributes:
        name: the object.
        size: bytes of JSON that the object would have.
        limit: the largest allowed size, in bytes of JSON.
    """

    def __init__(self, name: str, size: int, limit: int) -> None:
        super().__init__(
            f"{name!r} would have {size:,} bytes of JSON, the limit is {limit:,}; nothing was "
            "changed. Split it into several objects."
        )
        self.name = name
        self.size = size
        self.limit = limit


class ConditionUnmetError(StoreError):
    """The condition of a write does not hold; the write had no effect.

    The library catches this error: `Store` and `TxnObject` return a value instead, and a replay
    continues.
    """


class ObjectTypeError(StoreError):
    """An object does not fit the requested type; the object is unchanged.

    Attributes:
        name: the object.
    """

    def __init__(self, name: str, kind: str, problem: str) -> None:
        super().__init__(f"{name!r} is no {kind}: {problem}.")
        self.name = name


class AlreadyCommittedError(StoreError):
    """A transaction with this id has already committed; this one changed nothing.

    Attributes:
        id: the id.
        seqnum: seqnum of the committed transaction's record.
        result: the result that the committed transaction recorded, a JSON value.
    """

    def __init__(self, txn_id: str, seqnum: SeqNum, result: Any) -> None:  # noqa: ANN401, JSON
        super().__init__(
            f"A transaction with the id {txn_id!r} has already committed, at {seqnum}; "
            "this one changed nothing."
        )
        self.id = txn_id
        self.seqnum = seqnum
        self.result = result


class StoreVersionError(StoreError):
    """A later version of BokiStore wrote a record; upgrade this program to read it."""
