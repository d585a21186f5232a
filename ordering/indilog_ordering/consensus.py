"""The consensus core of the ordering tier: a metalog on several sequencers, in the shape of Raft
(Ongaro and Ousterhout 2014; decision 0042).

It is pure: messages and the time in, messages and frames out. A *term* is a number from the
metadata store's sequence that one sequencer gets. So terms grow, and no two primaries share one.
Any sequencer may be the primary of any term, also of several consecutive ones. The *configuration*
is the sequencers of the newest view in a copy, committed or not. A *majority* is more than half of
the configuration.

1. **Promise.** A sequencer follows the newest term that it knows. It persists that term before it
   answers, and refuses messages of older terms, also after a restart (Raft 5.1).
2. **Log matching.** An entry carries the term in which it was proposed, and a primary proposes once
   at a position. A copy accepts entries only if its entry before them has the same term as the
   primary's. An entry that differs replaces the one at its position and all after it. So if two
   copies have entries of one term at one position, they are equal up to it (Raft 5.3).
3. **Seal.** A new primary sends `Seal` to all. When a majority has answered, it begins a second
   round. It waits until a majority of those nodes, in the same incarnations, has answered in this
   round. So there was an instant at which a majority, the *electors*, had all promised the term.
   The primary adopts the greatest copy of the electors, by last term and length; its own copy if
   that is greater. If the adopted copy has another configuration, the primary repeats this with a
   majority of that configuration.
4. **Commit.** An entry is committed when a majority durably has it and also an entry of the
   primary's own term (Raft 5.4.2). The first entry of a term is an empty one, the *fence*. The
   majority need not include the primary's own disk.
5. **Learners.** A node that may have lost entries or promises is a *learner*, and writes this to
   its disk before any other frame. It counts in no majority. It becomes a *voter* again in two
   steps. (a) It durably has all entries that a primary had at some instant, after that primary had
   received a message of this incarnation. (b) That primary then began a round, and a majority
   without the learner answered in it.
6. **Rounds.** A primary numbers its rounds, and answers repeat the newest number. If a majority has
   answered in a round, no newer primary had electors when the round began. So a tail that was
   committed then is linearizable (Raft 8, ReadIndex).
7. **Changes.** An entry adds or removes at most one sequencer, so majorities before and after it
   share a node. It is proposed only after two entries are committed: an entry of the primary's own
   term, and the entry of the newest view. The source is Raft 4.1 with its correction of 2015
   (decision 0053). A node outside the configuration gets entries before it joins, and counts in no
   majority.

*Leader completeness*: if an entry e was committed in term u, every primary of a term v > u adopts a
copy that has e. Let E be the majority that had e, and V the electors of v. Some node X is in both.

Suppose first that X did not lose its disk between its two answers. Then Raft's argument (5.4.3)
holds. X acknowledged e before it promised v, because it refuses messages of u after that promise.
So its copy ends at e or later. By induction over the terms between u and v, the greatest copy of V
has e.

Nodes that lost their disks remain. Take a learner W that a primary of term t restored. Let Q be the
majority without W that answered in the round of 5b, after the loss. Two claims suffice:

- *W has every e that it acknowledged before the loss.* There are three cases. If u < t: the
  electors of t and E share a node, which is W before its loss, or another node. So the primary of t
  adopted e, and W has e by 5a. If u = t: the primary had received a message of W's new incarnation.
  W's earlier incarnation acknowledged e before that, so 5a includes e. If u > t: the electors of u
  had promised u before e was proposed, so before the loss. Some node Y of Q was one of them, and
  would have refused the round of t, because t < u.
- *W keeps its promise.* Let W be an elector of v. All electors of v had promised v at one instant,
  and W lost its disk after that. Some node Y of Q was also an elector, and answered in term t, so t
  >= v. If Y had lost its disk in between, the same argument holds for Y, which was restored
  earlier. W followed t when it was restored, so it refuses u < v.

Without the second round of 3 the electors need not have promised at one instant. A node could
promise v, lose its disk, be restored by t < v, and acknowledge entries of t that v does not know.

A primary that is a learner itself is restored by the same rule: the second round of 3 is that of
5b. A *sole* sequencer is every majority: each entry on its disk is committed. It needs no promise,
no fence and no round, and its disk cannot be restored from others.

The proof uses that two majorities share a node. This also holds if their configurations differ. By
7 and 3, two primaries have the same configuration, or neighbouring ones. Otherwise the electors of
the later primary would include a node with the fence that the earlier one committed before its
change. Then the later primary would adopt that change. This is Raft's argument (dissertation 4.1)
for the owner of the adopted copy: the electors are a majority of the configuration in that copy,
and none of them has a greater copy.

Two assumptions are made: a sync is durable, and lost frames are detected (decisions 0009, 0022).
Sequencers of one process lose their unsynced frames together, so the nodes of a majority should run
in different processes.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import Config
from indilog.kernel.view import View
from indilog.roles.role import Effect, Ignore, Received
from indilog.wire.sequencer_messages import MetalogAppend, MetalogStored, Seal, Sealed
from indilog_ordering.leader import Leader
from indilog_ordering.member import Member
from indilog_ordering.stored_metalog import StoredMetalog


class Consensus:
    """One sequencer of the core.

    Args:
        node: this node.
        view: the newest view that is known to be installed.
        metalog: the copy here, recovered.
        incarnation: the incarnation of this node.

    Attributes:
        member: the copy and the promise.
        leader: the term that this node leads; None: it leads none.
    """

    def __init__(
        self,
        node: NodeId,
        view: View,
        metalog: StoredMetalog,
        incarnation: Epoch,
        config: Config,
    ) -> None:
        self._node = node
        self._config = config
        self.member = Member(metalog, view, incarnation, config)
        self.leader: Leader | None = None

    @property
    def is_outside(self) -> bool:
        """Whether a committed view lacks this node: the node has left, or has not joined yet."""
        member = self.member
        committed = max(member.committed, member.metalog.committed.position)
        lacks = self._node not in member.view.sequencers
        return lacks and member.metalog.view_end <= committed

    def begin(self) -> list[Effect]:
        """Return the first effects after a start."""
        return self.member.begin()

    def lead(self, term: Epoch) -> list[Effect]:
        """Become the primary of a term, which is newer than all terms that are known here."""
        assert term > self.member.term, "a term has one primary, and begins once"
        alone = len(self.member.view.sequencers) == 1
        effects = [] if alone else self.member.lead(term)
        if alone:
            self.member.term = term
        self.leader = Leader(self._node, self.member, term, self._config)
        return effects

    def retire(self) -> bool:
        """End this node's term if a newer one is known; return whether it ended."""
        if self.leader is None or not self.leader.deposed:
            return False
        self.leader = None
        return True

    def on_received(
        self, event: Received, message: Seal | Sealed | MetalogAppend | MetalogStored
    ) -> list[Effect]:
        """Handle a message of another sequencer."""
        leader = self.leader
        match message:
            case Seal():
                return self.member.on_seal(event, message)
            case MetalogAppend():
                return self.member.on_append(event, message)
            case Sealed() | MetalogStored() if leader is None or leader.deposed:
                return [Ignore(event, "an answer to a primary; this node is none")]
            case Sealed():
                return leader.on_sealed(event, message)
            case MetalogStored():
                return leader.on_stored(event, message)

    def advance(self, now: Instant) -> list[Effect]:
        """Answer as a member, and commit as a primary. Proposals follow, then `replicate`."""
        leader = self.leader
        if leader is None or leader.deposed:
            return self.member.advance()
        return leader.advance(now)

    def replicate(self, now: Instant) -> list[Effect]:
        """Send the other sequencers the entries that they lack."""
        return [] if self.leader is None else self.leader.replicate(now)

    def deadline(self) -> Instant | None:
        """When to call `advance` and `replicate` even without messages."""
        return None if self.leader is None else self.leader.deadline()

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        self.member.check_invariants()
        if self.leader is not None:
            self.leader.check_invariants()
