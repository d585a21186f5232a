"""Tags of objects, and indexes that find the objects with a tag.

The tags of an object are part of its JSON, so its history, checkpoints and transactions include
them. Each tag has an index object, named `$tag:` and the tag. The record that sets a tag also
writes the index, without reading it. So the index names all objects that have the tag, and maybe
others. A lookup reads each named object and returns those that have the tag. If many named objects
have lost the tag, the lookup removes their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bokistore.document import TAGS_KEY, Document, SetValue
from bokistore.errors import InvalidObjectError
from bokistore.records import tag_of

_INDEX_PREFIX: Final = "$tag:"
STALE_REMOVED_MAX: Final = 256
"""Largest number of names that one lookup removes."""
STALE_MAX: Final = 16
"""Names of objects without the tag that a lookup leaves in an index. If there are more, and they
are the majority, the lookup removes them.
"""


def index_of(tag: str) -> str:
    """Return the name of the index object of a tag.

    Raises:
        InvalidObjectError: the tag is empty, too long, or not text.
    """
    if not _is_tag(tag):
        raise InvalidObjectError(f"An object's tag must be text, not {tag!r:.64}.")
    index = _INDEX_PREFIX + tag
    tag_of(index)
    return index


def _is_tag(tag: object) -> bool:
    return isinstance(tag, str) and bool(tag)


def is_own(name: str) -> bool:
    """Tell whether an object is the index of a tag, which only the store writes."""
    return name.startswith(_INDEX_PREFIX)


def check_own(name: object) -> None:
    """Raise for a write to an index.

    Raises:
        InvalidObjectError: the object is the index of a tag.
    """
    if isinstance(name, str) and is_own(name):
        raise InvalidObjectError(
            f"Object names that begin with {_INDEX_PREFIX} are reserved; choose another "
            f"name than {name!r}."
        )


def with_tags(document: Document, tags: Iterable[str]) -> tuple[Document, list[str]]:
    """Return a document with its tags, and the names of their index objects.

    Raises:
        InvalidObjectError: the tags are not a list, or one of them is invalid.
    """
    if isinstance(tags, str):
        raise InvalidObjectError(f"tags must be a list of tags; write tags=[{tags!r}].")
    listed = list(dict.fromkeys(tags))
    indexes = [index_of(tag) for tag in listed]
    return ({**document, TAGS_KEY: listed} if listed else document), indexes


def entry(name: str) -> SetValue:
    """Return the write that adds an object to an index."""
    return SetValue((name,), True)  # noqa: FBT003, a JSON value
