"""Followers of a log report a loss once and continue after it (`indilog.sdk.losses`)."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from indilog.base.errors import DataLossError
from indilog.sdk.losses import Losses, name_loss


def test_a_follower_names_a_loss_once_and_reads_on_after_it() -> None:
    losses = Losses("orders", "Ask again.")
    assert (len(losses), losses.sentence) == (0, "")
    lost = DataLossError("Lost.", seqnum=5, next_seqnum=8, tags=["a"])
    with capture_logs() as lines:
        assert losses.read_on_after(lost, 3) == 8
    [line] = lines
    assert line["event"] == "orders lost"
    assert (line["first_seqnum"], line["next_seqnum"], line["tags"]) == (5, 8, ["a"])
    assert line["consequence"] == "Ask again."
    assert losses.sentence == "Records of orders at seqnums [5, 8) may be lost by damage."


@pytest.mark.parametrize("following", [None, 3])
def test_a_loss_without_an_end_is_raised(following: int | None) -> None:
    losses = Losses("orders", "Ask again.")
    with pytest.raises(DataLossError):
        losses.read_on_after(DataLossError("Lost.", seqnum=3, next_seqnum=following), 3)
    assert len(losses) == 0


def test_an_error_of_a_loss_names_the_state_once() -> None:
    lost = DataLossError("Lost.", seqnum=5, next_seqnum=8, tags=["a"])
    reported = name_loss("Object 'x'", lost)
    assert str(reported) == "Object 'x' cannot be read: Lost."
    assert (reported.seqnum, reported.next_seqnum, reported.tags) == (5, 8, ["a"])
    assert name_loss("Object 'x'", reported) is reported
