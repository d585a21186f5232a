"""The interface is complete and what the documentation says; generated code is up to date."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import indilog
from indilog.base.errors import FunctionFailedError, IndilogError, InvalidTagError
from indilog.base.ids import tag_columns
from indilog.base.log import Record
from indilog.base.retention import Retention
from indilog_compute.gateway.problems import STATUSES
from indilog_compute.gateway.rpc import indilog_v1_pb2 as pb
from indilog_compute.gateway.rpc.messages import (
    record_to,
    retention_from,
    retention_to,
    tag_from,
    tags_from,
)
from indilog_compute.gateway.rpc.status import code_of

ROOT = Path(__file__).resolve().parents[5]
RPC = "indilog_compute/gateway/rpc"
TAGS = st.lists(st.one_of(st.text("abc:7", min_size=1), st.integers(1, 2**64 - 1)), max_size=5)


def test_the_generated_modules_are_those_of_the_interface(tmp_path: Path) -> None:
    (tmp_path / RPC).mkdir(parents=True)
    subprocess.run([ROOT / "scripts/generate_grpc", tmp_path], check=True, capture_output=True)
    for name in ("indilog_v1_pb2.py", "indilog_v1_pb2.pyi"):
        committed = (ROOT / "compute" / RPC / name).read_text()
        assert committed == (tmp_path / RPC / name).read_text(), "run scripts/generate_grpc"


def test_every_public_error_has_a_code_of_its_own_or_of_its_base() -> None:
    kinds = [getattr(indilog, name) for name in indilog.__all__ if name.endswith("Error")]
    without = [
        kind.__name__
        for kind in kinds
        if kind is not IndilogError and not any(base in STATUSES for base in kind.__mro__)
    ]
    assert without == ["ClientClosedError", "DataDirectoryError"], (
        "these never come from a running platform"
    )


def test_a_temporary_failure_of_a_function_may_be_retried() -> None:
    error = FunctionFailedError("Later.", kind="Busy", temporary=True)
    assert code_of(error) is grpc.StatusCode.UNAVAILABLE


def test_the_page_lists_every_code_and_every_method() -> None:
    page = (ROOT / "docs/GRPC.md").read_text()
    for code in {name for _, name in STATUSES.values()}:
        assert hasattr(grpc.StatusCode, code)
        assert f"`{code}`" in page
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            assert f"`{method.name}`" in page


@given(TAGS, st.binary(max_size=20), st.none() | st.binary(max_size=5))
def test_a_record_keeps_its_tags_and_aux_data(
    tags: list[str | int], data: bytes, aux: bytes | None
) -> None:
    names = tag_columns("log", tuple(tags)).names
    message = record_to(Record(7, names, data, 1.5, 2.5, aux))
    again = pb.Record.FromString(message.SerializeToString())
    assert tags_from(again.tags) == tuple(dict.fromkeys(tags))
    assert (again.data, again.time, again.ordered_at) == (data, 1.5, 2.5)
    assert (again.aux if again.HasField("aux") else None) == aux


@given(st.none() | st.floats(0.1, 1e9), st.none() | st.integers(1, 2**60))
def test_no_limit_is_not_a_limit_of_zero(age_s: float | None, size_bytes: int | None) -> None:
    policy = Retention(age_s=age_s, size_bytes=size_bytes)
    message = pb.Retention.FromString(retention_to(policy).SerializeToString())
    assert retention_from(message) == policy


def test_a_tag_without_content_is_refused() -> None:
    with pytest.raises(InvalidTagError, match="set one of them"):
        tag_from(pb.Tag())
