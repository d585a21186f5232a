"""Graphs of friends: generated and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from functions.social.graph import GraphError, friendships, read_graph, synthetic_graph


def test_the_same_seed_gives_the_same_graph() -> None:
    assert synthetic_graph(people=100, seed=3) == synthetic_graph(people=100, seed=3)
    assert synthetic_graph(people=100, seed=3) != synthetic_graph(people=100, seed=4)


def test_friendship_is_mutual_and_never_with_oneself() -> None:
    graph = synthetic_graph(people=200, friends_each=5, seed=1)
    for person, friends in graph.items():
        assert person not in friends
        assert all(person in graph[friend] for friend in friends)


def test_the_generated_graph_has_its_size_and_a_few_popular_people() -> None:
    graph = synthetic_graph(people=300, friends_each=10, seed=1)
    assert len(graph) == 300
    assert friendships(graph) == 290 * 10
    degrees = sorted(map(len, graph.values()))
    assert degrees[-1] > 4 * degrees[150]


def test_a_file_of_two_numbers_a_line_is_read(tmp_path: Path) -> None:
    file = tmp_path / "graph"
    file.write_text("# people\n% more\n1 0\n\n0 1\n10\t2\n3 3\n2 1\n")
    assert read_graph(file) == {"0": ["1"], "1": ["0", "2"], "2": ["1", "10"], "10": ["2"]}


@pytest.mark.parametrize(
    "text",
    [
        "1 2 0.5\n2 3 7\n", "1,2\n2,3\n", "1, 2, 0.5, x\n2\t3\n", "# from, to\n1 ,2\n%\n 2,3 #\n",
    ],
)  # fmt: skip
def test_a_file_may_have_more_columns_and_commas(tmp_path: Path, text: str) -> None:
    file = tmp_path / "graph"
    file.write_text(text)
    assert read_graph(file) == {"1": ["2"], "2": ["1", "3"], "3": ["2"]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1 2\n1\n", "line 2: two numbers are expected, not '1'"),
        ("1,x,3\n", "line 1: two numbers are expected, not '1,x,3'"),
        ("from,to\n1,2\n", "line 1"),
        ("1 x\n", "not '1 x'"),
        ("1 -2\n", "line 1"),
        ("1 ²\n", "line 1"),
        (f"1 {'9' * 21}\n", "line 1"),
        ("", "no friendship"),
        ("3 3\n", "no friendship"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "graph"
    file.write_text(text)
    with pytest.raises(GraphError, match=sentence):
        read_graph(file)


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="cannot be read"):
        read_graph(tmp_path / "none")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match="is not text"):
        read_graph(binary)
