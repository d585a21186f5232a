"""The demo of an application, with the social network's functions over a log in memory."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rich.console import Console

from bokistore import ConflictError, Store, Transaction
from bokistore.cache import ViewCache
from functions.media.load import Media
from functions.social import app as social
from functions.social.graph import synthetic_graph
from functions.social.load import SocialNetwork
from functions.travel.hotels import generated_hotels
from functions.travel.load import Travel
from functions.workload.demonstration import DemonstrationResult, demonstrate, figures, show
from functions.workload.http_connection import HttpConnection
from functions.workload.load import LoadError, Tally, run_load
from functions.workload.replay import TraceReplay, faults_of_objects, replayed
from tests.unit.functions.stand_in import Gateway, serving

pytestmark = pytest.mark.asyncio

GRAPH = synthetic_graph(people=40, friends_each=3, seed=1)
PAIR = {"1": ["2"], "2": ["1"]}


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with serving(social.app) as gateway:
        yield gateway


def network(graph: dict[str, list[str]] = GRAPH) -> SocialNetwork:
    return SocialNetwork(graph)


async def shown(gateway: Gateway, application: SocialNetwork) -> tuple[DemonstrationResult, str]:
    console = Console(file=io.StringIO(), width=120)
    outcome = await demonstrate(
        gateway.url, application, seconds=0.3, clients=4, seed=1, requests_min=150, console=console
    )
    show(application, outcome, console)
    assert isinstance(console.file, io.StringIO)
    return outcome, " ".join(console.file.getvalue().split())


async def test_the_demo_runs_checks_and_shows_a_table(gateway: Gateway) -> None:
    outcome, text = await shown(gateway, network())
    assert outcome.faults == []
    assert all(function in text for function in ("login", "profile", "timeline", "post"))
    assert "none lost or duplicated" in text
    assert {"load", "login", "profile", "timeline", "post", "objects"} == set(gateway.calls)


async def test_a_demo_with_lost_posts_reports_them_and_fails(gateway: Gateway) -> None:
    gateway.tamper = lambda function, result: b'"9.9"' if function == "post" else result
    outcome, text = await shown(gateway, network())
    assert "Post 9.9 was acknowledged and is lost." in outcome.faults
    assert "Checked" not in text


async def test_loading_a_graph_again_finds_all_people_there(gateway: Gateway) -> None:
    batches: list[int] = []
    assert "40 people (40 new)" in await network().load(gateway.url, batches.append)
    assert sum(batches) == network().batches() == 2
    assert "40 people (0 new)" in await network().load(gateway.url, batches.append)


async def test_requests_at_a_rate_are_sent_when_due(gateway: Gateway) -> None:
    await network().load(gateway.url, lambda _: None)
    run = await run_load(
        gateway.url,
        "social",
        network().visitors(3, 1),
        functions=SocialNetwork.functions,
        seconds=0.1,
        rate=200,
    )
    assert run.requests == len(run.all.latencies_s) == 20


async def test_every_client_keeps_its_session(gateway: Gateway) -> None:
    await network().load(gateway.url, lambda _: None)
    connection = HttpConnection(gateway.url)
    answer = await connection.post("/functions/social/profile", b'{"user":"1"}')
    connection.close()
    assert (answer.status, answer.position) == (200, gateway.logs.position)


async def test_a_closed_connection_is_reopened(gateway: Gateway) -> None:
    await network().load(gateway.url, lambda _: None)
    connection = HttpConnection(gateway.url)
    for _ in range(2):
        answer = await connection.post("/functions/social/profile", b'{"user":"1"}')
        assert answer.status == 200
        connection.close()


async def test_a_transient_refusal_is_retried(gateway: Gateway) -> None:
    refused = (503, b'{"detail":"Not ready.","retryable":true}')
    gateway.tamper = lambda _, result: refused if len(gateway.calls) < 3 else result
    assert "(0 new)" in await network(PAIR).load(gateway.url, lambda _: None)
    assert len(gateway.calls) == 3


async def test_a_permanent_refusal_ends_the_load_with_its_sentence(gateway: Gateway) -> None:
    gateway.tamper = lambda *_: (404, b'{"detail":"There is no app social."}')
    with pytest.raises(LoadError, match="load failed: There is no app social"):
        await network().load(gateway.url, lambda _: None)
    with pytest.raises(LoadError, match="20 times in a row: There is no app social"):
        await run_load(
            gateway.url, "social", network().visitors(1, 1), functions=SocialNetwork.functions,
            seconds=60,
        )  # fmt: skip


async def test_a_missing_platform_is_reported() -> None:
    with socket.socket() as held:  # bound, so that nothing else listens there, but not listening
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(LoadError, match="Is the platform up"):
            await network().load(url, lambda _: None)
        with pytest.raises(LoadError, match="does not answer"):
            await figures(url, "social")
        with pytest.raises(LoadError, match="cannot be read over HTTP"):
            await replayed(url, "social", lambda *_: None)


async def test_an_object_that_differs_from_the_log_is_detected(gateway: Gateway) -> None:
    await network().load(gateway.url, lambda _: None)
    replay = await replayed(gateway.url, "social", lambda *_: None)
    assert await faults_of_objects(gateway.url, "social", replay) == []
    replay.objects["user:3"]["posts"] = 1
    (fault,) = await faults_of_objects(gateway.url, "social", replay)
    assert fault.startswith("user:3 is ")


async def test_an_answer_with_a_passwords_hash_is_detected(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await network(PAIR).load(gateway.url, lambda _: None)
    replay = await replayed(gateway.url, "social", lambda *_: None)
    monkeypatch.setattr(social, "SECRET", frozenset())
    faults = await faults_of_objects(gateway.url, "social", replay)
    assert [fault.partition(" is ")[0] for fault in faults] == ["account:1", "account:2"]


async def test_the_checks_replay_skips_conflicting_writes(gateway: Gateway) -> None:
    await network(PAIR).load(gateway.url, lambda _: None)
    log = gateway.logs.log("social")
    store, other = Store(log), Store(log, cache=ViewCache())  # as of another process
    with pytest.raises(ConflictError):  # noqa: PT012
        async with store.transaction() as txn:
            (await txn.get("user:1")).increment("posts")
            await other.increment("user:1", "posts", 10)
    replay = await replayed(gateway.url, "social", lambda *_: None)
    assert replay.objects["user:1"]["posts"] == 10
    assert replay.conflicts == [gateway.logs.position - 1]


async def test_the_checks_replay_knows_every_write_of_the_store(gateway: Gateway) -> None:
    store = Store(gateway.logs.log("social"))
    await store.set("a", "", {"list": [1], "inner": {"x": 1, "y": None}})
    await store.set("a", "inner.z", None)
    await store.increment("a", "inner.n", 3)
    for n in range(4):
        await store.push("a", "list", n, limit=3)
        await store.add_to_set("a", "inner.set", n % 2)
    await store.merge("a", "inner", {"x": None, "more": {"deep": [True]}})
    await store.delete("a", "inner.y")
    await store.set("b", "x", 1)
    await store.delete("b")
    replay = await replayed(gateway.url, "social", lambda *_: None)
    assert replay.objects == {"a": (await store.get("a")).value, "b": None}


async def test_the_checks_replay_commits_one_transaction_of_an_id(gateway: Gateway) -> None:
    store = Store(gateway.logs.log("social"))

    async def body(txn: Transaction) -> None:
        txn.increment("a", "n")

    for _ in range(2):
        await store.transact(body, id="once")
    log = gateway.logs.log("social")
    first = await log.read(0)
    assert first is not None
    await log.append(first.data, tags=first.tags)  # in flight when the first one was ordered
    await store.transact(body, id="twice")
    replay = await replayed(gateway.url, "social", lambda *_: None)
    assert replay.objects == {"a": {"n": 2}} == {"a": (await store.get("a")).value}
    assert replay.conflicts == []


async def test_the_checks_replay_notes_what_the_end_of_the_log_does_not_show() -> None:
    replay = TraceReplay()
    for seqnum, change in enumerate(
        [
            ["set", [], {"status": "new", "left": 1}],
            ["increment", ["left"], -3],
            ["set", ["status"], "old"],
            ["increment", ["left"], 3],
            ["delete", []],
        ]
    ):
        replay.add(seqnum, json.dumps({"writes": {"a": [change]}}))
    assert replay.least == {("a", "left"): -2}
    assert replay.statuses == {"a": ["new", "old"]}


async def test_lost_changed_and_duplicate_posts_are_detected() -> None:
    application = network()
    application.acknowledged = {"1.1": "a", "1.2": "b", "1.3": "c"}
    application.unknown = {"d", "e"}
    replay = TraceReplay(
        objects={
            "post:1.2": {"text": "x"},
            "post:1.3": {"text": "c"},
            "post:1.4": {"text": "c"},
            "post:1.5": {"text": "d"},
            "timeline": {"posts": []},
        }
    )
    assert application.faults(replay) == [
        "Post 1.1 was acknowledged and is lost.",
        "Post 1.2 has the text 'x' instead of 'b'.",
        "The post 'c' was published 2 times.",
    ]


@pytest.mark.parametrize(
    ("application", "named"),
    [(network(), "text"), (Media(), "request"), (Travel(generated_hotels()), "request")],
)
async def test_writes_of_clients_differ_also_with_the_same_seed(
    application: SocialNetwork | Media | Travel, named: str
) -> None:
    written = []
    for _ in range(2):
        for visitor in application.visitors(3, seed=1):
            requests = [visitor.request() for _ in range(1000)]
            written += [one.arguments[named] for one in requests if named in one.arguments]
    assert len(written) == len(set(written)) > 10


async def test_percentiles_count_only_answered_requests() -> None:
    tally = Tally()
    assert tally.percentile_s(99) == 0
    tally.latencies_s.extend(range(100, 0, -1))
    assert (tally.percentile_s(50), tally.percentile_s(99)) == (51, 100)
