"""Checks idempotency keys. A function has at most one invocation per key, and the arguments of this
invocation never change (docs/decisions/0018). `InvocationService` and the worker host call the
functions of this module.
"""

from __future__ import annotations

from typing import Final

import msgspec

from indilog.base.errors import InvalidArgumentsError
from indilog.link.link_messages import Failed, Returned
from indilog_compute.invocations.invocation_table import InvocationTable
from indilog_compute.invocations.records import (
    HOLDER_CHARACTERS_MAX,
    KEY_CHARACTERS_MAX,
    digest_of,
)

_KEPT: Final = (
    "This is the outcome of the call with this idempotency key; to run it again, use another key."
)


def check_key(function: str, key: str) -> None:
    """Check an idempotency key; an empty `key` means that the call has no key.

    Raises:
        InvalidArgumentsError: the key is too long, or not printable.
    """
    if len(key) > KEY_CHARACTERS_MAX or not key.isprintable():
        raise _misfit(function, f"is 1 to {KEY_CHARACTERS_MAX} printable characters")


def check_holder(function: str, key: str, holder: str) -> None:
    """Check the holder of a call; an empty holder means that the outcome is not held.

    Raises:
        InvalidArgumentsError: the holder is too long, or the call has no key.
    """
    if len(holder) > HOLDER_CHARACTERS_MAX or (holder and not key):
        problem = f"has 1 to {HOLDER_CHARACTERS_MAX} characters and needs an idempotency key"
        raise InvalidArgumentsError(
            f"{function} was not run: the holder of an outcome {problem}.",
            [{"field": "holder", "problem": problem}],
        )


def known_with(table: InvocationTable, function: str, arguments: bytes, key: str) -> str | None:
    """Return the id of the invocation of `function` with this key, open or ended; None if there is
    no such invocation, or if `key` is empty.

    Raises:
        InvalidArgumentsError: the invocation with this key has other arguments.
    """
    known = table.with_key(function, key) if key else None
    if known is None:
        return None
    if known.digest != digest_of(arguments):
        raise _misfit(function, "was used with other arguments; use another key")
    return known.id


def kept_with_key(outcome: Returned | Failed) -> Returned | Failed:
    """Return an outcome for a caller that used an idempotency key.

    The text of a transient error, such as a conflict, advises to repeat the call. But a repeated
    call with the same key would get the same outcome. So this function adds the advice to use
    another key.
    """
    if isinstance(outcome, Returned) or not outcome.attributes.get("temporary"):
        return outcome
    text = outcome.message.removesuffix(_KEPT).rstrip()
    stop = "" if text.endswith((".", "!", "?")) else "."
    return msgspec.structs.replace(outcome, message=f"{text}{stop} {_KEPT}")


def _misfit(function: str, problem: str) -> InvalidArgumentsError:
    fault = {"field": "Idempotency-Key", "problem": problem}
    return InvalidArgumentsError(f"{function} was not run: its idempotency key {problem}.", [fault])
