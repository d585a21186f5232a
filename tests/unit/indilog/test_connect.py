"""Claims about `indilog.connect` before there is a connection."""

from __future__ import annotations

import pytest

import indilog
from indilog.connect import check_url


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
