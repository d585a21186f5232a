"""The functions of the social network: register, login, profile, timeline, post, follow, and two
bulk functions (load, objects).

The state consists of BokiStore objects in the log `social`. `account:{user}` has name and password.
`user:{user}` has followed people, followers and number of posts. There is a `post:{id}` for each
post. `timeline:{user}` has the newest posts for one person. `timeline` has the newest posts for all
people.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bokistore import Store, Transaction, TxnObject
from indilog import App, Context

app = App("social")

LOG: Final = "social"
PUBLIC: Final = "timeline"
TEXT_LENGTH_MAX: Final = 280
FOLLOWERS_REACHED_MAX: Final = 4
"""Number of randomly chosen followers whose timelines get a post (Boki's benchmark)."""
TIMELINE_POSTS_MAX: Final = 24
PUBLIC_POSTS_MAX: Final = 96
POSTS_SHOWN_MAX: Final = 8
PEOPLE_LOADED_MAX: Final = 20
"""People loaded by one record: a person has three objects, and a record has at most 64 tags."""
OBJECTS_SHOWN_MAX: Final = 1000
SECRET: Final = frozenset({"password", "salt"})
"""Fields that no function answers."""
_EMPTY_TIMELINE: Final[dict[str, list[str]]] = {"posts": []}


@dataclass(frozen=True)
class Post:
    """A post of a user."""

    id: str
    author: str
    text: str
    time: float = 0.0
    """Seconds since 1970, by the clock of the worker that published it."""


@dataclass(frozen=True)
class Profile:
    """The public part of a profile."""

    user: str
    follows: int
    followers: int
    posts: int
    waiting: int = 0
    """Number of posts in the person's timeline."""
    newest: Post | None = None
    """The person's newest post."""


@app.function
async def register(ctx: Context, user: str, password: str) -> bool:
    """Create an account; return whether the name was free."""
    _check_user(user)

    async def body(txn: Transaction) -> bool:
        account = await txn.get(f"account:{user}")
        if account:
            return False
        account.set("", _account(user, password))
        txn.set(f"user:{user}", "", _person([]))
        txn.set(f"timeline:{user}", "", _EMPTY_TIMELINE)
        return True

    return await _store(ctx).transact(body)


@app.function
async def login(ctx: Context, user: str, password: str) -> Profile | None:
    """Return the person's profile if the password is right, else None."""
    async with _store(ctx).transaction() as txn:
        account, person = await txn.get(f"account:{user}"), await txn.get(f"user:{user}")
    if not account or account["password"] != _hashed(password, account["salt"]):
        return None
    return _profile(user, person)


@app.function
async def profile(ctx: Context, user: str) -> Profile:
    """Return the public part of a profile."""
    store = _store(ctx)
    account, person, timeline = await asyncio.gather(
        store.get(f"account:{user}"), store.get(f"user:{user}"), store.get(f"timeline:{user}")
    )
    if not account:
        raise _unknown(user)
    newest = person["posts"] and await store.get(f"post:{_post_id(user, person['posts'])}")
    return Profile(
        user=account["user"],
        follows=len(person["follows"]),
        followers=len(person["followers"]),
        posts=person["posts"],
        waiting=len(timeline["posts"]),
        newest=Post(**newest.value) if newest else None,
    )


@app.function
async def timeline(ctx: Context, user: str | None = None) -> list[Post]:
    """Return the newest posts in a person's timeline, or in the public timeline; newest first."""
    async with _store(ctx).transaction() as txn:
        listed = await txn.get(PUBLIC if user is None else f"timeline:{user}")
        newest = listed.get("posts", [])[: -POSTS_SHOWN_MAX - 1 : -1]
        posts = await asyncio.gather(*[txn.get(f"post:{post}") for post in newest])
    return [Post(**post.value) for post in posts]


@app.function
async def post(ctx: Context, user: str, text: str) -> str:
    """Publish a text; return the post's id.

    One transaction changes the post and the timelines of a few followers. The public timeline is
    changed after this transaction.
    """
    if len(text) > TEXT_LENGTH_MAX:
        raise ValueError(f"A post has at most {TEXT_LENGTH_MAX} characters, not {len(text)}.")

    now = time.time()

    async def body(txn: Transaction) -> str:
        person = await txn.get(f"user:{user}")
        if not person:
            raise _unknown(user)
        person.increment("posts")
        post = _post_id(user, person["posts"])
        txn.set(f"post:{post}", "", {"id": post, "author": user, "text": text, "time": now})
        for follower in _chosen(post, person["followers"]):
            txn.push(f"timeline:{follower}", "posts", post, limit=TIMELINE_POSTS_MAX)
        return post

    store = _store(ctx)
    published = await store.transact(body)
    await store.push(PUBLIC, "posts", published, limit=PUBLIC_POSTS_MAX)
    return published


@app.function
async def follow(ctx: Context, user: str, other: str) -> int:
    """Make `user` follow `other`; return how many people `user` follows now."""

    async def body(txn: Transaction) -> int:
        me, them = await txn.get(f"user:{user}"), await txn.get(f"user:{other}")
        for name, person in ((user, me), (other, them)):
            if not person:
                raise _unknown(name)
        me.add_to_set("follows", other)
        them.add_to_set("followers", user)
        return len(me["follows"])

    return await _store(ctx).transact(body)


@app.function
async def load(ctx: Context, people: dict[str, list[str]]) -> int:
    """Add people with their friends, who follow each other; return how many people are new.

    One record adds all of them. Existing people keep their data, so loading a graph again changes
    nothing. The password of a loaded person is their name.
    """
    if len(people) > PEOPLE_LOADED_MAX:
        raise ValueError(f"Load at most {PEOPLE_LOADED_MAX} people per call, not {len(people)}.")
    for user in people:
        _check_user(user)

    async def body(txn: Transaction) -> int:
        persons = await asyncio.gather(*[txn.get(f"user:{user}") for user in people])
        known = sum(map(bool, persons))
        for (user, friends), person in zip(people.items(), persons, strict=True):
            _befriend(txn, user, friends, person)
        return len(people) - known

    return await _store(ctx).transact(body)


@app.function
async def objects(ctx: Context, names: list[str]) -> list[dict[str, Any] | None]:
    """Return the values of objects in the store without passwords' hashes and salts; None for
    objects that do not exist.
    """
    if len(names) > OBJECTS_SHOWN_MAX:
        raise ValueError(f"Ask for at most {OBJECTS_SHOWN_MAX} objects, not {len(names)}.")
    store = _store(ctx)
    found = await asyncio.gather(*[store.get(name) for name in names])
    return [
        {key: value for key, value in obj.value.items() if key not in SECRET} if obj else None
        for obj in found
    ]


def _store(ctx: Context) -> Store:
    return Store(ctx.log(LOG))


def _befriend(txn: Transaction, user: str, friends: Sequence[str], person: TxnObject) -> None:
    if not person:
        txn.set(f"account:{user}", "", _account(user, user))
        txn.set(f"timeline:{user}", "", _EMPTY_TIMELINE)
        person.set("", _person(friends))
        return
    for side in ("follows", "followers"):
        for friend in sorted(set(friends) - set(person[side])):
            person.push(side, friend)


def _account(user: str, password: str) -> dict[str, str]:
    salt = secrets.token_hex(8)
    return {"user": user, "salt": salt, "password": _hashed(password, salt)}


def _person(friends: Sequence[str]) -> dict[str, Any]:
    listed = sorted(set(friends))
    return {"follows": listed, "followers": listed, "posts": 0}


def _profile(user: str, person: TxnObject) -> Profile:
    return Profile(
        user=user,
        follows=len(person["follows"]),
        followers=len(person["followers"]),
        posts=person["posts"],
    )


def _post_id(user: str, number: int) -> str:
    return f"{user}.{number}"


def _chosen(post: str, followers: Sequence[str]) -> list[str]:
    """Choose the followers whose timelines get a post. A repeated transaction chooses the same
    followers.
    """
    chooser = random.Random(post)  # noqa: S311 - no secret
    return chooser.sample(followers, min(FOLLOWERS_REACHED_MAX, len(followers)))


def _hashed(password: str, salt: str) -> str:
    """Hash a password with a fast, weak hash, because this application measures the platform and
    protects no secrets.
    """
    return hashlib.blake2b(password.encode(), salt=salt.encode(), digest_size=16).hexdigest()


def _check_user(user: str) -> None:
    if not user or len(user) > 64 or not user.isprintable():
        raise ValueError(f"A user's name must be 1 to 64 characters, not {user!r:.80}.")


def _unknown(user: str) -> LookupError:
    return LookupError(f"There is no user {user!r}; register first.")
