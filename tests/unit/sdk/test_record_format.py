"""Which records a library reads, ignores and refuses."""

from __future__ import annotations

import msgspec
import pytest

from indilog.base.errors import IndilogError
from indilog.sdk.record_format import RecordFormat


class VersionError(IndilogError):
    """Another version wrote it."""


class Word(msgspec.Struct, frozen=True, array_like=True):
    """Something to keep."""

    text: str


FORMAT = RecordFormat(b"\xb0X", 2, of="words", error=VersionError)
decode = msgspec.msgpack.Decoder(Word).decode


def test_a_record_is_its_frame_and_messagepack() -> None:
    assert FORMAT.encoded(Word("hi")) == b"\xb0X\x02\x91\xa2hi"
    assert FORMAT.decoded(b"\xb0X\x02\x91\xa2hi", decode) == Word("hi")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        b"\xb0",
        b"\xb0X",
        b"\xb0Y\x03\x91\xa2hi",  # of another library, whatever the version
        b"\xb0X\x02",
        b"\xb0X\x02\x91\x07",  # of another type
        b"\xb0X\x02\x91\xa2\xff\xff",  # not UTF-8
    ],
)
def test_records_of_another_format_are_ignored(data: bytes) -> None:
    assert FORMAT.decoded(data, decode) is None


@pytest.mark.parametrize(("version", "advice"), [(3, "upgrade it"), (1, "use the older program")])
def test_records_of_another_version_are_refused(version: int, advice: str) -> None:
    with pytest.raises(VersionError, match=f"words has format {version}; .* 2 only; {advice}"):
        FORMAT.decoded(b"\xb0X%c\x91\xa2hi" % version, decode)
