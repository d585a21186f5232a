"""Which compute node is asked to take a call: the one with the fewest calls that may have room."""

from __future__ import annotations

from indilog.base.ids import NodeId
from indilog_compute.gateway.forwarding.headers import NodeLoad, deployment_in, load_in
from indilog_compute.gateway.forwarding.peers import LOAD_KEPT_S, UNREACHABLE_S, PeerTable

A, B, C = NodeId("engine-1"), NodeId("engine-2"), NodeId("engine-3")


def table_of(*nodes: NodeId) -> PeerTable:
    table = PeerTable()
    table.set_nodes(nodes)
    return table


def test_the_node_with_the_fewest_calls_is_chosen() -> None:
    table = table_of(A, B, C)
    for node, calls in ((A, 5), (B, 2), (C, 3)):
        table.answered(node, NodeLoad(calls, 8), 0.0)
    assert table.choose("app", 0.0) == B
    assert table.choose("app", 0.0, without={B}) == C


def test_calls_sent_since_an_answer_count_in_addition_to_the_load_that_it_said() -> None:
    table = table_of(A, B)
    table.answered(A, NodeLoad(1, 8), 0.0)
    table.answered(B, NodeLoad(2, 8), 0.0)
    table.sent(A)
    table.sent(A)
    assert table.choose("app", 0.0) == B


def test_a_full_node_is_asked_again_when_its_load_is_out_of_date() -> None:
    table = table_of(A)
    table.answered(A, NodeLoad(8, 8), 1.0)
    assert table.choose("app", 1.0 + LOAD_KEPT_S / 2) is None
    assert table.choose("app", 1.0 + LOAD_KEPT_S) == A


def test_nodes_of_unknown_load_are_chosen_by_the_calls_sent_to_them_and_then_by_turns() -> None:
    table = table_of(A, B, C)
    assert [table.choose("app", 0.0) for _ in range(4)] == [A, B, C, A]
    table.sent(B)
    table.sent(C)
    assert [table.choose("app", 0.0) for _ in range(2)] == [A, A]
    table.ended(B)
    assert table.choose("app", 0.0) == B


def test_a_refusal_holds_for_its_application_until_the_node_answers_a_call() -> None:
    table = table_of(A)
    table.refused(A, "greedy", NodeLoad(2, 8), 0.0)
    assert table.choose("greedy", 0.01) is None
    assert table.choose("other", 0.01) == A
    table.answered(A, NodeLoad(1, 8), 0.02)
    assert table.choose("greedy", 0.03) == A


def test_a_refusal_expires() -> None:
    table = table_of(A)
    table.refused(A, "app", None, 1.0)
    assert table.choose("app", 1.0) is None
    assert table.choose("app", 1.0 + LOAD_KEPT_S) == A


def test_a_node_that_could_not_be_reached_is_not_asked_for_a_while() -> None:
    table = table_of(A)
    table.unreachable(A, 5.0)
    assert table.choose("app", 5.0 + UNREACHABLE_S / 2) is None
    assert table.choose("app", 5.0 + UNREACHABLE_S) == A


def test_nodes_that_left_are_not_asked_and_forgotten() -> None:
    table = table_of(A, B)
    table.sent(B)
    table.set_nodes((B, C))
    assert table.choose("app", 0.0) == C
    table.ended(A)  # a call whose node left meanwhile
    table.answered(A, NodeLoad(0, 8), 0.0)
    table.set_nodes(())
    assert table.choose("app", 0.0) is None


def test_headers_of_a_forwarded_call_are_parsed_strictly() -> None:
    assert load_in(NodeLoad(3, 256).encode()) == NodeLoad(3, 256)
    assert [load_in(text) for text in (b"", b"3", b"3/", b"-1/2", b"3/2/1", b"1" * 19 + b"/2")] == (
        [None] * 6
    )
    assert deployment_in(b"17") == 17
    assert [deployment_in(text) for text in (b"", b"x", b"-1", b"1" * 19)] == [None] * 4
