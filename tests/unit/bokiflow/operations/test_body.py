"""Which functions get the context as their first argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bokiflow.operations.body import Body
from indilog import Context


def named(ctx: object, number: int) -> None: ...
def annotated(first: Context, number: int) -> None: ...
def neither(number: int, ctx: object) -> None: ...
def without() -> None: ...


@pytest.mark.parametrize(
    ("call", "takes_context"),
    [
        (named, True),
        (annotated, True),
        (neither, False),
        (without, False),
        (max, False),  # a builtin without a signature
    ],
)
def test_a_body_whose_first_parameter_is_the_context_gets_it(
    call: Callable[..., object], *, takes_context: bool
) -> None:
    assert Body(call, None).takes_context is takes_context
