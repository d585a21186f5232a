"""The social network's functions, called directly over a log in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from functions.social import app as social
from indilog.apps.app import Context
from indilog.testing import MemoryLogs
from tests.unit.functions.stand_in import Functions

pytestmark = pytest.mark.asyncio


@pytest.fixture
def logs() -> MemoryLogs:
    return MemoryLogs()


@pytest.fixture
def context(logs: MemoryLogs) -> Callable[[], Context]:
    return lambda: Functions(social.app, logs).context()


async def test_a_name_is_registered_once(context: Callable[[], Context]) -> None:
    assert await social.register(context(), "ann", "secret")
    assert not await social.register(context(), "ann", "other")
    assert await social.login(context(), "ann", "secret") == social.Profile("ann", 0, 0, 0)
    assert await social.login(context(), "ann", "other") is None
    assert await social.login(context(), "bob", "secret") is None


async def test_the_password_is_not_in_the_log(
    context: Callable[[], Context], logs: MemoryLogs
) -> None:
    await social.register(context(), "ann", "secret")
    record = logs.record(0)
    assert record is not None
    assert b"secret" not in record.data


async def test_no_function_answers_a_password_its_hash_or_its_salt(
    context: Callable[[], Context],
) -> None:
    await social.register(context(), "ann", "secret")
    shown = await social.objects(context(), ["account:ann", "user:ann", "account:bob"])
    assert (shown[0], shown[2]) == ({"user": "ann"}, None)
    assert not {"password", "salt"} & (shown[1] or {}).keys()


@pytest.mark.parametrize("user", ["", "x" * 65, "a\nb"])
async def test_a_bad_name_is_refused(context: Callable[[], Context], user: str) -> None:
    with pytest.raises(ValueError, match="1 to 64 characters"):
        await social.register(context(), user, "x")


async def test_following_is_visible_to_both_users(context: Callable[[], Context]) -> None:
    for user in ("ann", "bob", "cid"):
        await social.register(context(), user, "")
    assert await social.follow(context(), "ann", "bob") == 1
    assert await social.follow(context(), "ann", "cid") == 2
    assert await social.follow(context(), "ann", "cid") == 2
    assert (await social.profile(context(), "ann")).follows == 2
    assert (await social.profile(context(), "cid")).followers == 1


async def test_unknown_people_are_reported(context: Callable[[], Context]) -> None:
    await social.register(context(), "ann", "")
    for call in (
        social.follow(context(), "ann", "bob"),
        social.follow(context(), "bob", "ann"),
        social.post(context(), "bob", "x"),
        social.profile(context(), "bob"),
    ):
        with pytest.raises(LookupError, match="'bob'; register first"):
            await call


async def test_a_post_reaches_followers_and_the_public_timeline(
    context: Callable[[], Context],
) -> None:
    await social.load(context(), {"ann": ["bob"], "bob": ["ann"]})
    post = await social.post(context(), "ann", "Hello")
    [expected] = await social.timeline(context(), "bob")
    assert (expected.id, expected.author, expected.text) == (post, "ann", "Hello")
    assert await social.timeline(context()) == [expected]
    assert await social.timeline(context(), "ann") == []
    shown = await social.profile(context(), "ann")
    assert (shown.posts, shown.newest) == (1, expected)
    assert (await social.profile(context(), "bob")).waiting == 1


async def test_a_post_reaches_at_most_four_followers(context: Callable[[], Context]) -> None:
    fans = [f"fan{n}" for n in range(10)]
    await social.load(context(), {"ann": fans} | {fan: ["ann"] for fan in fans})
    await social.post(context(), "ann", "Hello")
    reached = [fan for fan in fans if await social.timeline(context(), fan)]
    assert len(reached) == 4


async def test_timelines_are_bounded_and_show_the_newest_first(
    context: Callable[[], Context],
) -> None:
    await social.load(context(), {"ann": ["bob"], "bob": ["ann"]})
    posts = [await social.post(context(), "ann", str(n)) for n in range(100)]
    shown = await social.timeline(context(), "bob")
    assert [post.id for post in shown] == posts[:-9:-1]
    own, public = await social.objects(context(), ["timeline:bob", "timeline"])
    assert own == {"posts": posts[-24:]}
    assert public == {"posts": posts[-96:]}


async def test_a_long_post_is_refused(context: Callable[[], Context]) -> None:
    await social.register(context(), "ann", "")
    with pytest.raises(ValueError, match="280"):
        await social.post(context(), "ann", "x" * 281)


async def test_concurrent_posts_are_all_kept(context: Callable[[], Context]) -> None:
    await social.load(context(), {"ann": ["bob"], "bob": ["ann"]})
    posts = await asyncio.gather(*[social.post(context(), "ann", str(n)) for n in range(20)])
    assert len(set(posts)) == 20
    assert (await social.profile(context(), "ann")).posts == 20


async def test_reloading_keeps_the_data_of_users(context: Callable[[], Context]) -> None:
    assert await social.load(context(), {"1": ["2"], "2": ["1"]}) == 2
    await social.post(context(), "1", "Hello")
    assert await social.load(context(), {"1": ["2", "3"], "2": ["1"], "3": ["1"]}) == 1
    shown = await social.profile(context(), "1")
    assert (shown.follows, shown.followers, shown.posts) == (2, 2, 1)
    assert await social.login(context(), "3", "3") is not None


async def test_too_many_users_in_one_call_are_refused(context: Callable[[], Context]) -> None:
    people: dict[str, list[str]] = {str(n): [] for n in range(21)}
    with pytest.raises(ValueError, match="at most 20"):
        await social.load(context(), people)
    del people["0"]
    assert await social.load(context(), people) == 20


async def test_objects_are_shown_unchanged(context: Callable[[], Context]) -> None:
    await social.load(context(), {"1": ["2"]})
    found: list[Any] = await social.objects(context(), ["user:1", "user:9"])
    assert found == [{"follows": ["2"], "followers": ["2"], "posts": 0}, None]
    with pytest.raises(ValueError, match="at most 1000"):
        await social.objects(context(), ["x"] * 1001)
