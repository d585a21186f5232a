"""The JSON form of records, in requests and answers.

In an answer, data that is valid UTF-8 is in the text field `data`. Other data is in `data_base64`,
and `encoding` is "base64". In a request, the caller chooses one of `data` and `data_base64`. The
routes of `records` use this module.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from typing import Annotated, Any, TypeAlias

import msgspec
import pydantic
from pydantic_core import PydanticCustomError

from indilog.base.errors import TooLargeError
from indilog.base.ids import UserTag
from indilog.base.log import After, Entry, Record


def _tag_in(value: object) -> object:
    """Refuse JSON values that are not tags, such as true, which pydantic converts to 1."""
    if type(value) is not str and type(value) is not int:
        raise PydanticCustomError("tag", "is text or an integer")
    return value


TagIn: TypeAlias = Annotated[str | int, pydantic.BeforeValidator(_tag_in)]


class RecordIn(pydantic.BaseModel):
    """A record to append: `data` or `data_base64`, and tags.

    The OpenAPI description and error messages come from this model; requests are decoded as
    `RecordBody`.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    data: str | None = None
    data_base64: str | None = None
    tags: list[TagIn] = []


class AfterIn(pydantic.BaseModel):
    """The condition of an append: no record with the tag has a seqnum greater than `seqnum`. If
    `seqnum` is null: there is no record with the tag.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    tag: str | None = None
    tag_int: pydantic.StrictInt | None = None
    seqnum: int | None = pydantic.Field(ge=0, strict=True)


class AppendIn(RecordIn):
    """One record, or several `records` that are appended atomically. If there is a condition
    `after`, the records are appended only if it holds.
    """

    records: list[RecordIn] | None = None
    after: AfterIn | None = None


class RecordBody(msgspec.Struct, forbid_unknown_fields=True):
    """The decoded form of a `RecordIn`."""

    data: str | None = None
    data_base64: str | None = None
    tags: list[str | int] = []

    def entry(self) -> Entry:
        """Return the record to append.

        Raises:
            ValueError: the record has both `data` and `data_base64`, or neither, or its base64 is
                invalid.
        """
        if (self.data is None) == (self.data_base64 is None):
            raise ValueError("Give a record's data either as data (text) or as data_base64.")
        if self.data is not None:
            return Entry(self.data.encode(), tuple(self.tags))
        try:
            data = base64.b64decode(self.data_base64 or "", validate=True)
        except binascii.Error as error:
            raise ValueError(f"data_base64 is not base64: {error}.") from error
        return Entry(data, tuple(self.tags))


class AfterBody(msgspec.Struct, forbid_unknown_fields=True):
    """The decoded form of an `AfterIn`."""

    seqnum: Annotated[int, msgspec.Meta(ge=0)] | None
    tag: str | None = None
    tag_int: int | None = None


class AppendBody(RecordBody, forbid_unknown_fields=True):
    """The decoded form of an `AppendIn`."""

    records: list[RecordBody] | None = None
    after: AfterBody | None = None

    def entries(self) -> tuple[list[Entry], bool]:
        """Return the records to append, and whether the body has the field `records`.

        Raises:
            ValueError: the body has both `records` and fields of one record, or a record is
                invalid, or the body has `after` without `records`.
        """
        if self.records is None:
            if self.after is not None:
                raise ValueError(
                    "The condition 'after' needs the field 'records', also for one record."
                )
            return [self.entry()], False
        if self.data is not None or self.data_base64 is not None or self.tags:
            raise ValueError("Give records, or data and tags of one record, not both.")
        return [record.entry() for record in self.records], True

    def condition(self) -> After | None:
        """Return the condition of the append; None: the append has no condition.

        Raises:
            ValueError: the condition names no tag, or both a text and an integer tag.
        """
        if self.after is None:
            return None
        tag = tag_of(self.after.tag, self.after.tag_int)
        if tag is None:
            raise ValueError(
                "The condition 'after' needs a tag: tag (text) or tag_int (an integer)."
            )
        return After(tag, self.after.seqnum)


class _Counted(msgspec.Struct):
    """The records of an `AppendIn`, which are only counted and not decoded."""

    records: list[msgspec.Raw] = []


def check_count(body: bytes, records_max: int) -> None:
    """Check the number of records in a body before decoding them.

    Raises:
        TooLargeError: the body has more than `records_max` records.
    """
    if body.count(b"{") <= records_max:
        return
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        count = len(msgspec.json.decode(body, type=_Counted).records)
        if count > records_max:
            raise TooLargeError("The batch's number of records", size=count, limit=records_max)


class TrimIn(pydantic.BaseModel):
    """A trim: delete the records below `until`, of the log or of a tag."""

    model_config = pydantic.ConfigDict(extra="forbid")

    until: int = pydantic.Field(ge=0, strict=True, description="The first seqnum that stays.")
    tag: str | None = None
    tag_int: pydantic.StrictInt | None = None


class RetentionIn(pydantic.BaseModel):
    """A log's retention policy; an absent or null field means no limit."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    age_s: float | None = pydantic.Field(None, gt=0, description="Seconds.")
    size_bytes: int | None = pydantic.Field(None, gt=0, description="Bytes of data and names.")


def record_out(record: Record) -> dict[str, Any]:
    """Return a record's JSON form."""
    out: dict[str, Any] = {
        "seqnum": record.seqnum,
        "tags": list(record.tags),
        "time": record.time,
        "ordered_at": record.ordered_at,
    }
    try:
        out["data"] = record.data.decode()
    except UnicodeDecodeError:
        out["encoding"] = "base64"
        out["data_base64"] = base64.b64encode(record.data).decode()
    return out


def tag_of(tag: str | None, tag_int: int | None) -> UserTag | None:
    """Return the tag of a request; None: it has none. A text and an integer are different tags.

    Raises:
        ValueError: the request has both.
    """
    if tag is not None and tag_int is not None:
        raise ValueError("Give tag (text) or tag_int (an integer tag), not both.")
    return tag if tag is not None else tag_int
