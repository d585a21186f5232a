"""Following a log from the command line, without a platform."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
import typer

from indilog.cli.follow import RESUME_S, follow
from indilog.cli.gateway import Gateway

LINES = tuple[str, ...]


class Streams(httpx.SyncByteStream):
    """A response body that breaks after its lines."""

    def __init__(self, lines: LINES) -> None:
        self._lines = lines

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            yield line.encode() + b"\n\n"
        raise httpx.ReadError("broken")


class FollowedGateway:
    """A gateway that answers by a script, a clock, and the printed output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *script: LINES | int | Exception) -> None:
        self.asked: list[str | None] = []
        self.since: list[str | None] = []
        self.shown: list[int] = []
        self.now = 0.0
        self._script = list(script)
        real = httpx.Client
        monkeypatch.setattr(
            httpx,
            "Client",
            lambda **given: real(
                base_url=str(given["base_url"]), transport=httpx.MockTransport(self._answer)
            ),
        )
        self.gateway = Gateway("http://127.0.0.1:1")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.params.get("bound"))
        self.since.append(request.url.params.get("since"))
        answer = self._script.pop(0) if self._script else httpx.ConnectError("away")
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return httpx.Response(answer, json={"detail": "no"})
        return httpx.Response(200, stream=Streams(answer))

    def follow(self, bound: int | None = 5, **query: object) -> None:
        def sleep(seconds: float) -> None:
            self.now += seconds

        follow(
            self.gateway,
            "/logs/orders/stream",
            bound,
            lambda record: self.shown.append(record["seqnum"]),
            sleep=sleep,
            clock=lambda: self.now,
            tag="t",
            **query,
        )


def record(seqnum: int) -> str:
    return "data: " + json.dumps({"seqnum": seqnum})


def test_a_broken_stream_resumes_at_the_next_seqnum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = httpx.ConnectError("away")
    gateway = FollowedGateway(
        monkeypatch, (record(5), record(9)), away, 503, (": alive",), (record(10),)
    )
    with pytest.raises(typer.Exit):
        gateway.follow()
    assert gateway.shown == [5, 9, 10]
    assert gateway.asked[:6] == ["5", "10", "10", "10", "10", "11"]
    assert "is unreachable; waiting up to 60 s" in capsys.readouterr().err


def test_a_stream_that_began_at_a_time_resumes_after_its_last_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = FollowedGateway(monkeypatch, (": alive",), (record(5),))
    with pytest.raises(typer.Exit):
        gateway.follow(bound=None, since="17.5")
    assert gateway.shown == [5]
    assert gateway.asked[:3] == [None, None, "6"]
    assert gateway.since[:3] == ["17.5", "17.5", None]


def test_a_platform_that_stays_unreachable_ends_the_command_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = FollowedGateway(monkeypatch, (record(5),))
    with pytest.raises(typer.Exit) as ended:
        gateway.follow()
    assert ended.value.exit_code == 2
    assert RESUME_S <= gateway.now <= RESUME_S + 5
    assert capsys.readouterr().err.splitlines()[-1].startswith("No platform answers at")


def test_an_unreachable_platform_at_the_start_ends_the_command_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = FollowedGateway(monkeypatch)
    with pytest.raises(typer.Exit):
        gateway.follow()
    assert (gateway.now, len(gateway.asked)) == (0.0, 1)


@pytest.mark.parametrize(("status", "code"), [(400, 2), (503, 1)])
def test_a_refusal_at_first_ends_the_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    code: int,
) -> None:
    gateway = FollowedGateway(monkeypatch, status)
    with pytest.raises(typer.Exit) as ended:
        gateway.follow()
    assert ended.value.exit_code == code
    assert capsys.readouterr().err == "no\n"
