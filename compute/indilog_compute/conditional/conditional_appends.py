"""The conditional appends of one compute node (docs/decisions/0043).

If the node is the home of a tag, it executes the appends of all callers in the cluster for this
tag (`Home`), each request of another node at most once (`ServedRequests`). For any other tag, the
node sends the appends of its own callers to the home of the tag (`HomeRequests`). `Engine` calls
`ConditionalAppends`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    IndilogError,
    OverloadedError,
    SealedError,
)
from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, TagHash
from indilog.config import NodeConfig
from indilog.kernel.placement import Placement
from indilog.link.link_messages import failed
from indilog.roles.role import Answer, AnswerAppends, Effect, Ignore, Received, Send
from indilog.wire.conditional_messages import (
    ConditionalAnswer,
    ConditionalAppend,
    HomeIs,
    HomeWanted,
)
from indilog_compute.conditional.home import Conditional, Home, Outcome, Requested, Result
from indilog_compute.conditional.home_requests import HomeRequests, home_of
from indilog_compute.reads.operation import Answered
from indilog_compute.reads.reads import Reads
from indilog_compute.served_requests import ServedRequests
from indilog_compute.shard_writer import ShardWriter, Takeover

_REFUSING = (Takeover.LOST, Takeover.STOPPED)


class ConditionalAppends:
    """The conditional appends of one compute node."""

    def __init__(self, node: NodeId, placement: Placement, config: NodeConfig) -> None:
        self._node = node
        self._placement = placement
        self._home = Home(config)
        self._requests = HomeRequests(config)
        self._served: dict[NodeId, ServedRequests[ConditionalAnswer]] = defaultdict(ServedRequests)
        self._epoch = Epoch(0)
        self._had_shard = False
        """Whether this incarnation has had a shard."""

    def __len__(self) -> int:
        return len(self._home) + len(self._requests)

    @property
    def awaits_answers(self) -> bool:
        """Whether an append may need `advance` after this iteration."""
        return self._home.awaits_answers or bool(self._requests)

    def started(self, epoch: Epoch, request: int) -> None:
        """Note this node's incarnation, and number its requests above `request`."""
        self._epoch = epoch
        self._requests.number_from(request)

    def start(self, append: Conditional, waiter: object) -> None:
        """Start an append. The waiter gets `Ordered`, an error, or `Answered` with an error.

        Raises:
            OverloadedError: too many conditional appends are in flight.
        """
        home = self._home_of(append.tag)
        if home == self._node:
            self._home.add(append, waiter)
        else:
            self._requests.start(append, home, waiter)

    def _home_of(self, tag: TagHash) -> NodeId:
        return home_of(self._placement.view.conditional_homes, tag)

    def _is_home(self, tag: TagHash) -> bool:
        return self._home_of(tag) == self._node

    def follow_view(self, now: Instant) -> list[Effect]:
        """Restart the appends with a new home, unless the old home may have executed them."""
        effects: list[Effect] = []
        for append, waiter in self._requests.follow(self._placement.view.conditional_homes, now):
            try:
                self.start(append, waiter)
            except OverloadedError as error:
                effects.append(Answer(waiter, error))
        return effects

    def on_message(self, event: Received, now: Instant) -> list[Effect]:
        """Handle a question or an answer of another compute node."""
        message, sender = event.message, event.sender
        if sender not in self._placement.view.engines:
            return [Ignore(event, "a conditional append of a node that is no compute node")]
        match message:
            case HomeWanted():
                return [self._home_is(event, message)]
            case HomeIs():
                return self._requests.on_home(sender, message, event.incarnation, now)
            case ConditionalAppend():
                return self._on_append(sender, message)
            case ConditionalAnswer():
                return self._requests.on_answer(sender, message, now)
            case _:
                return [Ignore(event, "not a message of conditional appends")]

    def _home_is(self, event: Received, message: HomeWanted) -> Effect:
        if self._placement.view.shard_written_by(self._node) is None:
            return Ignore(event, "a request to check a condition, sent to a node without a shard")
        return Send(event.sender, HomeIs(message.request))

    def _on_append(self, sender: NodeId, message: ConditionalAppend) -> list[Effect]:
        to = Requested(sender, message.request)
        if message.home != self._epoch:
            unknown = AppendOutcomeUnknownError(
                f"Compute node {self._node} has restarted; the records may or may not be in the "
                "log."
            )
            return [self._answer(Result(to, unknown))]
        append = Conditional(message.log, message.after, message.records)
        served = self._served[sender]
        if not served.begin(message.request):
            answer = served.answer(message.request)
            return [] if answer is None else [Send(sender, answer)]
        try:
            self._home.add(append, to)
        except OverloadedError as error:
            return [self._answer(Result(to, error))]
        return []

    def advance(
        self,
        effects: Sequence[Effect],
        now: Instant,
        reads: Reads,
        writer: ShardWriter | None,
        ordered: int | None,
    ) -> list[Effect]:
        """Advance the conditional appends with the answers in `effects`. Return the other effects
        and the new ones.

        Args:
            effects: effects of the iteration so far.
            now: the time.
            reads: reads of this node.
            writer: writer of this node's shard; None: this node has no shard.
            ordered: number of ordered records of the shard; None: this node has not joined, or has
                no shard.
        """
        outcomes = self._home.take(effects, reads, writer)
        refusal: IndilogError | None = None
        barrier_reached = False
        if writer is None and self._had_shard:
            refusal = SealedError("This compute node has no shard any more; append elsewhere.")
        elif writer is not None:
            self._had_shard = True
            refusal = writer.refusal() if writer.takeover in _REFUSING else None
            barrier_reached = writer.takeover is Takeover.OPEN and (ordered or 0) >= writer.barrier
        outcomes += self._home.begin(
            now,
            reads,
            is_home=self._is_home,
            barrier_reached=barrier_reached and ordered is not None,
            refusal=refusal,
        )
        return [*self._answered(outcomes), *self._requests.begin(now)]

    def _answered(self, outcomes: Sequence[Outcome]) -> list[Effect]:
        """Return the outcomes as effects: a result for another node becomes a message to it."""
        return [self._answer(o) if isinstance(o, Result) else o for o in outcomes]

    def _answer(self, result: Result) -> Send:
        to, outcome = result
        answer = _answer_of(to.request, outcome)
        self._served[to.sender].end(answer)
        return Send(to.sender, answer)

    def deadline(self) -> Instant | None:
        """When to call `advance` again; None: nothing waits."""
        times = (self._home.deadline(), self._requests.deadline())
        return min((time for time in times if time is not None), default=None)

    def abandon(self, effects: Sequence[Effect], error: IndilogError, reads: Reads) -> list[Effect]:
        """Return the answers to callers of this node that `effects` contain, and drop all other
        effects. Fail all appends that these answers do not end.
        """
        outcomes = self._home.take(effects, reads, None) + self._home.abandon(error)
        return [
            *(o for o in outcomes if isinstance(o, Answer)), *self._requests.abandon(error)
        ]  # fmt: skip

    def check_invariants(self) -> None:
        """Assert the invariants of both parts."""
        self._home.check_invariants()
        self._requests.check_invariants()


def _answer_of(request: int, outcome: AnswerAppends | Answered | Exception) -> ConditionalAnswer:
    if isinstance(outcome, AnswerAppends):
        return ConditionalAnswer(request, outcome.position, outcome.first)
    error: object = outcome
    position: MetalogPosition = 0
    if isinstance(outcome, Answered):
        error, position = outcome
    assert isinstance(error, Exception), "an append without effect has an error"
    failure = failed(error)
    return ConditionalAnswer(
        request, position, kind=failure.kind, message=failure.message, attributes=failure.attributes
    )
