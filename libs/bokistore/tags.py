"""Tags of objects, and the objects with a tag.

The tags of an object are a part of it, so they go with its history, its checkpoints and its
transactions. For each tag an object of the store's own, `$tag:` and the tag, names those that ever
got it. It is written by the record that gives the tag, without reading, so it names at least those
that have the tag; a lookup looks at each of them and takes those that have it. Names that have lost
the tag are taken out when they are many.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from bokistore.document import TAGS_KEY, Document, Set
from bokistore.errors import InvalidObjectError
from bokistore.records import tag_of

_INDEX_PREFIX: Final = "$tag:"
TIDIED_MAX: Final = 256
"""Names that one lookup takes out."""
STALE_MAX: Final = 16
"""Names without the tag that a lookup skips; beyond it they are removed, if they are the most."""


def index_of(tag: str) -> str:
    """Return the object that names the objects with a tag.

    Raises:
        InvalidObjectError: the tag is empty, too long, or no text.
    """
    if not _is_tag(tag):
        raise InvalidObjectError(f"An object's tag is text, not {tag!r:.64}.")
    index = _INDEX_PREFIX + tag
    tag_of(index)
    return index


def _is_tag(tag: object) -> bool:
    return isinstance(tag, str) and bool(tag)


def check_own(name: object) -> None:
    """Refuse to write what only the store writes.

    Raises:
        InvalidObjectError: the name is that of an index.
    """
    if isinstance(name, str) and name.startswith(_INDEX_PREFIX):
        raise InvalidObjectError(
            f"Objects whose names begin with {_INDEX_PREFIX} are the store's own; choose another "
            f"name than {name!r}."
        )


def tagged(document: Document, tags: Iterable[str]) -> tuple[Document, list[str]]:
    """Return a document with its tags in it, and the objects that name it by them.

    Raises:
        InvalidObjectError: the tags are no list, or one of them cannot be one.
    """
    if isinstance(tags, str):
        raise InvalidObjectError(f"tags is a list of tags; write tags=[{tags!r}].")
    listed = list(dict.fromkeys(tags))
    indexes = [index_of(tag) for tag in listed]
    return ({**document, TAGS_KEY: listed} if listed else document), indexes


def entry(name: str) -> Set:
    """Return the write that names an object in an index."""
    return Set((name,), True)  # noqa: FBT003, a JSON value
