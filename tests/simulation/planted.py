"""Bugs planted in the code: the simulator must catch each, which shows that its checkers can fail.

A bug replaces a piece of a source file while the module is imported. So it runs in a process of its
own: `python -m tests.simulation.planted NAME`. `python -m tests.simulation --planted` runs all of
them and reports which check caught which bug, and at which seed.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final, NamedTuple

from tests.consensus.change_bugs import CHANGE_BUGS
from tests.simulation.bugs.shard_bugs import SHARD_BUGS

ROOT: Final = Path(__file__).resolve().parents[2]
SEEDS_MAX: Final = 400
"""Seeds that may be tried until a planted bug is caught."""
_STATES_MAX: Final = 2_000
_WALKS: Final = 2_000
"""Sizes of the searches that judge a bug of the consensus core."""


class Bug(NamedTuple):
    """One bug.

    Attributes:
        file: which source it is in, from the root of the project.
        old: the source text that is replaced; it occurs once.
        new: its replacement.
        consensus: whether the searches of `tests.consensus` judge it; otherwise the simulator does.
    """

    name: str
    file: str
    old: str
    new: str
    consensus: bool = False

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        folder, _, inner = self.file.removesuffix(".py").partition("/")
        path = inner if inner.startswith(f"indilog_{folder.removesuffix('_tier')}/") else self.file
        return path.removesuffix(".py").replace("/", ".")

    def planted(self) -> str:
        """Return the source with the bug.

        Raises:
            ValueError: the source does not contain `old` exactly once; `BUGS` must be updated.
        """
        source = (ROOT / self.file).read_text()
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {count} times in {self.file}, not once")
        return source.replace(self.old, self.new)


BUGS: Final = (
    # --- ordering
    Bug(
        "the largest prefix of the replicas is ordered, not the smallest",
        "ordering/indilog_ordering/progress.py",
        "reverse=True)[self._ack_quorum - 1]",
        "reverse=True)[0]",
    ),
    Bug(
        "one report is enough for a quorum",
        "ordering/indilog_ordering/progress.py",
        "if len(self._stored) < self._ack_quorum:",
        "if not self._stored:",
    ),
    Bug(
        "a primary waits for a report that was lost",
        "ordering/indilog_ordering/primary.py",
        "        if message.epoch != earlier:\n",
        "        if message.epoch >= earlier:\n",
    ),
    Bug(
        "reports under an earlier writer of the shard count",
        "ordering/indilog_ordering/progress.py",
        "if epoch != self.epoch or self._ended or self._stored",
        "if self._ended or self._stored",
    ),
    Bug(
        "an entry counts as ordered only in the next one",
        "ordering/indilog_ordering/primary.py",
        "self._cut[shard] = progress\n",
        "self._cut[shard] = progress - 1\n",
    ),
    Bug(
        "a page of missed entries for a backup lacks one",
        "ordering/indilog_ordering/leader.py",
        "entries = metalog.page(start, end,",
        "entries = metalog.page(start + 1, end,",
    ),
    Bug(
        "a metalog entry recovered from disk replaces nothing",
        "ordering/indilog_ordering/stored_metalog.py",
        "        if position < len(self):\n            self._cut_off(position)\n",
        "",
    ),
    # --- the consensus core
    Bug(
        "entries of earlier terms are committed without one of the own term",
        "ordering/indilog_ordering/leader.py",
        "if end > max(self.committed, self.recovered):",
        "if end > self.committed:",
        consensus=True,
    ),
    Bug(
        "a promise is not written",
        "ordering/indilog_ordering/stored_metalog.py",
        "        return self._record(MetalogState(term, self.written.learner, self.extent))",
        "        return self._record(MetalogState(Epoch(term), self.written.learner, self.extent))"
        "._replace(payload=encode_state(MetalogState(Epoch(0), False, self.extent)))",
        consensus=True,
    ),
    Bug(
        "a learner counts",
        "ordering/indilog_ordering/leader.py",
        "        if not learner:\n            member.voter",
        "        if learner is not None:\n            member.voter",
        consensus=True,
    ),
    Bug(
        "a wiped primary counts its own disk",
        "ordering/indilog_ordering/leader.py",
        "return promised and not self._metalog.learner",
        "return promised",
        consensus=True,
    ),
    Bug(
        "a wiped sequencer does not mark its disk",
        "ordering/indilog_ordering/member.py",
        "if self.metalog.written.learner else []",
        "if self.metalog.written.promised < 0 else []",
        consensus=True,
    ),
    Bug(
        "a new primary continues with the copy that it has",
        "ordering/indilog_ordering/leader.py",
        "        if extents[owner] <= self._metalog.extent:",
        "        if extents[owner].length >= 0:",
        consensus=True,
    ),
    Bug(
        "a new primary adopts the shortest copy",
        "ordering/indilog_ordering/leader.py",
        "owner = max(extents, key",
        "owner = min(extents, key",
        consensus=True,
    ),
    Bug(
        "entries are acknowledged that were not compared with the primary's",
        "ordering/indilog_ordering/member.py",
        "matched = min(self._matched, metalog.stored)",
        "matched = metalog.stored",
        consensus=True,
    ),
    Bug(
        "entries are appended after an entry of another term",
        "ordering/indilog_ordering/stored_metalog.py",
        "self.base.position <= start <= len(self) and self.epoch_before(start) == previous",
        "self.base.position <= start <= len(self) and previous >= 0",
        consensus=True,
    ),
    Bug(
        "an entry that differs stays",
        "ordering/indilog_ordering/member.py",
        "            if ours != theirs:",
        "            if ours.position != theirs.position:",
        consensus=True,
    ),
    Bug(
        "half of the sequencers are a majority",
        "ordering/indilog_ordering/leader.py",
        "self._majority = majority(nodes)",
        "self._majority = max(1, len(nodes) // 2)",
        consensus=True,
    ),
    Bug(
        "a tail is answered when a round that began before the question is confirmed",
        "ordering/indilog_ordering/leader.py",
        "        return self._round + 1\n",
        "        return self._round\n",
        consensus=True,
    ),
    Bug(
        "a damaged copy counts",
        "ordering/indilog_ordering/stored_metalog.py",
        "            self.learner = True\n        self._doubtful",
        "            self.learner = False\n        self._doubtful",
        consensus=True,
    ),
    Bug(
        "a learner counts again without a round",
        "ordering/indilog_ordering/member_progress.py",
        "self.stored >= until[0] and confirmed >= until[1]",
        "self.stored >= until[0] and confirmed >= 0",
        consensus=True,
    ),
    Bug(
        "a primary adopts after one round of seals",
        "ordering/indilog_ordering/leader.py",
        "if _sealed_before(member, self._round) and member.echoed == self._round",
        "if member.voter and member.sealed_in is not None",
        consensus=True,
    ),
    *(Bug(*bug, consensus=True) for bug in CHANGE_BUGS),
    Bug(
        "entries leave before the reports on which they rest are synced",
        "indilog/runtime/node.py",
        "if node in promising and effect.message.promises:",
        "if node in promising and not effect.message.promises:",
    ),
    # --- failover
    Bug(
        "a primary continues after a newer term has begun",
        "ordering/indilog_ordering/consensus.py",
        "if self.leader is None or not self.leader.deposed:",
        "if self.leader is None or self.leader.committed >= 0:",
    ),
    Bug(
        "incarnations of two primaries are compared",
        "indilog/roles/metalog_reader.py",
        "        if elsewhere:\n            self._incarnation = Epoch(0)\n",
        "",
    ),
    Bug(
        "a wall clock that is a year ahead at a start is accepted",
        "ordering/indilog_ordering/entry_clock.py",
        "0 <= wall_us - last_us <= gap_s_max * _US",
        "0 <= wall_us - last_us",
    ),
    Bug(
        "the time of entries goes back with the wall clock",
        "ordering/indilog_ordering/entry_clock.py",
        "last_us == 0 or 0 <= wall_us - last_us",
        "last_us == 0 or wall_us < last_us or 0 <= wall_us - last_us",
    ),
    Bug(
        "reports from before a storage node lost its disk still count",
        "ordering/indilog_ordering/primary.py",
        "        self._reports.forget(node)\n",
        "",
    ),
    Bug(
        "a base names the proposer of its first entry for its last one",
        "indilog/kernel/metalog.py",
        "        return super().apply(entry)\n",
        "        last = self.last\n"
        "        spans = super().apply(entry)\n"
        "        self.last = last or entry.epoch\n"
        "        return spans\n",
    ),
    Bug(
        "a request for entries below the base is answered with those after it",
        "ordering/indilog_ordering/primary.py",
        "        if start < self._metalog.base.position:\n"
        "            return [Send(event.sender, MetalogBase(self._metalog.base,"
        " message.request))]\n",
        "        start = max(start, self._metalog.base.position)\n",
    ),
    # --- readers of the metalog
    Bug(
        "a reader applies entries that do not continue those of its primary",
        "indilog/kernel/lineage.py",
        "        if start == self.position and previous == self._epochs[-1]:\n",
        "        if start <= self.position:\n",
    ),
    # --- storage
    Bug(
        "a record's time is that of its writer, not that of its ordering",
        "storage/indilog_storage/record_reads.py",
        "ordered_us = self._applied.ordered_us(seqnum)",
        "ordered_us = raw.time_us",
    ),
    Bug(
        "a batch that leaves a gap is stored",
        "storage/indilog_storage/appends.py",
        "        if header.first == shard.written:",
        "        if header.first >= shard.written:",
    ),
    Bug(
        "stored prefixes are never resent",
        "storage/indilog_storage/appends.py",
        "if report.due is not None and now >= report.due:",
        "if report.due is None and now < 0:",
    ),
    Bug(
        "a restart forgets the writer of a shard",
        "storage/indilog_storage/recovery.py",
        "shard.begin(writer)",
        "shard.check_invariants()",
    ),
    Bug(
        "a new writer keeps what the one before stored and no entry ordered",
        "storage/indilog_storage/shard.py",
        "runs = [run for run in self._runs if run[1] >= writer]",
        "runs = list(self._runs)",
    ),
    Bug(
        "a read beyond the applied metalog is answered at once",
        "storage/indilog_storage/record_reads.py",
        "if (last := max(message.seqnums)) >= applied.tail:",
        "if (last := max(message.seqnums)) >= 1 << 62:",
    ),
    Bug(
        "a seqnum at the start of a span is looked for in the one before",
        "storage/indilog_storage/shard.py",
        "bisect_right(self._span_seqnums, seqnum) - 1",
        "bisect_right(self._span_seqnums, seqnum - 1) - 1",
    ),
    Bug(
        "index nodes are notified that live records are discarded",
        "storage/indilog_storage/shard.py",
        "np.array(self._segments[start:stop], np.uint32) == _GONE",
        "np.array(self._segments[start:stop], np.uint32) != _HOLE",
    ),
    # --- index tier and feeds
    Bug(
        "an index node answers before it has applied the lookup's prefix",
        "index_tier/indilog_index/index_node.py",
        "if lookup.position <= self._feed.position and self._rests",
        "if lookup.position >= 0 and self._rests",
    ),
    Bug(
        "the first answer of an index shard is taken for all",
        "index_tier/indilog_index/merging.py",
        "if len(pending.answered) == pending.index_shards:",
        "if pending.answered:",
    ),
    Bug(
        "the worst match is taken for the best",
        "index_tier/indilog_index/merging.py",
        "reverse=self.direction is Direction.PREV,",
        "reverse=self.direction is Direction.NEXT,",
    ),
    Bug(
        "the index leaves out the bound itself",
        "index_tier/indilog_index/tag_index.py",
        "start = bisect_left(column, bound)",
        "start = bisect_right(column, bound)",
    ),
    Bug(
        "index data is taken before all shards have sent their part",
        "indilog/roles/index_feed.py",
        "gathering is None or gathering.missing",
        "gathering is None",
    ),
    Bug(
        "an index node that missed data does not fetch it",
        "index_tier/indilog_index/index_node.py",
        "            effects = self._begin_fetch(end)",
        "            effects = []",
    ),
    Bug(
        "an index node keeps the rows of replaced entries",
        "index_tier/indilog_index/index_node.py",
        "        if (replaced := self._replaced_by(data)) is not None:\n",
        "        if (replaced := self._replaced_by(data)) is not None and replaced < 0:\n",
    ),
    Bug(
        "lost records are said to have no tags",
        "storage/indilog_storage/index_data.py",
        "        if taken.lost:\n",
        "        if taken.lost and not taken.counts:\n",
    ),
    Bug(
        "an index node answers across lost records",
        "index_tier/indilog_index/index_node.py",
        "lost = () if exact else crossed(",
        "lost = () if lookup else crossed(",
    ),
    # --- compute
    Bug(
        "an engine ignores the floors of trims",
        "compute/indilog_compute/reads/log_floors.py",
        "        for floor in trim.floors:\n            self._ahead",
        "        for floor in ():\n            self._ahead",
    ),
    Bug(
        "a writer acknowledges after another one has its shard",
        "compute/indilog_compute/shard_writer.py",
        "        if epoch > self.epoch:\n",
        "        if epoch > 1 << 62:\n",
    ),
    Bug(
        "a lost batch is not resent",
        "compute/indilog_compute/shard_writer.py",
        "        effects += self._to_all(ShardStoredWanted(self.shard, self.epoch))\n",
        "",
    ),
    Bug(
        "the limit of waiting appends is ignored",
        "compute/indilog_compute/shard_writer.py",
        "        records_left = self._pending_max - self.pending\n",
        "        records_left = 1 << 62\n",
    ),
    Bug(
        "reads are answered before the session's position is applied",
        "compute/indilog_compute/reads/reads.py",
        "if local is None or operation.position > local.tag_position:",
        "if local is None:",
    ),
    Bug(
        "the local index answers a session that is ahead of it",
        "compute/indilog_compute/engine.py",
        "if local is not None and position <= local.tag_position and not fresh:",
        "if local is not None and not fresh:",
    ),
    Bug(
        "the tag cache answers one below what it holds",
        "compute/indilog_compute/local_index/tag_rows.py",
        "                return Found(*self.minimum)\n            return MISS\n"
        "        index = bisect_left(self.seqnums, bound)",
        "                return Found(*self.minimum)\n            if bound < self.head - 1:\n"
        "                return MISS\n        index = bisect_left(self.seqnums, bound)",
    ),
    Bug(
        "records of other writers do not extend the rows of the tag cache",
        "compute/indilog_compute/local_index/tag_cache.py",
        "            if row is None:\n"
        "                if not is_own and not begins_row(tag):\n"
        "                    continue\n",
        "            if not is_own and not begins_row(tag):\n"
        "                continue\n"
        "            if row is None:\n",
    ),
    Bug(
        "the suffix answers that a record is at its tail",
        "compute/indilog_compute/local_index/suffix.py",
        "        if bound >= self.tail:\n            return EMPTY\n        return Found(bound",
        "        if bound > self.tail:\n            return EMPTY\n        return Found(bound",
    ),
    Bug(
        "index data does not wake the watches of the newest record",
        "compute/indilog_compute/reads/watches.py",
        "if bound < block.tail]",
        "if bound < block.tail - 1]",
    ),
    Bug(
        "a session does not remember what it has appended",
        "compute/indilog_compute/local_log.py",
        "            session.position = position\n",
        "            pass\n",
    ),
    Bug(
        "an answer over a link has the position from before the operation",
        "compute/indilog_compute/log_service.py",
        "            answer_at = await _execute(log, question)\n"
        "            answer = answer_at(session.position)\n",
        "            before = session.position\n"
        "            answer_at = await _execute(log, question)\n"
        "            answer = answer_at(before)\n",
    ),
    Bug(
        "the answer to a batch over a link has the position from before it",
        "compute/indilog_compute/log_service.py",
        "            seqnums = tuple(await log.append_batch(entries, after=question.after))\n"
        "            return lambda at: Appended(at, seqnums)\n",
        "            seqnums = tuple(await log.append_batch(entries, after=question.after))\n"
        "            return lambda _: Appended(question.position, seqnums)\n",
    ),
    # --- conditional appends
    Bug(
        "a condition is checked against a stale tail",
        "compute/indilog_compute/conditional/home.py",
        "fresh=check.stage is AppendStage.QUEUED,",
        "fresh=False,",
    ),
    Bug(
        "a condition is checked while records of an earlier writer are not ordered",
        "compute/indilog_compute/conditional/conditional_appends.py",
        "(ordered or 0) >= writer.barrier",
        "(ordered or 0) >= 0",
    ),
    Bug(
        "a condition is checked while an append that timed out is not ordered",
        "compute/indilog_compute/shard_writer.py",
        "            self.barrier = max(self.barrier, batch.end)\n",
        "",
    ),
    Bug(
        "conditions on one tag are checked at the same time",
        "compute/indilog_compute/conditional/home.py",
        "                if queue[0].stage is AppendStage.QUEUED:\n"
        "                    outcomes += self._read(queue[0], reads, MAX_SEQNUM)\n",
        "                for check in list(queue):\n"
        "                    if check.stage is AppendStage.QUEUED:\n"
        "                        outcomes += self._read(check, reads, MAX_SEQNUM)\n",
    ),
    Bug(
        "a repeated request is executed again by the home of its tag",
        "compute/indilog_compute/served_requests.py",
        "return request in self._answers or request <= self._forgotten",
        "return request <= self._forgotten",
    ),
    # --- subscriptions, limits, tags and retention
    Bug(
        "a subscription skips the record after a page",
        "indilog/base/subscription.py",
        "                bound = page[-1].seqnum + 1\n",
        "                bound = page[-1].seqnum + 2\n",
    ),
    Bug(
        "a subscription reads ahead from where it was",
        "indilog/base/subscription.py",
        "                bound = page[-1].seqnum + 1\n",
        "                bound = page[0].seqnum + 1\n",
    ),
    Bug(
        "records on cold storage that does not answer count as lost",
        "compute/indilog_compute/reads/storage_questions.py",
        "if seqnum not in wanted or seqnum in operation.away:",
        "if seqnum not in wanted:",
    ),
    Bug(
        "a page of one record is refused when storage sends it",
        "compute/indilog_compute/reads/operation.py",
        "if self.count > 1 or len(seqnums) > 1:",
        "if self.page or len(seqnums) > 1:",
    ),
    Bug(
        "a batch of exactly the largest size is refused",
        "compute/indilog_compute/local_log.py",
        "if size > limits.batch_bytes_max:",
        "if size >= limits.batch_bytes_max:",
    ),
    Bug(
        "a record one byte larger than the limit is accepted",
        "indilog/base/log.py",
        "if len(data) > bytes_max:",
        "if len(data) > bytes_max + 1:",
    ),
    Bug(
        "a tag is new as soon as one index shard knows no record",
        "compute/indilog_compute/reads/tag_questions.py",
        "        if not question.missing:\n            self._end_firsts",
        "        if question.tags:\n            self._end_firsts",
    ),
    Bug(
        "a tag has the same hash in all logs",
        "indilog/base/ids.py",
        'f"{log}\\x1f{name}".encode()',
        'f"{log if not name else None}\\x1f{name}".encode()',
    ),
    Bug(
        "a policy's age counts half",
        "compute/indilog_compute/retention.py",
        "max(0.0, now - age_s)",
        "max(0.0, now - age_s / 2)",
    ),
    Bug(
        "a policy keeps half of its size",
        "compute/indilog_compute/retention.py",
        "excess = self._read_bytes - self._size_bytes",
        "excess = self._read_bytes - self._size_bytes // 2",
    ),
    Bug(
        "a policy that replaces another is not enforced",
        "compute/indilog_compute/retention.py",
        "if kept is None or kept.policy != policy:",
        "if kept is None:",
    ),
    # --- finalized, moved and rebalanced shards
    *(Bug(*bug) for bug in SHARD_BUGS),
    # --- shell and journal
    Bug(
        "the shell writes and does not sync",
        "indilog/runtime/node.py",
        "            self._synced_in(_seconds_of(self._journal.sync_flushed))\n",
        "            self._synced_in(0.0)\n",
    ),
    Bug(
        "every message leaves before the sync",
        "indilog/runtime/transport/outbox.py",
        "self._leave_early and not message.promises",
        "message is not None",
    ),
    Bug(
        "callers are answered before the sync",
        "indilog/runtime/node.py",
        "        self._outbox.send_early()\n        if self.rewriting",
        "        self._outbox.send_early()\n"
        "        self._release_answers(self._held)\n        self._held = []\n"
        "        if self.rewriting",
    ),
    Bug(
        "a sync does not reach the disk",
        "indilog/runtime/journal/journal.py",
        "            os.fdatasync(fd)",
        "            fd + 0",
    ),
    Bug(
        "a restart counts the page cache as durable",
        "indilog/runtime/journal/journal.py",
        "        write_again(self.files.fd(file.first), again_from, scan.written)\n",
        "",
    ),
    Bug(
        "pages that could not be written are synced again but not rewritten",
        "indilog/runtime/journal/segment_scan.py",
        "        write_all(fd, [os.pread(fd, min(_CHUNK_BYTES, end - offset), offset)], offset)",
        "        fd += 0",
    ),
    Bug(
        "two syncs of one file overlap, and only one gets the error",
        "indilog/runtime/journal/journal.py",
        "        with self._lock:\n            self._check_alive()\n"
        "            if self._frames_flushed > self._frames_synced:\n"
        "                self._sync_active()",
        "        frames, number, flushed = self._frames_flushed, self._number, self._flushed\n"
        "        if frames > self._frames_synced:\n"
        "            self._sync(self.files.fd(number))\n"
        "        self._frames_synced = max(self._frames_synced, frames)\n"
        "        if number == self._number:\n"
        "            self._synced = max(self._synced, flushed)",
    ),
    Bug(
        "a rewritten segment gets its name before it is on the disk",
        "indilog/runtime/journal/segment_rewrite.py",
        "        os.fdatasync(self._fd)",
        "        self._fd += 0",
    ),
    Bug(
        "a frame that a rewrite moved is read at its old place",
        "indilog/runtime/journal/moved_frames.py",
        "        return file, places.offsets[index]",
        "        return file, name.offset",
    ),
    Bug(
        "a live batch is taken for dead when its segment is rewritten",
        "storage/indilog_storage/rewritten.py",
        "    if shard.is_gone(header.first) and shard.is_gone(header.end - 1):",
        "    if header.end <= shard.ordered and floors.highest:",
    ),
    Bug(
        "live records become tombstones with the dead ones",
        "storage/indilog_storage/rewritten.py",
        "    return batch.with_tombstones(dead.tolist())",
        "    return batch.with_tombstones([True] * len(dead))",
    ),
    Bug(
        "a damaged frame counts as intact",
        "indilog/runtime/journal/segment.py",
        "        return crc32c(payload) == header.payload_crc",
        "        return True",
    ),
    # --- checkpoints
    Bug(
        "a checkpoint leaves out what was written while it was being made",
        "indilog/runtime/journal/checkpointing.py",
        "self._writing = self._journal.spare.pool.submit(self._write, taken)",
        "place = self._journal.begin_checkpoint()\n"
        "                taken = taken._replace(place=place)\n"
        "                self._writing = self._journal.spare.pool.submit(self._write, taken)",
    ),
    Bug(
        "a checkpoint is written before the frames before it are durable",
        "indilog/runtime/journal/checkpointing.py",
        "            if self._journal.reached(taken.mark):",
        "            if taken:",
    ),
    Bug(
        "a checkpoint counts uncommitted entries as committed",
        "ordering/indilog_ordering/stored_metalog.py",
        "        assert not self._unstored, ",
        "        self.commit(len(self))\n        assert not self._unstored, ",
    ),
    Bug(
        "a damaged checkpoint is an empty state",
        "indilog/runtime/journal/checkpoint_files.py",
        'what="its body")\n        return None',
        'what="its body")\n        return Loaded(place, Checkpoint({}, frozenset(), ()))',
    ),
    Bug(
        "a segment after the checkpoint is rewritten as one before it",
        "indilog/runtime/journal/rewriting.py",
        "batches_only=files[-1].last < journal.old.floor",
        "batches_only=files[-1].last > 0",
    ),
    Bug(
        "a restart forgets the discards since the checkpoint",
        "storage/indilog_storage/recovery.py",
        "shard.discard_all(gone.first, gone.end)",
        "shard.discard_all(gone.first, gone.first)",
    ),
    Bug(
        "an index node continues one position after its checkpoint's",
        "index_tier/indilog_index/index_node.py",
        "            self._resume_from(kept.info)\n",
        "            self._resume_from(kept.info)\n"
        "            self._feed = self._feed_from(kept.info.position + 1)\n",
    ),
)


class _Loader(SourceFileLoader):
    """Loads a module with a bug in it."""

    def __init__(self, bug: Bug) -> None:
        super().__init__(bug.module, str(ROOT / bug.file))
        self._bug = bug

    def get_code(self, fullname: str) -> CodeType:
        """Compile the planted source; nothing is cached."""
        return compile(self._bug.planted(), self.get_filename(fullname), "exec")


class Planting(importlib.abc.MetaPathFinder):
    """Finds the module of a bug, with the bug."""

    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the one module; None for all others."""
        if fullname != self._bug.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        spec.loader = _Loader(self._bug)
        return spec


def main() -> int:
    """Run seeds with one bug until it is caught; print seed and checks as JSON."""
    parser = argparse.ArgumentParser("tests.simulation.planted", description=main.__doc__)
    parser.add_argument("name", choices=[bug.name for bug in BUGS], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="how many seeds to try")
    parser.add_argument("--first", type=int, help="a seed to try before the others")
    given = parser.parse_args()
    bug = next(bug for bug in BUGS if bug.name == given.name)
    assert bug.module not in sys.modules, "planted before it is imported"
    sys.meta_path.insert(0, Planting(bug))
    if bug.consensus:
        return _explore()
    from tests.simulation.run import run_seed

    first = [] if given.first is None else [given.first]
    for seed in (*first, *range(given.seeds)):
        if violations := run_seed(seed).violations:
            checks = sorted({violation.check for violation in violations})
            _say({"seed": seed, "checks": checks, "first": violations[0].what})
            return 0
    _say({"seed": None, "checks": [], "first": ""})
    return 1


def _explore() -> int:
    """Search until the bug is caught; the seed is the number of the search."""
    from tests.consensus.explorer import search

    for number, (_, explored) in enumerate(search(_STATES_MAX, _WALKS)):
        if explored.found is not None:
            _say({"seed": number, "checks": ["consensus"], "first": explored.found.what})
            return 0
    _say({"seed": None, "checks": [], "first": ""})
    return 1


def _say(found: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.exit(main())
