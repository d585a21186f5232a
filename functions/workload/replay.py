"""Replays an application's log, and checks that its functions return what the log contains.

The check reads the whole log over HTTP and replays it by the documented format
(`docs/libs/bokistore.md`). It shares no code with the library, so it detects mistakes of the
library. Each application checks its further guarantees in the replay.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from functions.workload.http_connection import HttpConnection
from functions.workload.load import LoadError, call
from indilog import reach

_PAGE: Final = 1000
_OBJECTS_AT_ONCE: Final = 200
_FAULTS_SHOWN_MAX: Final = 10
_INDEX: Final = "$tag:"
"""Prefix of the names of objects that belong to the store: the indexes of tags."""
_HIDDEN: Final = frozenset({"$tags", "password", "salt"})
"""Fields of objects that no function may answer."""


@dataclass
class TraceReplay:
    """The objects that an independent replay of the log gives.

    Attributes:
        objects: objects by name; None: the object does not exist.
        records: number of records read from the log.
        data_bytes: number of data bytes in these records.
        conflicts: seqnums of transactions that had no effect because of a conflict.
        position: position of the session that read the records.
        least: smallest value that a number in an object had, by the object's name and field.
        statuses: the successive values of the field `status` of each object that has one.
    """

    objects: dict[str, Any] = field(default_factory=dict)
    records: int = 0
    data_bytes: int = 0
    conflicts: list[int] = field(default_factory=list)
    position: int = 0
    least: dict[tuple[str, str], float] = field(default_factory=dict)
    statuses: dict[str, list[str]] = field(default_factory=dict)
    _written_at: dict[str, int] = field(default_factory=dict)
    _done: dict[str, int] = field(default_factory=dict)
    """By transaction id, the seqnum of the last committed transaction with this id. A further
    transaction with this id commits only if its horizon is above this seqnum.
    """

    def objects_of_kind(self, kind: str) -> Iterator[tuple[str, Any]]:
        """Yield name and value of each existing object `kind:NAME`."""
        for name, value in self.objects.items():
            if value is not None and name.startswith(f"{kind}:"):
                yield name.partition(":")[2], value

    def add(self, seqnum: int, data: str) -> None:
        """Apply the next record."""
        self.records += 1
        self.data_bytes += len(data.encode())
        command = json.loads(data)
        if "part" in command:  # of a checkpoint
            return
        ids, horizon = command.get("ids", {}), command.get("horizon", 0)
        if any(self._done.get(txn_id, -1) >= horizon for txn_id in ids):
            return
        if any(self._written_at.get(name, -1) >= horizon for name in command.get("reads", ())):
            self.conflicts.append(seqnum)
            return
        self._done.update(dict.fromkeys(ids, seqnum))
        for name, writes in command["writes"].items():
            self._written_at[name] = seqnum
            for write in writes:
                self.objects[name] = _written(self.objects.get(name), write)
            self._note(name, self.objects[name] or {})

    def _note(self, name: str, document: dict[str, Any]) -> None:
        """Note facts that the final state does not show: smallest numbers, and earlier statuses."""
        for key, value in document.items():
            if type(value) in {int, float}:
                self.least[name, key] = min(value, self.least.get((name, key), value))
        if "status" in document:
            statuses = self.statuses.setdefault(name, [])
            if statuses[-1:] != [document["status"]]:
                statuses.append(document["status"])


def _written(document: Any, write: list[Any]) -> Any:  # noqa: ANN401
    """Apply one write; the applications' paths contain only names, no indexes of list elements."""
    kind, path, *rest = write
    if path:
        document = dict(document or {})
        if (kind, len(path)) == ("delete", 1):
            document.pop(path[0], None)
        else:
            document[path[0]] = _written(document.get(path[0]), [kind, path[1:], *rest])
        return document
    return _AT_THE_END[kind](document, *rest)


def _merge_patch(document: Any, patch: Any) -> Any:  # noqa: ANN401
    """Merge by RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_patch(merged.get(name), value)
    return merged


def _pushed(items: list[Any] | None, value: Any, limit: int | None) -> list[Any]:  # noqa: ANN401
    longer = [*(items or []), value]
    return longer if limit is None else longer[-limit:]


def _with(items: list[Any] | None, value: Any) -> list[Any]:  # noqa: ANN401
    return items if items and value in items else [*(items or []), value]


_AT_THE_END: Final[dict[str, Callable[..., Any]]] = {
    "set": lambda _, value: value,
    "increment": lambda number, by: (number or 0) + by,
    "push": _pushed,
    "add_to_set": _with,
    "merge": _merge_patch,
    "delete": lambda _: None,
}


async def replayed(url: str, log: str, progress: Callable[[int, int], None]) -> TraceReplay:
    """Read a log from its beginning and replay it.

    Args:
        url: URL of the gateway.
        log: name of the application's log, which contains only its objects.
        progress: called with the next seqnum, and the tail.

    Raises:
        LoadError: the gateway does not answer, or the application did not write a record.
    """
    replay = TraceReplay()
    try:
        async for record in _records(url, log, replay, progress):
            replay.add(record["seqnum"], record["data"])
    except httpx.HTTPError as error:
        raise LoadError(f"The log cannot be read over HTTP: {error}.") from error
    except (KeyError, ValueError, TypeError) as error:
        raise LoadError(f"The log has a record that the app did not write: {error!r}.") from error
    return replay


async def _records(
    url: str, log: str, replay: TraceReplay, progress: Callable[[int, int], None]
) -> AsyncIterator[dict[str, Any]]:
    async with httpx.AsyncClient(**reach(url).for_httpx, timeout=60.0) as client:
        answer = await client.get(f"/logs/{log}/tail")
        tail = answer.raise_for_status().json()["tail"]
        bound = 0
        replay.position = int(answer.headers.get("indilog-position", 0))
        while bound < tail:
            answer = await client.get(
                f"/logs/{log}/records",
                params={"bound": bound, "limit": _PAGE},
                headers={"indilog-position": str(replay.position)},
            )
            page = answer.raise_for_status().json()
            for record in page["records"]:
                yield record
            bound = page["next_bound"] if page["records"] else tail
            progress(bound, tail)


async def faults_of_objects(url: str, app: str, replay: TraceReplay) -> list[str]:
    """Compare the result of the app's function `objects` with the replay; return the differences,
    one sentence each. An answer with a password, or its hash or salt, is a difference.
    """
    names = sorted(name for name in replay.objects if not name.startswith(_INDEX))
    faults: list[str] = []
    connection = HttpConnection(url)
    try:
        for start in range(0, len(names), _OBJECTS_AT_ONCE):
            asked = names[start : start + _OBJECTS_AT_ONCE]
            arguments = {"names": asked}
            shown = await call(connection, app, "objects", arguments, position=replay.position)
            faults += [
                f"{name} is {_short(value)}, but the log says {_short(logged)}."
                for name, value in zip(asked, shown, strict=True)
                if value != (logged := _without(_HIDDEN, replay.objects[name]))
            ]
    finally:
        connection.close()
    return faults


def _without(fields: frozenset[str], document: Any) -> Any:  # noqa: ANN401
    if not isinstance(document, dict):
        return document
    return {key: value for key, value in document.items() if key not in fields}


def summary_of(faults: list[str]) -> str:
    """Return the first few faults, one per line, and the number of further faults."""
    shown = faults[:_FAULTS_SHOWN_MAX]
    if len(faults) > len(shown):
        shown.append(f"... and {len(faults) - len(shown)} more.")
    return "\n".join(shown)


def _short(value: Any) -> str:  # noqa: ANN401
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:120] + "..."
