"""An invalid workflow is refused at its definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from bokiflow import Flow, FlowSettingsError, Startable, Workflow

FLOW = Flow("shop")


async def nothing() -> None:
    pass


async def another_kind(wf: int) -> None:
    pass


async def no_kind(wf) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    pass


async def keyword(*, wf: Workflow) -> None:
    pass


async def not_first(n: int, wf: Workflow) -> None:
    pass


@pytest.mark.parametrize("body", [nothing, another_kind, no_kind, keyword, not_first])
def test_a_body_without_the_workflow_as_first_parameter_is_refused(
    body: Callable[..., Any],
) -> None:
    with pytest.raises(FlowSettingsError, match=r"must take `wf: bokiflow\.Workflow` first"):
        Flow("shop").workflow(body)


@FLOW.workflow
async def takes_later(wf: Workflow, other: Later) -> None:
    pass


@FLOW.workflow
async def takes_ctx(ctx: Any, other: Later) -> None:  # noqa: ANN401 - known by its name
    pass


@dataclass
class Later:
    """Defined after the workflow that names it."""


@pytest.mark.parametrize("workflow", [takes_later, takes_ctx])
def test_types_may_be_defined_after_the_workflow(workflow: Startable[None]) -> None:
    assert workflow.definition.signature.takes_context
