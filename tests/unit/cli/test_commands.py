"""The command line without a platform: a user error is one sentence with exit code 2."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

import indilog
from indilog.cli.commands import app

URL = "http://127.0.0.1:1"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


class Platform:
    """Answers the requests of commands, and keeps them."""

    def __init__(self, answer: object, status: int = 200) -> None:
        self.asked: list[httpx.Request] = []
        self._answer = answer
        self.status = status

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return httpx.Response(self.status, json=self._answer)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> type[Platform]:
    """Commands reach the last `Platform` made."""
    made: list[Platform] = []

    class Reached(Platform):
        def __init__(self, answer: object, status: int = 200) -> None:
            super().__init__(answer, status)
            made.append(self)

    real = httpx.Client

    def client(**given: object) -> httpx.Client:
        transport = httpx.MockTransport(made[-1])
        return real(base_url=str(given["base_url"]), transport=transport)

    monkeypatch.setattr(httpx, "Client", client)
    return Reached


def test_arguments_are_text_or_json(platform: type[Platform]) -> None:
    asked = platform(7)
    done = run("invoke", "shop.buy", "user=ann", "n:=3", "tags:=[1]", "--json", '{"deep": {}}')
    assert (done.exit_code, done.stdout) == (0, "7\n")
    [request] = asked.asked
    assert request.url.path == "/functions/shop/buy"
    assert json.loads(request.content) == {"user": "ann", "n": 3, "tags": [1], "deep": {}}


def test_a_trim_prints_its_effect(platform: type[Platform]) -> None:
    asked = platform({"until": 7})
    done = run("log", "trim", "orders", "--until", "7", "--tag", "new")
    assert (done.exit_code, done.stdout) == (0, "orders is trimmed below seqnum 7.\n")
    [request] = asked.asked
    assert request.url.path == "/logs/orders/trim"
    assert json.loads(request.content) == {"until": 7, "tag": "new", "tag_int": None}


class LogPlatform(Platform):
    """A platform whose log has these records, or was trimmed (None)."""

    def __init__(self, records: list[object] | None) -> None:
        super().__init__({})
        self._records = records

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if request.method == "POST":
            return httpx.Response(200, json={"log": "orders", "kind": "owned"})
        if request.url.path == "/logs":
            return httpx.Response(200, json={"logs": [{"log": "created"}]})
        if self._records is None:
            trimmed = {"title": "TrimmedError", "detail": "trimmed", "next_seqnum": 7}
            return httpx.Response(410, json=trimmed)
        return httpx.Response(200, json={"records": self._records})


@pytest.mark.parametrize(
    ("log", "records", "switched"),
    [
        ("orders", [{"seqnum": 3}], True),
        ("orders", None, True),
        ("created", [], True),
        ("ordres", [], False),
    ],
)
def test_a_switch_of_a_log_without_records_creates_no_log(
    monkeypatch: pytest.MonkeyPatch, log: str, records: list[object] | None, switched: bool
) -> None:
    asked, real = LogPlatform(records), httpx.Client
    transport = httpx.MockTransport(asked)
    monkeypatch.setattr(
        httpx, "Client", lambda **given: real(base_url=given["base_url"], transport=transport)
    )
    done = run("log", "switch", log, "--kind", "owned")
    assert any(request.method == "POST" for request in asked.asked) == switched
    assert done.exit_code == (0 if switched else 2)
    if not switched:
        assert "There is no log ordres: it has no records." in done.stderr
        assert "`indilog log create ordres --kind owned`" in done.stderr


def test_the_stripes_of_a_log_are_sent_and_shown(platform: type[Platform]) -> None:
    asked = platform({"log": "orders", "kind": "order-first", "stripes": 5})
    done = run("log", "create", "orders", "--kind", "order-first", "--stripes", "5")
    assert done.stdout == "The log orders is of kind order-first, with 5 stripes.\n"
    sent = {"log": "orders", "kind": "order-first", "stripes": 5}
    assert json.loads(asked.asked[0].content) == sent
    refused = run("log", "switch", "orders", "--kind", "owned", "--stripes", "5")
    assert refused.exit_code == 2
    assert "A log of kind owned has no stripes" in refused.stderr
    assert len(asked.asked) == 1


def test_async_prints_the_invocations_id(platform: type[Platform]) -> None:
    asked = platform({"invocation": "i-1"}, 202)
    assert run("invoke", "shop.buy", "--async").stdout == "i-1\n"
    assert asked.asked[0].url.query == b"async=true"


def test_invoke_polls_until_the_invocation_ends(
    platform: type[Platform], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform may answer early that the invocation still runs, and polling exceeds the wait of
    one request.
    """
    monkeypatch.setattr("indilog.cli.invocations._PAUSE_S", 0.0)
    done = {"invocation": "i-1", "function": "shop.buy", "state": "done", "result": 7}

    class Slow(platform):  # type: ignore[misc, valid-type]
        def __call__(self, request: httpx.Request) -> httpx.Response:
            answer: httpx.Response = super().__call__(request)
            self._answer = done
            return answer

    asked = Slow({"invocation": "i-1", "function": "shop.buy", "state": "running"})
    shown = run("invocation", "show", "i-1", "--wait", "10m")
    assert (shown.exit_code, json.loads(shown.stdout)) == (0, done)
    assert [request.url.path for request in asked.asked] == ["/invocations/i-1"] * 2
    assert [request.url.params["wait"] for request in asked.asked] == ["60.0"] * 2


def test_a_running_invocation_is_shown_with_its_status(platform: type[Platform]) -> None:
    scheduled = {"invocation": "a/b", "function": "shop.buy", "state": "scheduled"}
    asked = platform(scheduled)
    shown = run("invocation", "show", "a/b")
    assert (shown.exit_code, json.loads(shown.stdout)) == (0, scheduled)
    [request] = asked.asked
    assert request.url.raw_path == b"/invocations/a%2Fb?wait=0.0"


def test_an_idempotency_key_is_sent_with_a_call(platform: type[Platform]) -> None:
    asked = platform(7)
    assert run("invoke", "shop.buy", "--key", "order-1").stdout == "7\n"
    assert asked.asked[0].headers["idempotency-key"] == "order-1"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("invoke", "buy"), "A function is named app.function, not 'buy'."),
        (("invoke", "shop.buy", "ann"), "An argument is written name=value, not 'ann'."),
        (("invoke", "shop.buy", "n:=x"), "n:=x is not JSON"),
        (("invoke", "shop.buy", "a=1", "b=1", "a:=2"), "The argument 'a' is given twice"),
        (("invoke", "shop.buy", "--json", '{"a": 1}', "a=2"), "The argument 'a' is given twice"),
        (("invocation", "show", ""), "Give the id that `indilog invoke --async` printed."),
        (("invocation", "show", "i-1", "--wait", "soon"), "--wait is how long to wait (30s, 10m"),
        (("invocation", "show", "i-1", "--wait", "-1"), "not '-1'"),
        (("invoke", "shop.buy", "--json", "[1]"), "--json is an object"),
        (("deploy", "/nowhere.py"), "There is no file or folder /nowhere.py."),
        (("log", "read", ""), "A log's name must be 1 to"),
        (("log", "append", "", "text"), "A log's name must be 1 to"),
        (("log", "append", "orders"), "Give either the record's data or --file."),
        (("log", "append", "orders", "--file", "/nowhere"), "/nowhere cannot be read"),
        (("up", "--config", "/nowhere.toml"), "There is no configuration file /nowhere.toml."),
        (("up", "--port", "70000"), "port is 0 (any) to 65535, not 70000."),
        (("status", "--url", URL), f"No platform answers at {URL}; start one with `indilog up`"),
        (("status", "--url", "nonsense"), "A platform's URL has the form http://"),
        (("status", "--url", "ftp://here"), "not 'ftp://here'"),
        (("log", "read", "$apps"), "are reserved for the platform"),
        (("deploy", "visits.py", "--name", ""), "An app's name is 1 to 64 letters"),
        (("deploy", "visits.py", "--name", "x/y"), "not 'x/y'"),
        (("undeploy", "x/y"), "not 'x/y'"),
        (("up", "--port", "abc"), "Invalid value for '--port': "),
        (("up", "--port"), "'--port' requires an argument; see `"),
        (("log", "read", "orders", "--bound", "abc"), "Invalid value for '--bound': "),
        (("log", "read", "orders", "--bound", "-1"), "greater than or equal to 0; see `indilog "),
        (("log", "read", "orders", "--limit", "0"), "see `indilog log read --help`."),
        (("log", "read"), "Missing argument 'LOG'; see `indilog log read --help`."),
        (("log", "read", "orders", "more"), "unexpected extra argument"),
        (("log", "trim", "orders"), "Missing option '--until'; see `indilog log trim --help`."),
        (("log", "read", "orders", "--bogus"), "No such option: --bogus"),
        (("log", "forget"), "No such command 'forget'; see `indilog log --help`."),
        (("invok",), "No such command 'invok'. Did you mean 'invoke'?"),
    ],
)
def test_a_user_error_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_up_where_it_cannot_listen_leaves_no_data_directory(tmp_path: Path) -> None:
    data = tmp_path / "new"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for where, sentence in (
            (("--port", port), f"Port {port} is in use on 127.0.0.1;"),
            (("--host", "127.0.0.1/8"), "The gateway does not listen on 127.0.0.1/8 without TLS"),
            (("--host", "192.0.2.1"), "The gateway does not listen on 192.0.2.1 without TLS"),
            (("--host", "::"), "The gateway does not listen on :: without TLS"),
            (("--host", "here", "--no-auth"), "The gateway does not listen on here without a t"),
            (("--tls-cert", "/nowhere"), "tls_cert and tls_key belong together"),
            (("--tls-cert", "/no", "--tls-key", "/key"), "The certificate /no with the key /key"),
        ):
            done = run("up", "--data", str(data), *where)
            assert (done.exit_code, done.stderr.splitlines()[-1][: len(sentence)]) == (2, sentence)
            assert not data.exists()


@pytest.mark.parametrize("arguments", [(), ("log",), ("--help",), ("log", "read", "--help")])
def test_help_is_printed_on_request_and_without_arguments(
    arguments: tuple[str, ...],
) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stderr) == (0 if "--help" in arguments else 2, "")
    assert "Usage: indilog" in done.stdout


def test_a_bound_that_no_record_can_have_is_refused() -> None:
    done = run("log", "read", "orders", "--bound", "99999999999999999999")
    assert done.exit_code == 2
    assert "--bound" in done.stderr


@pytest.mark.parametrize(("status", "code"), [(404, 2), (422, 2), (500, 1), (503, 1)])
def test_a_refusal_is_printed_as_the_platforms_sentence(
    platform: type[Platform], status: int, code: int
) -> None:
    platform({"detail": "No app 'shop' is deployed."}, status)
    done = run("invoke", "shop.buy")
    assert (done.exit_code, done.stderr) == (code, "No app 'shop' is deployed.\n")


def test_a_server_that_is_no_platform_is_reported(platform: type[Platform]) -> None:
    platform("x", 404)
    assert "answered 404" in run("status").stderr


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("status", "--json"),
        ("apps",),
        ("log", "tail", "x"),
        ("cluster", "status"),
        ("cluster", "nodes"),
        ("cluster", "shards"),
    ],
)
def test_the_json_of_another_server_is_not_shown_as_an_answer(
    platform: type[Platform], command: tuple[str, ...]
) -> None:
    for answer in ({"hello": "world"}, [1, 2], "text"):
        platform(answer)
        done = run(*command)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "does not answer like IndiLog does; is it another server?" in done.stderr


def test_the_version_is_printed() -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"indilog {indilog.__version__}\n")


@pytest.mark.parametrize("name", ["helper.py", "helper/__init__.py", "other.py"])
def test_a_file_that_needs_its_neighbour_is_refused_with_the_command_for_the_folder(
    platform: type[Platform], tmp_path: Path, name: str
) -> None:
    file, neighbour = tmp_path / "app.py", tmp_path / name
    neighbour.parent.mkdir(exist_ok=True)
    neighbour.touch()
    file.write_text("import helper")
    problem = "app.py, line 1: ModuleNotFoundError: No module named 'helper'."
    platform({"detail": problem}, 400)
    hint = (
        f" Only app.py was deployed, and helper is beside it; deploy the folder: indilog deploy "
        f"{tmp_path}"
    )
    stderr = run("deploy", str(file)).stderr
    assert stderr == f"{problem}{'' if name == 'other.py' else hint}\n"
    assert run("deploy", str(tmp_path)).stderr == f"{problem}\n" or name == "other.py"


def test_an_application_without_functions_is_deployed_in_a_whole_sentence(
    platform: type[Platform], tmp_path: Path
) -> None:
    (tmp_path / "wf.py").write_text("x = 1")
    platform({"name": "wf", "version": 1, "functions": []})
    assert run("deploy", str(tmp_path / "wf.py")).stdout == "Deployed wf, version 1.\n"


def test_deploying_sends_the_sources_and_the_owner(
    platform: type[Platform], tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text("x = 1")
    asked = platform({"name": "shop", "version": 2, "functions": ["buy"]})
    done = run("deploy", str(tmp_path / "shop.py"), "--owner", "eve")
    assert done.stdout == "Deployed shop, version 2: buy.\n"
    [request] = asked.asked
    assert (request.method, request.url.path) == ("POST", "/apps")
    assert request.headers["indilog-owner"] == "eve"
    assert json.loads(request.content) == {"sources": {"shop.py": "x = 1"}}
    run("deploy", str(tmp_path / "shop.py"), "--name", "other")
    assert (asked.asked[1].method, asked.asked[1].url.path) == ("PUT", "/apps/other")


def test_undeploying_sends_the_owner_and_prints_what_stays(platform: type[Platform]) -> None:
    asked = platform({"name": "shop", "version": 2})
    done = run("undeploy", "shop", "--owner", "ann")
    assert (done.exit_code, done.stdout) == (0, "Undeployed shop, version 2; its logs stay.\n")
    [request] = asked.asked
    assert (request.method, request.url.path) == ("DELETE", "/apps/shop")
    assert request.headers["indilog-owner"] == "ann"


def test_each_record_is_printed_as_one_line(platform: type[Platform]) -> None:
    record = {"seqnum": 3, "tags": ["a", 7], "time": 0.0, "ordered_at": 60.0, "data": "x\ny"}
    platform({"records": [record], "next_bound": 4})
    assert run("log", "read", "orders").stdout == "       3  1970-01-01 00:00:00  a 7  x\\ny\n"
    ordered = run("log", "read", "orders", "--ordered").stdout
    assert ordered == "       3  1970-01-01 00:01:00  a 7  x\\ny\n"
    assert json.loads(run("log", "read", "orders", "--json").stdout) == record


def test_a_relative_time_is_counted_from_the_logs_own_time(platform: type[Platform]) -> None:
    asked = platform({"time": 86_400.0, "records": [], "next_bound": 0})
    assert run("log", "read", "a/b", "--since", "1h").exit_code == 0
    assert [request.url.path for request in asked.asked] == ["/logs/a/b/now", "/logs/a/b/records"]
    assert asked.asked[1].url.params["since"] == "1970-01-01T23:00:00+00:00"


@pytest.mark.parametrize("command", ["read", "range"])
def test_a_log_without_records_is_reported_because_its_name_may_be_misspelt(
    platform: type[Platform], command: str
) -> None:
    platform({"records": [], "next_bound": 0})
    for options, words in (
        ((), "Log 'ordres' has no records.\n"),
        (("--tag", "new"), "Log 'ordres' has no records with tag 'new'.\n"),
        (("--tag-int", "7", "--bound", "3"), "Log 'ordres' has no records with tag 7 there.\n"),
    ):
        done = run("log", command, "ordres", *options)
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", words)


def test_appending_sends_bytes_and_tags(platform: type[Platform]) -> None:
    asked = platform({"seqnum": 4}, 201)
    done = run("log", "append", "a log/ä", "text", "--tag", "x y", "--tag", "b")
    assert done.stdout == "4\n"
    [request] = asked.asked
    assert request.url.raw_path == b"/logs/a%20log%2F%C3%A4/records?tag=x%20y&tag=b"
    assert request.content == b"text"


def test_a_range_is_read_page_by_page(platform: type[Platform]) -> None:
    asked = platform({"records": [], "next_bound": 0})
    assert run("log", "range", "orders", "--bound", "5").exit_code == 0
    assert b"bound=5" in asked.asked[0].url.query


@pytest.mark.parametrize("command", ["range", "read"])
def test_reading_continues_after_lost_records_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    lost = {"title": "DataLossError", "detail": "Seqnums 5 to 8 are lost.", "next_seqnum": 9}
    record = {"seqnum": 9, "time": 0, "tags": [], "data": "kept"}
    pages = {
        "5": httpx.Response(500, json=lost),
        "9": httpx.Response(200, json={"records": [record], "next_bound": 10}),
        "10": httpx.Response(200, json={"records": [], "next_bound": 10}),
    }
    real = httpx.Client

    def client(**given: object) -> httpx.Client:
        transport = httpx.MockTransport(lambda request: pages[request.url.params["bound"]])
        return real(base_url=str(given["base_url"]), transport=transport)

    monkeypatch.setattr(httpx, "Client", client)
    done = run("log", command, "orders", "--bound", "5")
    assert done.exit_code == 0
    assert "kept" in done.stdout
    assert done.stderr == "warning: Seqnums 5 to 8 are lost.\n"


def test_a_bound_below_the_trim_floor_names_the_option(platform: type[Platform]) -> None:
    platform({"title": "TrimmedError", "detail": "Trimmed.", "next_seqnum": 541}, 410)
    done = run("log", "read", "orders", "--bound", "3")
    output = "Records below seqnum 541 were trimmed; read from there: --bound 541.\n"
    assert (done.exit_code, done.stderr) == (2, output)


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        (("read", "orders"), {}),
        (("range", "orders"), {}),
        (("read", "orders", "--since", "2026-11-21T18:00Z"),
         {"since": "2026-11-21T18:00:00+00:00"}),
        (("read", "orders", "--follow"), {}),
        (("read", "orders", "--follow", "--since", "2026-11-21T18:00Z"),
         {"since": "2026-11-21T18:00:00+00:00"}),
    ],
)  # fmt: skip
def test_no_bound_is_sent_without_the_option(
    platform: type[Platform], arguments: tuple[str, ...], sent: dict[str, str]
) -> None:
    """The platform then begins at the first untrimmed record."""
    asked = platform({"detail": "The end."}, 404)
    run("log", *arguments)
    [request] = asked.asked
    query = dict(request.url.params)
    assert {name: query[name] for name in query if name in ("bound", "since")} == sent


def test_status_and_apps_are_readable(platform: type[Platform]) -> None:
    platform({"ready": True, "engine": {"suffix": {"entries": 1234}}, "functions": {"workers": []}})
    shown = run("status").stdout
    assert "suffix.entries" in shown
    assert "1,234" in shown
    function = {"name": "buy", "doc": "Buy it.\nMore.", "arguments": {"properties": {"n": {}}}}
    schedule = {"function": "sweep", "expression": "*/5 * * * *", "timezone": "UTC"}
    shop = {"name": "shop", "version": 2, "owner": "me", "functions": [function]}
    platform({"apps": [{**shop, "schedules": [schedule], "services": ["drive"]}]})
    shown = run("apps").stdout
    assert "called at */5 * * * * (UTC)" in shown
    assert ".drive" in shown
    assert "shop" in shown
    assert "Buy it." in shown
    platform({"apps": []})
    assert "indilog deploy" in run("apps").stdout


def test_watching_redeploys_when_a_file_changes_and_survives_a_refusal(
    platform: type[Platform], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shop.py"
    file.write_text("x = 0")
    asked = platform({"name": "shop", "version": 1, "functions": []})
    naps = 0

    def nap(_: float) -> None:
        nonlocal naps
        naps += 1
        if naps > 3:
            raise KeyboardInterrupt
        file.write_text(f"x = {naps}")
        os.utime(file, ns=(0, naps))
        asked.status = 422 if naps == 1 else 200

    monkeypatch.setattr("indilog.cli.commands.sleep", nap)
    run("deploy", str(file), "--watch")
    sent = [json.loads(request.content)["sources"]["shop.py"] for request in asked.asked]
    assert sent == ["x = 0", "x = 1", "x = 2", "x = 3"]


def test_last_and_follow_print_the_last_records_in_order_and_continue_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(seqnum: int) -> dict[str, object]:
        return {"seqnum": seqnum, "tags": [], "time": 0.0, "data": "x"}

    def answer(request: httpx.Request) -> httpx.Response:
        asked = dict(request.url.params)
        if request.url.path.endswith("/records"):
            assert (asked["direction"], asked["limit"]) == ("prev", "2")
            return httpx.Response(200, json={"records": [record(7), record(5)], "next_bound": 4})
        assert request.url.path.endswith("/stream")
        if asked["bound"] == "10":  # the command requested the records after the first page
            return httpx.Response(404, json={"detail": "The end."})
        assert asked["bound"] == "8"
        return httpx.Response(200, text=f"data: {json.dumps(record(9))}\n\n")

    real = httpx.Client
    monkeypatch.setattr(
        httpx, "Client",
        lambda **given: real(base_url=given["base_url"], transport=httpx.MockTransport(answer)),
    )  # fmt: skip
    done = run("log", "read", "orders", "--last", "--follow", "--limit", "2", "--json")
    assert [json.loads(line)["seqnum"] for line in done.stdout.splitlines()] == [5, 7, 9]
    assert done.stderr.endswith("The end.\n")


@pytest.mark.parametrize("fault", [httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout])
def test_an_unknown_outcome_is_not_reported_as_unreachable(
    monkeypatch: pytest.MonkeyPatch, fault: type[httpx.TransportError]
) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise fault("gone", request=request)

    real = httpx.Client
    monkeypatch.setattr(
        httpx, "Client",
        lambda **given: real(base_url=given["base_url"], transport=httpx.MockTransport(broken)),
    )  # fmt: skip
    for command in (("invoke", "shop.buy"), ("log", "append", "orders", "x")):
        done = run(*command)
        assert done.exit_code == 1
        assert "The request may have been done: check before you repeat it." in done.stderr
    assert "may have been done" not in run("log", "tail", "orders").stderr


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (("--age", "7d"), {"age_s": 604_800.0, "size_bytes": None}),
        (("--size", "10GiB"), {"age_s": None, "size_bytes": 10 * 2**30}),
        (("--age", "1d12h", "--size", "1.5MB"), {"age_s": 129_600.0, "size_bytes": 1_500_000}),
        (("--off",), {"age_s": None, "size_bytes": None}),
    ],
)
def test_a_retention_policy_is_sent_as_a_whole(
    platform: type[Platform], options: tuple[str, ...], policy: dict[str, object]
) -> None:
    asked = platform(policy)
    assert run("log", "retention", "orders", *options).exit_code == 0
    [request] = asked.asked
    assert (request.method, request.url.path) == ("PUT", "/logs/orders/retention")
    assert json.loads(request.content) == policy


def test_a_retention_policy_is_printed_as_a_sentence(platform: type[Platform]) -> None:
    asked = platform({"age_s": 3600.0, "size_bytes": 5000})
    output = run("log", "retention", "orders").stdout
    assert (
        output
        == "The log orders keeps records of the last 1 hour, at most the newest 5,000 bytes.\n"
    )
    assert asked.asked[0].method == "GET"
    platform({"age_s": None, "size_bytes": None})
    assert run("log", "retention", "orders").stdout == "The log orders keeps all records.\n"


@pytest.mark.parametrize(
    "options",
    [("--age", "0s"), ("--age", "7"), ("--size", "0"), ("--size", "-1"), ("--size", "10iB"),
     ("--off", "--age", "7d")],
)  # fmt: skip
def test_an_invalid_retention_policy_is_refused_in_one_sentence(options: tuple[str, ...]) -> None:
    done = run("log", "retention", "orders", *options)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_recorded_calls_are_listed(platform: type[Platform]) -> None:
    call = {"id": "i-1", "function": "shop.buy", "state": "done", "seqnum": 7, "due": 1.7e9,
            "tries": 1, "executor": None, "ended": 1.7e9 + 5}  # fmt: skip
    asked = platform({"invocations": [call], "next": 7})
    done = run("invocation", "list", "--app", "shop", "--state", "done", "--limit", "1")
    assert "i-1" in done.stdout
    assert "2023-11-14 22:13:25" in done.stdout
    assert done.stderr == "There are more calls: --page 7\n"
    assert dict(asked.asked[0].url.params) == {"app": "shop", "state": "done", "limit": "1"}
    platform({"invocations": [], "next": None})
    assert run("invocation", "list").stdout == "There are no such calls.\n"
    platform({"invocations": [call], "next": None})
    assert json.loads(run("invocation", "list", "--json").stdout) == call


def test_held_outcomes_are_listed_and_released(platform: type[Platform]) -> None:
    run_held = {"log": "shop/flow", "run": "order-1", "calls": 2, "bytes": 20}
    asked = platform({"held": [run_held], "has_more": True})
    done = run("invocation", "held", "--log", "shop/flow")
    assert "order-1" in done.stdout
    assert done.stderr == "There may be more runs; name one flow with --log.\n"
    assert dict(asked.asked[0].url.params) == {"log": "shop/flow"}
    platform({"held": [run_held], "has_more": False})
    assert json.loads(run("invocation", "held", "--json").stdout) == run_held
    platform({"held": [], "has_more": False})
    assert run("invocation", "held").stdout == "No outcomes are held.\n"
    asked = platform({"released": 1200})
    done = run("invocation", "release", "shop/flow", "--run", "order-1")
    assert done.stdout == "Released the outcomes of 1,200 calls.\n"
    assert asked.asked[0].method == "DELETE"
    assert dict(asked.asked[0].url.params) == {"log": "shop/flow", "run": "order-1"}


def test_zones_of_one_process_are_refused(tmp_path: Path) -> None:
    refused = run("up", "--data", str(tmp_path), "--port", "0", "--zones", "east,west")
    assert refused.exit_code == 2
    assert "--zones needs --nodes" in refused.stderr
    assert not (tmp_path / "journal").exists()
