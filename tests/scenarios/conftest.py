"""The option that renews scenario files."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--rewrite`."""
    parser.addoption(
        "--rewrite", action="store_true", help="write into scenario files what the roles do now"
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Return whether scenario files are written anew."""
    return bool(request.config.getoption("--rewrite", default=False))
