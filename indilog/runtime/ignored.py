"""Counts and logs the events that `NodeShell` and its roles ignore."""

from __future__ import annotations

import structlog

from indilog.base.ids import NodeId
from indilog.base.metrics import Metrics
from indilog.roles.role import Ignore, Location

log = structlog.get_logger(__name__)


def count_ignored(metrics: Metrics, reason: str, **details: object) -> None:
    """Count an ignored event that came from outside, and log it at debug level."""
    metrics.ignored[reason] += 1
    log.debug("ignored", reason=reason, **details)


def count_effect(metrics: Metrics, node: NodeId, effect: Ignore) -> None:
    """Count an event that a role ignored. If the event is a `Location` on the disk, also count
    damage, and log an error.
    """
    if isinstance(effect.event, Location):
        metrics.damaged += 1
        metrics.ignored[effect.reason] += 1
        log.error(effect.reason, node=node, **effect.event._asdict())
    else:
        count_ignored(metrics, effect.reason, node=node, what=repr(effect.event)[:200])
