"""Claims about `indilog.connect` without a connection: before there is one, and when it is lost."""

from __future__ import annotations

import pytest

import indilog
from indilog.base.errors import CallOutcomeUnknownError
from indilog.link.access import check_url
from indilog.link.link_messages import Answer, LinkLostError, Question, failed
from indilog.remote_client import RemoteClient


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "url", ["", "banana", "localhost:8080", "http://", "ftp://here", "http://here:x", "http://[", 3]
)
async def test_what_is_no_url_is_told_so_not_that_nobody_answers(url: str) -> None:
    with pytest.raises(ValueError, match=r"A platform's URL is like http://"):
        async with indilog.connect(url):
            pass


@pytest.mark.parametrize("url", ["http://here:8080", "https://[::1]/", "http://here/below"])
def test_a_url_is_taken_without_the_slash_at_its_end(url: str) -> None:
    assert check_url(url) == url.rstrip("/")


@pytest.mark.asyncio
async def test_who_is_cut_off_while_deploying_or_undeploying_is_told_to_repeat_it() -> None:
    class CutOff(RemoteClient):
        async def ask(self, question: Question) -> Answer:
            return failed(LinkLostError("The connection closed."))

    client = CutOff("http://here:8080")
    with pytest.raises(CallOutcomeUnknownError, match=r"lost while deploying; deploy again"):
        await client.deploy({"demo.py": ""})
    with pytest.raises(CallOutcomeUnknownError, match=r"lost while undeploying; undeploy again"):
        await client.undeploy("demo")
