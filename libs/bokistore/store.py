"""The store: named JSON objects on a log, changed by single operations and transactions (API.md,
"BokiStore"; thesis 2.3.3).

Each operation is one record. Its place in the log decides its effect and the old value that it
returns, so concurrent callers never lose updates. Applications and BokiFlow call `Store`. It
appends records, and reads them by `ObjectReplay`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar, overload

import msgspec

from bokistore.cache import ViewCache, cache_of
from bokistore.checkpoints import is_due
from bokistore.collection import (
    KEEP_IDS_S,
    KEEP_S,
    Collection,
    CollectionStatus,
    check_spans,
    find_status,
)
from bokistore.document import (
    Absent,
    Conditional,
    Document,
    Json,
    Path,
    Pop,
    SetValue,
    Write,
    check_value,
    encode,
    is_same,
    is_whole,
    result_of,
    steps_of,
)
from bokistore.errors import AlreadyCommittedError, ConditionUnmetError, MismatchError
from bokistore.groups import Group
from bokistore.lines import Contender, is_inside_body
from bokistore.log_lines import LogTurn, wait_for_those_before
from bokistore.objects import (
    Obj,
    add_to_set_at,
    append_if_at,
    decrement_if_at,
    delete_at,
    increment_at,
    merge_at,
    push_at,
    set_at,
    set_if_at,
)
from bokistore.operations import PendingOperations
from bokistore.records import ObjectView, encode_command, id_tag_of, tag_of
from bokistore.replay import ObjectReplay
from bokistore.snapshot import Snapshot, Version, versions
from bokistore.tags import STALE_MAX, STALE_REMOVED_MAX, check_own, entry, index_of, with_tags
from bokistore.transaction import Transaction
from bokistore.types import as_document
from bokistore.value import NO_EFFECT, ObjectDocument, may_be_too_large
from indilog import MAX_SEQNUM, AppendOutcomeUnknownError, ConflictError, IndilogError, Log
from indilog.sdk import SeqNum, append_outcome_unknown, check_bound

RETRIES: Final = 16

_ResultT = TypeVar("_ResultT")
_TypedT = TypeVar("_TypedT")
_decode_write = msgspec.json.Decoder(Write).decode


class Store:
    """Named JSON objects on one log. `Store` instances are cheap: those of one platform share a
    cache.

    An operation returns the value that was at the path before the operation, in log order; None if
    there was none. When an operation returns, its effect is durable and visible in this session. An
    operation raises the errors of `Log.append`. After `AppendOutcomeUnknownError` the operation may
    have taken effect. This error is also raised if the record was appended, but the previous value
    could not be read. After a `retryable` error nothing was done.

    Args:
        log: the log with the objects; it may also hold other records.
        cache: cache to use instead of the shared one.
    """

    def __init__(self, log: Log, *, cache: ViewCache | None = None) -> None:
        self.log = log
        cache = cache_of(log) if cache is None else cache
        self._cache = cache
        self._replay = ObjectReplay(log, cache)
        self._operations = PendingOperations(log, cache, self._replay)

    @overload
    async def get(self, name: str) -> Obj: ...
    @overload
    async def get(self, name: str, type: type[_TypedT]) -> _TypedT | None: ...
    async def get(
        self,
        name: str,
        type: type[_TypedT] | None = None,  # noqa: A002
    ) -> Obj | _TypedT | None:
        """Return a snapshot of an object. The snapshot is false if the object does not exist.

        With `type`, return the object as a value of that type, or None if it does not exist. The
        type is a dataclass, a pydantic model, a TypedDict, or a msgspec Struct.

        Raises:
            ObjectTypeError: the object does not fit the type.
        """
        return Obj(name, await self._replay.view(name, may_append=True)).convert(type)

    def snapshot(self) -> Snapshot:
        """Read several objects as of one seqnum: `async with store.snapshot() as view`.

        The snapshot includes all transactions that committed before the block began.
        """
        return Snapshot(self.log, self._replay)

    def at(self, seqnum: SeqNum) -> Snapshot:
        """Return a snapshot of all objects as of the record at `seqnum`, including that record.

        Raises:
            ValueError: `seqnum` is negative. Reads raise it, too, if `seqnum` is above the tail.
            TrimmedError: raised by reads: a needed record was trimmed.
        """
        return Snapshot(self.log, self._replay, check_bound(seqnum) + 1)

    def history(self, name: str, start: SeqNum = 0) -> AsyncIterator[Version]:
        """Iterate over the committed writes of an object from seqnum `start` on, oldest first."""
        return versions(self.log, self._replay, name, check_bound(start))

    async def multi_get(self, names: Iterable[str]) -> dict[str, Obj]:
        """Return several objects by name, all as of the same seqnum."""
        return await self.snapshot().multi_get(names)

    async def put(self, name: str, value: object, *, tags: Iterable[str] = ()) -> Json:
        """Replace the whole object by `value`: a dict, a dataclass, a model or a Struct.

        The object then has exactly the given tags, and `find(tag)` finds it by each of them. The
        next `put`, `set` or `delete` of the whole object replaces the tags; a change of a part
        keeps them.

        Raises:
            InvalidObjectError: the value is none of these, or a tag is not text; nothing was
                appended.
        """
        document, indexes = with_tags(as_document(value), tags)
        check_value(document)
        return await self._operate(name, SetValue((), document), indexes)

    async def find(self, tag: str) -> dict[str, Obj]:
        """Return the objects that have a tag, by name, all as of the same seqnum.

        Each of these objects is read. In a transaction, use `txn.find`: the commit then fails if an
        object has got or lost the tag meanwhile.

        Raises:
            InvalidObjectError: the tag is not text.
        """
        view = Snapshot(self.log, self._replay, may_append=True)
        found = await view.find(tag)
        stale = [name for name in await view.get(index_of(tag)) if name not in found]
        if len(stale) > max(STALE_MAX, len(found)):
            await self._remove_stale_names(tag, stale[:STALE_REMOVED_MAX])
        return found

    async def _remove_stale_names(self, tag: str, names: Sequence[str]) -> None:
        """Remove names from the index of a tag, unless they have the tag again."""

        async def body(txn: Transaction) -> None:
            await txn.remove_stale_names(tag, names)

        # The lookup itself succeeded; the next lookup retries the removal.
        with suppress(IndilogError):
            await self.transact(body, retries=0)

    async def multi_put(self, values: Mapping[str, object]) -> None:
        """Replace several objects atomically, with one record. The last writer wins.

        Raises:
            InvalidObjectError: as `put`.
        """
        async with self.transaction() as txn:
            for name, value in values.items():
                txn.set(name, "", as_document(value))

    async def test_and_multi_put(
        self,
        tests: Mapping[str, object | None],
        values: Mapping[str, object],
        *,
        retries: int = RETRIES,
    ) -> bool:
        """Replace several objects if others are as expected, atomically (CORFU section 3.1).

        Args:
            tests: the expected whole object by name, compared as JSON, so 1, 1.0 and true differ;
                None: the object must not exist.
            values: the new whole object by name.
            retries: as in `transact`.

        Returns:
            Whether the tests held; if not, nothing was changed.

        Raises:
            ConflictError: as `transact`.
            InvalidObjectError: as `put`.
        """
        wanted = {name: None if w is None else as_document(w) for name, w in tests.items()}
        for document in wanted.values():
            check_value(document)

        async def body(txn: Transaction) -> bool:
            for name, document in wanted.items():
                obj = await txn.get(name)
                if not is_same(dict(obj.value) if obj.exists else None, document):
                    return False
            for name, value in values.items():
                txn.set(name, "", as_document(value))
            return True

        return await self.transact(body, retries=retries)

    async def set(self, name: str, path: Path, value: Json) -> Json:
        """Set the value at `path`; missing objects along the path are created.

        Raises:
            MismatchError: a value along the path is not an object, or an element of a list is
                missing.
        """
        return await self._operate(name, set_at(path, value))

    async def increment(self, name: str, path: Path, by: float = 1) -> int | float | None:
        """Add `by` to the number at `path`; a missing value counts as 0.

        Raises:
            MismatchError: the value is not a number.
        """
        old = await self._operate(name, increment_at(path, by))
        assert old is None or isinstance(old, int | float), "an increment fits numbers only"
        return old

    async def push(
        self,
        name: str,
        path: Path,
        value: Json,
        *,
        limit: int | None = None,
    ) -> list[Json] | None:
        """Append `value` to the list at `path`; beyond `limit` elements the oldest is removed.

        Raises:
            MismatchError: the value is not a list.
        """
        old = await self._operate(name, push_at(path, value, limit))
        assert old is None or isinstance(old, list), "a push fits lists only"
        return old

    async def decrement_if(
        self, name: str, path: Path, by: float, at_least: float = 0
    ) -> int | float | None:
        """Subtract `by` from the number at `path` if at least `at_least` is left; return the new
        number. None: not enough was there, and nothing was changed.

        The order of the log decides, so concurrent callers need no transaction and no retries.
        While there is enough for n callers, n of them succeed. A missing value counts as 0.

        Raises:
            MismatchError: the value is not a number.
        """
        old = await self._operate_if(name, decrement_if_at(path, by, at_least))
        return None if old is Absent.ABSENT else (old or 0) - by

    async def test_and_set(self, name: str, path: Path, expected: Json, value: Json) -> bool:
        """Set the value at `path` if it is the JSON `expected`; return whether it was set.

        The order of the log decides: of several callers that expect the same value, one succeeds. A
        missing value counts as null (`None`). With an empty path, the whole object is compared.

        Raises:
            MismatchError: the condition holds, but the path does not fit the object.
        """
        return await self._operate_if(name, set_if_at(path, expected, value)) is not Absent.ABSENT

    async def append_if(
        self, name: str, path: Path, value: Json, *, absent: bool = False, limit: int | None = None
    ) -> bool:
        """Append `value` to the list at `path` if all given conditions hold; return whether it was
        appended. The order of the log decides.

        Args:
            name: the object.
            path: where the list is; a missing list counts as empty.
            value: the value to append.
            absent: condition: the same JSON is not in the list.
            limit: condition: the list has less than `limit` elements (1 or more).

        Raises:
            MismatchError: the value at `path` is not a list.
            InvalidObjectError: no condition is given; use `push`.
        """
        write = append_if_at(path, value, absent=absent, limit=limit)
        return await self._operate_if(name, write) is not Absent.ABSENT

    async def add_to_set(self, name: str, path: Path, value: Json) -> list[Json] | None:
        """Add `value` to the list at `path`, unless the same JSON is in it.

        Raises:
            MismatchError: the value is not a list.
        """
        old = await self._operate(name, add_to_set_at(path, value))
        assert old is None or isinstance(old, list), "a set is a list"
        return old

    async def pop(self, name: str, path: Path) -> Json:
        """Remove the last element of the list at `path` and return it; None if the list is empty or
        missing.

        Raises:
            MismatchError: the value is not a list.
        """
        return await self._operate(name, Pop(steps_of(path)))

    async def merge(self, name: str, path: Path, patch: Document) -> Json:
        """Merge `patch` into the value at `path` (RFC 7396: null removes a key).

        Raises:
            MismatchError: a value along the path is not an object.
        """
        return await self._operate(name, merge_at(path, patch))

    async def delete(self, name: str, path: Path | None = None) -> Json:
        """Remove the value at `path`; without a path, the object itself."""
        return await self._operate(name, delete_at(path))

    async def collect(
        self,
        *,
        keep: float = KEEP_S,
        keep_ids: float = KEEP_IDS_S,
        pace: Callable[[], Awaitable[object]] | None = None,
    ) -> SeqNum:
        """Garbage-collect history: trim records that were superseded, and objects that were
        deleted, more than `keep` seconds ago.

        Objects do not change. Time travel reaches back `keep` seconds: earlier reads raise
        `TrimmedError`, and a transaction that began earlier gets `ConflictError`.

        Ids of transactions are forgotten after `keep_ids` seconds, or `keep` if that is longer. A
        held id (`transact(hold=True)`) is forgotten `keep` seconds after it was released. If no
        caller releases a held id, it is forgotten after `HELD_S_MAX` seconds. A transaction with an
        id must not last longer than ids are kept.

        Call it periodically, from any process, or use `collect_automatically`. Each call continues
        where the last one ended, so each record of the log is read once. A call may be interrupted.

        Args:
            keep: seconds of history that are kept.
            keep_ids: seconds for which ids are kept.
            pace: called after each piece of work, to pause there.

        Returns:
            The seqnum below which all records are processed.

        Raises:
            ValueError: `keep` or `keep_ids` is negative.
        """
        check_spans(keep, keep_ids)
        return await Collection(self.log, self._replay, pace).run(keep, keep_ids)

    async def collection_status(self, *, keep: float = KEEP_S) -> CollectionStatus:
        """Return how far collections of this log are, if `keep` seconds of history are kept."""
        check_spans(keep, keep)
        return await find_status(self.log, keep)

    def transaction(self, *, id: str | None = None) -> Transaction:  # noqa: A002
        """Begin a transaction: `async with store.transaction() as txn`.

        Args:
            id: idempotency key, so that the transaction takes effect at most once. Of all
                transactions with this id the first one commits, and the others get
                `AlreadyCommittedError`.

        Raises:
            InvalidObjectError: the id is not 1 to 252 bytes of text.
        """
        return Transaction(self.log, self._replay, id)

    async def transact(
        self,
        body: Callable[[Transaction], Awaitable[_ResultT]],
        *,
        id: str | None = None,  # noqa: A002
        hold: bool = False,
        retries: int = RETRIES,
    ) -> _ResultT:
        """Run `body` in a transaction, retry it after each conflict, and return its result.

        `body` may run several times; only the writes of the last run take effect. Of several
        conflicting transactions, one always commits, so there is always progress.

        With `id`, the transaction takes effect exactly once, however often this is called, also
        after a crash. The result is recorded with the writes. If a transaction with the id has
        already committed, `body` does not run, and the call returns the recorded result. The result
        is converted to JSON and back, so a tuple becomes a list. An id costs one more read.

        An id is known until a collection forgets it (`collect(keep_ids=...)`). With `hold`, it is
        known until its owner calls `release`, at most `HELD_S_MAX` seconds. A transaction whose id
        was forgotten takes effect again.

        Raises:
            ConflictError: the transaction conflicted more than `retries` times.
            AppendOutcomeUnknownError: with `id` only after `retries` further attempts, or if the
                log became unavailable meanwhile; repeat the call.
            InvalidObjectError: with `id`: the id or the result is invalid. Nothing was changed.
        """
        unknown: list[AppendOutcomeUnknownError] = []
        try:
            return await self._attempt_in_line(body, id, retries, unknown, hold=hold)
        except IndilogError as error:
            if not unknown or not error.retryable or isinstance(error, ConflictError):
                raise
            # An earlier attempt may have taken effect, so the caller must not get this error.
            raise AppendOutcomeUnknownError(
                f"The transaction {id!r} may have taken effect, and cannot be repeated now: {error}"
            ) from error

    async def _attempt_in_line(
        self,
        body: Callable[[Transaction], Awaitable[_ResultT]],
        txn_id: str | None,
        retries: int,
        unknown: list[AppendOutcomeUnknownError],
        *,
        hold: bool,
    ) -> _ResultT:
        """Do the same as `transact`. Add to `unknown` the errors of attempts that may have taken
        effect.
        """
        contender = Contender(self._cache.lines, self.log.name)
        try:
            for attempt in range(retries + 1):
                await contender.enter_log(self._begin_log_turn)
                turn = contender.log_turn
                group = await contender.group(partial(self._begin_group, turn))
                txn = Transaction(
                    self.log, self._replay, txn_id, contender,
                    hold=hold, releases=self._cache.releases, group=group, log_turn=turn,
                )  # fmt: skip
                try:
                    return await self._attempt_in_turn(body, txn, contender, group)
                except ConflictError:
                    if attempt == retries:
                        raise
                    await contender.wait_for_turn(await txn.changed_objects())
                except AppendOutcomeUnknownError as error:
                    if txn_id is None or attempt == retries:
                        raise
                    unknown.append(error)
            raise AssertionError("the last attempt returns or raises")
        except GeneratorExit:
            contender.leave()  # a coroutine that is closed cannot await the log
            raise
        finally:
            await contender.leave_all()

    async def _attempt_in_turn(
        self,
        body: Callable[[Transaction], Awaitable[_ResultT]],
        txn: Transaction,
        contender: Contender,
        group: Group[Transaction] | None,
    ) -> _ResultT:
        """Run an attempt; if it does not join its group, the group continues without it."""
        try:
            return await self._attempt(body, txn, contender)
        finally:
            if group is not None and contender.has_turn_of(group):
                await group.end_turn(contender)

    def _begin_group(self, turn: LogTurn | None) -> Group[Transaction]:
        releases = self._cache.releases
        whole = Transaction(self.log, self._replay, releases=releases, log_turn=turn, is_whole=True)
        return Group(whole)

    def _begin_log_turn(self) -> LogTurn:
        return LogTurn(self.log, self._replay)

    def release(self, *ids: str) -> None:
        """Release ids that `transact(hold=True)` has committed: no caller will use them.

        The next records of transactions with an id in this process name the released ids, 8 ids
        each. Then a collection may forget them, as it forgets the history of objects. If the
        process ends first, the release is lost. That costs only space: the id is known until
        `HELD_S_MAX`.

        Raises:
            InvalidObjectError: an id is invalid.
        """
        for txn_id in ids:
            id_tag_of(txn_id)
        self._cache.releases.add(self.log.name, ids)

    async def _attempt(
        self,
        body: Callable[[Transaction], Awaitable[_ResultT]],
        txn: Transaction,
        contender: Contender,
    ) -> _ResultT:
        try:
            async with txn:
                with contender.running():
                    result = txn.result = await body(txn)
        except AlreadyCommittedError as done:
            if done is not txn.refusal:
                raise  # the error is of another transaction, inside the body
            return done.result  # type: ignore[no-any-return]
        return result if txn.id is None else txn.result

    async def _operate_if(self, name: str, write: Conditional) -> Json | Absent:
        """Append one write with a condition, then read the value before it; `ABSENT`: the condition
        does not hold.
        """
        try:
            return await self._operate(name, write)
        except ConditionUnmetError:
            return Absent.ABSENT

    async def _operate(self, name: str, write: Write, indexes: Sequence[str] = ()) -> Json:
        """Append one write, then read the value before it."""
        check_own(name)
        tags = [tag_of(name), *map(tag_of, indexes)]
        raw = encode(write)
        await self._check_size(name, raw)
        if self._replay.known_line(name) and not is_inside_body():
            await wait_for_those_before(self.log, self._replay, name)
        writes = {name: [msgspec.Raw(raw)]}
        writes |= {index: [msgspec.Raw(encode(entry(name)))] for index in indexes}
        data = encode_command(writes)
        seqnum = await self.log.append(data, tags=tags)
        with append_outcome_unknown(seqnum):
            return await self._outcome(name, seqnum, write, raw)

    async def _check_size(self, name: str, raw: bytes) -> None:
        """Raise before the append, if this process knows that the object is almost too large.

        Raises:
            ObjectTooLargeError: the object would be too large.
        """
        cached = self._cache.view(self.log.name, name, MAX_SEQNUM)
        if cached is None or not may_be_too_large(cached.document or b"", len(raw)):
            return
        view = await self._replay.view(name)
        with suppress(MismatchError, ConditionUnmetError):  # the log decides that
            ObjectDocument(name, view.document).apply(_decode_write(raw), len(raw))

    async def _outcome(self, name: str, seqnum: SeqNum, write: Write, raw: bytes) -> Json:
        """Return the value at the path before the write at `seqnum`.

        Raises:
            MismatchError: the write does not fit the object.
        """
        before = await self._operations.view_before(name, seqnum)
        value = ObjectDocument(name, before.document)
        old = result_of(value.document, write)
        refused = None
        try:
            value.apply(_decode_write(raw), len(raw))
        except NO_EFFECT as error:
            refused = error
        view = ObjectView(
            seqnum, seqnum, value.text(), before.depth + 1, before.age + 1, before.line
        )
        await self._replay.keep({name: view}, seqnum, committed=True)
        if is_due(view) or (view.line and view.document and is_whole(write)):
            await self._replay.checkpoint(name, view)
        if refused is not None:
            raise refused
        return old
