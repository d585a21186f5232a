"""The check: what the functions show must be what the log says, and no post is lost or doubled.

It reads the whole log over HTTP and replays it in its own plain way, from the format alone
(`docs/libs/bokistore.md`); it shares no code with the library, so a mistake there shows here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from functions.social.http_connection import HttpConnection
from functions.social.load import LoadError, Run, call

_PAGE: Final = 1000
_OBJECTS_AT_ONCE: Final = 200
_FAULTS_SHOWN_MAX: Final = 10


@dataclass
class Replay:
    """The objects as a plain replay of the log has them.

    Attributes:
        objects: by name; None: it does not exist.
        records: how many were read.
        data_bytes: how much data was in them.
        conflicts: seqnums of the transactions that had no effect.
        position: of the session that read them.
    """

    objects: dict[str, Any] = field(default_factory=dict)
    records: int = 0
    data_bytes: int = 0
    conflicts: list[int] = field(default_factory=list)
    position: int = 0
    _written_at: dict[str, int] = field(default_factory=dict)

    def add(self, seqnum: int, data: str) -> None:
        """Take the next record in."""
        self.records += 1
        self.data_bytes += len(data.encode())
        command = json.loads(data)
        horizon = command.get("horizon", 0)
        if any(self._written_at.get(name, -1) >= horizon for name in command.get("reads", ())):
            self.conflicts.append(seqnum)
            return
        for name, writes in command["writes"].items():
            self._written_at[name] = seqnum
            for write in writes:
                self.objects[name] = _written(self.objects.get(name), write)


def _written(document: Any, write: list[Any]) -> Any:  # noqa: ANN401
    """Apply one write; the app's paths are a name in the object, or the object."""
    kind, path, *rest = write
    if not path:
        return rest[0] if kind == "set" else None
    document = dict(document or {})
    (key,) = path
    match kind:
        case "set":
            document[key] = rest[0]
        case "increment":
            document[key] = document.get(key, 0) + rest[0]
        case "push":
            items = [*document.get(key, []), rest[0]]
            document[key] = items if rest[1] is None else items[-rest[1] :]
        case "add_to_set":
            if rest[0] not in document.get(key, []):
                document[key] = [*document.get(key, []), rest[0]]
        case _:
            document.pop(key, None)
    return document


async def replayed(url: str, progress: Callable[[int, int], None]) -> Replay:
    """Read the log from its beginning and replay it.

    Args:
        url: of the gateway.
        progress: told the next seqnum, and the tail.

    Raises:
        LoadError: the gateway does not answer, or a record is not of the application.
    """
    replay = Replay()
    try:
        async for record in _records(url, replay, progress):
            replay.add(record["seqnum"], record["data"])
    except httpx.HTTPError as error:
        raise LoadError(f"The log cannot be read over HTTP: {error}.") from error
    except (KeyError, ValueError, TypeError) as error:
        raise LoadError(
            f"The log holds something that the app did not write: {error!r}."
        ) from error
    return replay


async def _records(
    url: str, replay: Replay, progress: Callable[[int, int], None]
) -> AsyncIterator[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
        answer = await client.get("/logs/social/tail")
        tail = answer.raise_for_status().json()["tail"]
        bound = 0
        replay.position = int(answer.headers.get("indilog-position", 0))
        while bound < tail:
            answer = await client.get(
                "/logs/social/records",
                params={"bound": bound, "limit": _PAGE},
                headers={"indilog-position": str(replay.position)},
            )
            page = answer.raise_for_status().json()
            for record in page["records"]:
                yield record
            bound = page["next_bound"] if page["records"] else tail
            progress(bound, tail)


async def faults_of_objects(url: str, replay: Replay) -> list[str]:
    """Compare what the functions show with the replay; return what differs, in sentences."""
    names = sorted(replay.objects)
    faults: list[str] = []
    connection = HttpConnection(url)
    try:
        for start in range(0, len(names), _OBJECTS_AT_ONCE):
            asked = names[start : start + _OBJECTS_AT_ONCE]
            shown = await call(connection, "objects", {"names": asked}, position=replay.position)
            faults += [
                f"{name} is {_short(value)}, but the log says {_short(replay.objects[name])}."
                for name, value in zip(asked, shown, strict=True)
                if value != replay.objects[name]
            ]
    finally:
        connection.close()
    return faults


def faults_of_posts(run: Run, replay: Replay) -> list[str]:
    """Return which acknowledged posts are lost, changed or doubled, in sentences."""
    faults: list[str] = []
    for post, text in run.acknowledged.items():
        kept = replay.objects.get(f"post:{post}")
        if kept is None:
            faults.append(f"Post {post} was acknowledged and is lost.")
        elif kept["text"] != text:
            faults.append(f"Post {post} has the text {kept['text']!r} instead of {text!r}.")
    published = Counter(_texts(replay.objects))
    return faults + [
        f"The post {text!r} was published {published[text]} times."
        for text in (*run.acknowledged.values(), *run.unknown)
        if published[text] > 1
    ]


def _texts(objects: dict[str, Any]) -> Iterable[str]:
    return (value["text"] for name, value in objects.items() if name.startswith("post:") and value)


def summary_of(faults: list[str]) -> str:
    """Return the first few faults, a line each, and how many more there are."""
    shown = faults[:_FAULTS_SHOWN_MAX]
    if len(faults) > len(shown):
        shown.append(f"... and {len(faults) - len(shown)} more.")
    return "\n".join(shown)


def _short(value: Any) -> str:  # noqa: ANN401
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:120] + "..."
