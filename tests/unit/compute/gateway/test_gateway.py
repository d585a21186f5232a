"""The gateway without functions and sockets: logs, errors, operation, description."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import pytest_asyncio
import structlog

from indilog.config import ClusterConfig, Config, node_config
from indilog.link.invocation import HeldForRun
from indilog.link.link_messages import Returned
from indilog.remote_client import RemoteClient
from indilog.sdk.runs import holder_of
from indilog.testing import MemoryLogs
from indilog_compute.gateway import create_gateway
from indilog_compute.invocations.held_invocations import HeldFor
from indilog_compute.invocations.invocation_list import InvocationFilter, InvocationInfo
from indilog_compute.invocations.invocation_status import InvocationStatus
from indilog_compute.invocations.states import InvocationState
from indilog_compute.workers.host import FunctionHost

pytestmark = pytest.mark.asyncio


class Served:
    """A gateway in this process, and a client of it."""

    def __init__(self, directory: Path) -> None:
        config = Config(
            cluster=ClusterConfig(record_bytes_max=1000),
            node=node_config(data_dir=directory, workers=0),
        )
        self.now = 1_700_000_000.0
        self.logs = MemoryLogs(config.cluster, clock=lambda: self.now)
        self.host = FunctionHost(config, self.logs)
        self.status: dict[str, object] = {"ready": True, "n": 1}
        app = create_gateway(self.host, self.logs, lambda: self.status, config)
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://gateway")


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    await made.host.start()
    async with made.client:
        yield made
    await made.host.stop()


def problem(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    reported = response.json()
    assert reported["status"] == response.status_code
    assert isinstance(reported["retryable"], bool)
    assert "\n" not in reported["detail"]
    return response.status_code, reported["detail"]


async def test_records_appended_as_text_base64_or_bytes_are_read_back(served: Served) -> None:
    post = served.client.post
    answers = [
        await post("/logs/orders/records", json={"data": "héé", "tags": ["a", 7]}),
        await post("/logs/orders/records", json={"data_base64": "/wA=", "tags": ["a"]}),
        await post(
            "/logs/orders/records?tag=a&tag=b",
            content=b"\xff\x01",
            headers={"content-type": "application/octet-stream"},
        ),
    ]
    assert [(a.status_code, a.json()) for a in answers] == [(201, {"seqnum": n}) for n in range(3)]
    found = (await served.client.get("/logs/orders/records?tag=a")).json()
    assert [(r["seqnum"], r["tags"]) for r in found["records"]] == [
        (0, ["a", 7]),
        (1, ["a"]),
        (2, ["a", "b"]),
    ]
    assert [r.get("data") or r["data_base64"] for r in found["records"]] == ["héé", "/wA=", "/wE="]
    assert [r.get("encoding") for r in found["records"]] == [None, "base64", "base64"]
    assert found["next_bound"] == 3


async def test_several_records_are_appended_in_one_request(served: Served) -> None:
    body = {"records": [{"data": "1"}, {"data": "2", "tags": ["a"]}]}
    answer = await served.client.post("/logs/orders/records", json=body)
    assert answer.json() == {"seqnums": [0, 1]}


async def test_data_that_equals_the_field_name_records_is_appended(served: Served) -> None:
    answer = await served.client.post("/logs/orders/records", json={"data": "records"})
    assert answer.json() == {"seqnum": 0}


async def test_reads_by_tag_bound_direction_and_limit(served: Served) -> None:
    log = served.logs.log("orders")
    for n in range(6):
        await log.append(b"%d" % n, tags=["even" if n % 2 == 0 else "odd", 7])

    async def seqnums(query: str) -> list[int]:
        answer = await served.client.get(f"/logs/orders/records?{query}")
        return [record["seqnum"] for record in answer.json()["records"]]

    assert await seqnums("tag=even&bound=1") == [2, 4]
    assert await seqnums("tag=odd&direction=prev&bound=4") == [3, 1]
    assert await seqnums("direction=prev&limit=2") == [5, 4]
    assert await seqnums("tag_int=7&limit=1") == [0]
    assert await seqnums("tag=7") == []
    assert (await served.client.get("/logs/orders/tail")).json() == {"tail": 6}
    assert (await served.client.get("/logs/orders/records/3")).json()["data"] == "3"


@pytest.mark.parametrize("form", ["2023-11-14T22:13:22Z", "2023-11-14T22:13:22", "1700000002"])
async def test_reads_begin_at_a_time(served: Served, form: str) -> None:
    for n in range(5):
        served.now = 1_700_000_000.0 + n
        await served.client.post("/logs/orders/records", json={"data": str(n)})
    get = served.client.get
    assert (await get(f"/logs/orders/at?time={form}")).json() == {"seqnum": 2}
    found = (await get(f"/logs/orders/records?since={form}")).json()
    assert [record["seqnum"] for record in found["records"]] == [2, 3, 4]
    found = (await get(f"/logs/orders/records?since={form}&bound=4")).json()
    assert [record["seqnum"] for record in found["records"]] == [4]
    refused = problem(await get(f"/logs/orders/records?since={form}&direction=prev"))
    assert refused == (400, "since needs direction=next; with direction=prev give a bound.")


async def test_an_append_whose_condition_does_not_hold_is_answered_with_412(
    served: Served,
) -> None:
    async def append(after: dict[str, object]) -> httpx.Response:
        body = {"records": [{"data": "x", "tags": ["t", 7]}], "after": after}
        return await served.client.post("/logs/orders/records", json=body)

    assert (await append({"tag": "t", "seqnum": None})).json() == {"seqnums": [0]}
    assert (await append({"tag_int": 7, "seqnum": 0})).json() == {"seqnums": [1]}
    refused = await append({"tag": "t", "seqnum": 0})
    assert problem(refused)[0] == 412
    assert (refused.json()["title"], refused.json()["last_seqnum"]) == ("ConditionFailedError", 1)


@pytest.mark.parametrize("name", ["a/b", "a/records", "records/7", "a/records/7", "ä ?", "..", "/"])
async def test_every_name_that_a_log_may_have_works_over_http(served: Served, name: str) -> None:
    await served.logs.log(name).append(b"1")
    path = f"/logs/{quote(name, safe='').replace('.', '%2E')}"
    assert (await served.client.post(f"{path}/records", json={"data": "2"})).json() == {"seqnum": 1}
    found = (await served.client.get(f"{path}/records")).json()["records"]
    assert [record["data"] for record in found] == ["1", "2"]
    assert (await served.client.get(f"{path}/records/1")).json()["data"] == "2"
    assert (await served.client.get(f"{path}/tail")).json() == {"tail": 2}
    trimmed = await served.client.post(f"{path}/trim", json={"until": 1})
    assert trimmed.json() == {"until": 1}


async def test_a_wait_over_http_times_out(served: Served) -> None:
    answer = await served.client.get("/logs/orders/records?tag=new&wait=0.001")
    assert answer.json() == {"records": [], "next_bound": 0, "more": False}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"dat": "x"}, 422, "field 'dat'"),
        ({}, 400, "as data (text) or as data_base64"),
        ({"data": "x", "data_base64": "eA=="}, 400, "either as data"),
        ({"data_base64": "?"}, 400, "is not base64"),
        ({"data": "x", "tags": [""]}, 400, "must not be empty"),
        ({"data": "x", "tags": [True]}, 422, "field 'tags[0]' is text or an integer, not true."),
        ({"data": "x", "tags": ["a", 1.0]}, 422, "field 'tags[1]' is text or an integer, not 1.0"),
        ({"records": [{"data": 7}]}, 422, "field 'records[0].data' is text, not 7."),
        ({"data": "x", "tags": [0]}, 400, "between 1 and"),
        ({"data": "x", "tags": [f"t{n}" for n in range(65)]}, 413, "the limit is 64"),
        ({"data": "x" * 1001}, 413, "the limit is 1,000"),
        ({"data": "x", "records": []}, 400, "not both"),
        ({"data": "x", "after": {"tag": "t", "seqnum": None}}, 400, "also for one record"),
        ({"records": [{"data": "x"}], "after": {"seqnum": None}}, 400, "needs a tag"),
        (
            {"records": [{"data": "x"}], "after": {"tag": "t", "seqnum": 0}},
            400,
            "condition's tag 't'",
        ),
        ({"records": [{"data": "x"}], "after": {"tag": "t"}}, 422, "after.seqnum"),
    ],
)
async def test_an_invalid_record_is_refused_with_a_sentence(
    served: Served, body: dict[str, object], status: int, words: str
) -> None:
    reported = problem(await served.client.post("/logs/orders/records", json=body))
    assert reported[0] == status
    assert words in reported[1]
    assert served.logs.position == 0


async def test_reads_below_a_trim_over_http_get_410(served: Served) -> None:
    log = served.logs.log("orders")
    for n in range(6):
        await log.append(b"%d" % n, tags=["even" if n % 2 == 0 else "odd", 7])
    answer = await served.client.post("/logs/orders/trim", json={"until": 4, "tag": "odd"})
    assert (answer.status_code, answer.json()) == (200, {"until": 4})
    reported = problem(await served.client.get("/logs/orders/records?tag=odd&bound=0"))
    assert reported == (410, "Records below seqnum 4 were trimmed; read from there.")
    found = (await served.client.get("/logs/orders/records?tag=odd&direction=prev")).json()
    assert [record["seqnum"] for record in found["records"]] == [5]
    await served.client.post("/logs/orders/trim", json={"until": 2})
    assert problem(await served.client.get("/logs/orders/records/1"))[0] == 410
    beyond = problem(await served.client.post("/logs/orders/trim", json={"until": 7}))
    assert beyond == (400, "until is 7, but the log ends at 6; trim at most up to its tail.")
    for body in ({}, {"until": -1}, {"until": True}, {"until": 1, "tags": "odd"}):
        assert problem(await served.client.post("/logs/orders/trim", json=body))[0] == 422


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/logs/$apps/records", 400, "reserved for the platform"),
        ("/logs/orders/records?limit=0", 422, "field 'limit'"),
        ("/logs/orders/records?bound=-1", 422, "field 'bound' is 0 or greater, not '-1'."),
        ("/logs/orders/records?bound=99999999999999999999", 422, "field 'bound' is at most 9223"),
        ("/logs/orders/records?wait=nan", 422, "field 'wait' is a finite number"),
        ("/logs/orders/records?since=10m", 422, "field 'since' is a time: ISO 8601"),
        (
            "/logs/orders/records?tagg=a",
            422,
            "query's field 'tagg' is not known; the fields are tag,",
        ),
        ("/logs/orders/tail?tag=a", 422, "'tag' is not known; this request takes none"),
        ("/invocations/nope?wiat=1", 422, "'wiat' is not known; the fields are wait"),
        ("/logs//tail", 400, "A log's name must be 1 to"),
        ("/logs/orders/records?tag=a&tag_int=7", 400, "not both"),
        ("/logs/orders/records/9", 404, "no record at seqnum 9"),
        ("/invocations/nope", 404, "No invocation 'nope'"),
        ("/apps/nope", 404, "No app 'nope'"),
        ("/nope", 404, "no such path"),
        ("/functions/a/b", 405, "POST, not GET"),
    ],
)
async def test_an_invalid_request_is_refused_with_a_sentence(
    served: Served, path: str, status: int, words: str
) -> None:
    reported = problem(await served.client.get(path))
    assert reported[0] == status
    assert words in reported[1]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/functions/shop/buy", "No app 'shop' is deployed"),
        ("/functions/shop", "is named app.function"),
        ("/functions/", "is named app.function"),
    ],
)
async def test_an_unknown_function_is_refused_with_a_sentence(
    served: Served, path: str, words: str
) -> None:
    reported = problem(await served.client.post(path))
    assert reported[0] == 404
    assert words in reported[1]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("async=banana", "async"),
        ("async", "async"),
        ("asnyc=1", "asnyc"),
        ("delay=2", "delay"),
        ("async=0&delay=2", "delay"),
        ("async=1&delay=soon", "delay"),
        ("async=1&delay=-1", "delay"),
        ("async=1&delay=nan", "delay"),
    ],
)
async def test_a_malformed_query_runs_nothing_and_names_its_field(
    served: Served, query: str, field: str
) -> None:
    answer = await served.client.post(f"/functions/shop/buy?{query}")
    assert problem(answer)[0] == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert field in answer.json()["detail"]


async def test_a_request_over_the_limit_is_refused(served: Served) -> None:
    large = b"x" * (ClusterConfig().batch_bytes_max + 1)
    status, reported = problem(await served.client.post("/functions/a/b", content=3 * large))
    assert status == 413
    assert reported.startswith("The size of the call's arguments in bytes is 12,582,915, ")
    assert reported.endswith(", the limit is 4,194,304; nothing was done.")
    assert problem(await served.client.post("/apps", content=2 * large))[0] == 413
    assert problem(await served.client.post("/logs/a/records", content=2 * large))[0] == 413


@pytest.mark.parametrize("name", ["x/y", "x%2Fy", "", "7", "x" * 65])
async def test_an_invalid_app_name_is_refused_with_a_sentence(served: Served, name: str) -> None:
    answer = await served.client.put(f"/apps/{name}", json={"sources": {"a.py": "x"}})
    status, reported = problem(answer)
    assert status == 422
    assert reported.startswith(
        "An app's name is 1 to 64 letters, digits, _ and -, a letter first, not"
    )


async def test_undeploying_an_unknown_app_is_refused_with_a_sentence(served: Served) -> None:
    reported = problem(await served.client.delete("/apps/nope"))
    assert reported == (404, "No app 'nope' is deployed; `indilog apps` lists the deployed ones.")


async def test_deploying_without_workers_is_refused_as_retryable(served: Served) -> None:
    answer = await served.client.put("/apps/shop", json={"sources": {"a.py": "x"}})
    assert problem(answer)[0] == 503
    assert answer.json()["retryable"]
    assert answer.headers["retry-after"] == "1"


async def test_readyz_reports_the_readiness_of_the_platform(served: Served) -> None:
    assert (await served.client.get("/healthz")).status_code == 200
    assert (await served.client.get("/readyz")).json() == {"status": "ready"}
    served.status["read_only"] = True
    answer = await served.client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "read-only"})
    served.status["warning"] = "Lost records: 1."
    answer = await served.client.get("/readyz")
    assert (answer.status_code, answer.json()["warning"]) == (200, "Lost records: 1.")
    served.status["ready"] = False
    assert problem(await served.client.get("/readyz"))[0] == 503


async def test_status_and_metrics_show_the_hosts_numbers(served: Served) -> None:
    status = (await served.client.get("/status")).json()
    assert status["n"] == 1
    assert status["functions"]["calls_running"] == 0
    metrics = (await served.client.get("/metrics")).text
    assert 'indilog_function_calls_total{outcome="returned"} 0.0' in metrics


async def test_the_docs_page_loads_nothing_from_other_hosts(served: Served) -> None:
    page = (await served.client.get("/docs")).text
    assert "openapi.json" in page
    assert "http:" not in page
    assert "https:" not in page
    assert "src=" not in page


async def test_an_unexpected_error_is_answered_without_its_details(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(served.logs, "log", broken)
    # Nothing is raised out of the application: the server would log it a second time.
    with structlog.testing.capture_logs() as logged:
        status, sentence = problem(await served.client.get("/logs/orders/tail"))
    assert [line["event"] for line in logged] == ["request failed"]
    assert status == 500
    assert "secret" not in sentence


@pytest.mark.parametrize("what", ["tail", "stream", "records", "records/0", "at?time=0"])
async def test_a_malformed_session_position_is_refused_by_every_read(
    served: Served, what: str
) -> None:
    headers = {"indilog-position": "foo"}
    status, sentence = problem(await served.client.get(f"/logs/orders/{what}", headers=headers))
    refused = "the header Indilog-Position must be a position from an earlier answer, and is 'foo'."
    assert (status, refused in sentence) == (422, True)


@pytest.mark.parametrize(
    ("method", "path", "begins"),
    [
        ("POST", "/logs/orders/trim", "Nothing was trimmed"),
        ("PUT", "/logs/orders/retention", "Nothing was set"),
        ("POST", "/logs/orders/records", "Nothing was appended"),
        ("PUT", "/apps/shop", "Nothing was deployed"),
    ],
)
async def test_a_body_that_is_not_json_is_refused(
    served: Served, method: str, path: str, begins: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = await served.client.request(method, path, content=b"{", headers=headers)
    status, sentence = problem(answer)
    assert (status, sentence.split(" (")[0]) == (422, f"{begins}: field 'body' is not JSON")
    assert [fault["field"] for fault in answer.json()["errors"]] == ["body"]


async def test_a_retention_policy_that_was_put_is_read_back(served: Served) -> None:
    path = "/logs/orders/retention"
    nothing = {"age_s": None, "size_bytes": None}
    assert (await served.client.get(path)).json() == nothing
    put = await served.client.put(path, json={"age_s": 60, "size_bytes": 1000})
    assert (put.status_code, put.json()) == (200, {"age_s": 60.0, "size_bytes": 1000})
    assert (await served.client.get(path)).json() == {"age_s": 60.0, "size_bytes": 1000}
    for wrong in ({"age_s": 0}, {"size_bytes": -1}, {"size": 7}, {"size_bytes": 1.5}):
        assert problem(await served.client.put(path, json=wrong))[0] == 422
    assert problem(await served.client.put("/logs/$apps/retention", json={}))[0] == 400
    assert (await served.client.put(path, json={})).json() == nothing


async def test_an_outcome_is_answered_with_the_position_of_its_record(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read with this position then sees the records of the invocation."""

    async def invocation(id: str, *, wait_s: float) -> InvocationStatus:  # noqa: A002
        return InvocationStatus(id, "app.f", InvocationState.DONE, Returned(7, b"1"))

    monkeypatch.setattr(served.host, "invocation", invocation)
    answer = await served.client.get("/invocations/i")
    assert answer.json()["result"] == 1
    assert answer.headers["Indilog-Position"] == "7"


async def test_a_platform_in_one_process_says_why_its_nodes_do_not_change(served: Served) -> None:
    for answer in (
        await served.client.get("/cluster/members"),
        await served.client.put("/cluster/members", json={"storage_nodes": 3}),
        await served.client.delete("/cluster/members/storage-0"),
        await served.client.post("/cluster/members/storage-0/replace"),
        await served.client.post("/cluster/shards/0/finalize", json={"cuts": 0}),
        await served.client.post("/cluster/rebalance"),
    ):
        status, sentence = problem(answer)
        assert status == 409
        assert "runs in one process" in sentence


async def test_numbers_of_nodes_are_numbers(served: Served) -> None:
    for counts in ({"storage_nodes": "3"}, {"storage": 3}, {"index_shards": 1.5}):
        status, sentence = problem(await served.client.put("/cluster/members", json=counts))
        assert status == 422
        assert sentence.startswith("Nothing was changed")


async def test_held_outcomes_are_listed_and_released_by_flow_and_by_run(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [
        HeldFor(holder_of("shop/flow", run), calls, 10 * calls)
        for run, calls in (("a", 2), ("ab", 3))
    ]
    released: list[str] = []

    async def found(prefix: str, after: str = "") -> list[HeldFor]:
        return [one for one in held if one.holder.startswith(prefix)]

    async def release_held(prefix: str) -> int:
        released.append(prefix)
        return 5

    monkeypatch.setattr(served.host, "held", found)
    monkeypatch.setattr(served.host, "release_held", release_held)
    monkeypatch.setattr(served.host, "release", lambda holder, _: released.append(holder))
    first = {"log": "shop/flow", "run": "a", "calls": 2, "bytes": 20}
    listed = (await served.client.get("/invocations/held")).json()
    assert (listed["held"][0], len(listed["held"]), listed["has_more"]) == (first, 2, False)
    assert (await served.client.get("/invocations/held?log=other")).json()["held"] == []
    path = "/invocations/held?log=shop/flow"
    assert (await served.client.delete(path)).json() == {"released": 5}
    assert (await served.client.delete(f"{path}&run=a")).json() == {"released": 2}
    assert released == [holder_of("shop/flow", ""), holder_of("shop/flow", "a")]
    assert problem(await served.client.delete("/invocations/held"))[0] == 422
    assert len(released) == 2
    client = RemoteClient("http://here:8080")
    monkeypatch.setattr(client, "_requests", _Requests(served.client))
    there = await client.held_invocations()
    assert (there.held[0], len(there.held), there.has_more) == (
        HeldForRun("shop/flow", "a", 2, 20),
        2,
        False,
    )
    assert (await client.held_invocations("other")).held == ()
    assert await client.release_invocations("shop/flow") == 5
    assert await client.release_invocations("shop/flow", run="a") == 2
    assert released[2:] == released[:2]


class _Requests:
    """Sends what a client asks to the gateway under test."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def send(self, method: str, path: str, *, query: Mapping[str, str]) -> bytes:
        return (await self._http.request(method, path, params=query)).content


async def test_recorded_invocations_are_listed_in_pages(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[InvocationFilter, int]] = []

    async def newest(wanted: InvocationFilter, limit: int) -> list[InvocationInfo]:
        asked.append((wanted, limit))
        return [
            InvocationInfo(
                id=f"i{n}", function="a.f", state=InvocationState.RUNNING, seqnum=n, due=1.0,
                tries=1, executor="n#1", ended=None,
            )
            for n in range(9, 9 - limit, -1)
        ]  # fmt: skip

    monkeypatch.setattr(served.host, "newest_invocations", newest)
    found = (await served.client.get("/invocations?app=a&state=running&limit=2&page=10")).json()
    assert asked == [(InvocationFilter("a", None, InvocationState.RUNNING, 10), 3)]
    assert [one["id"] for one in found["invocations"]] == ["i9", "i8"]
    assert found["next"] == 8
    for query in ("state=asleep", "limit=0", "limit=1001", "page=-1", "page=x", "pge=1"):
        answer = await served.client.get(f"/invocations?{query}")
        assert problem(answer)[0] == 422, query
    assert len(asked) == 1
