"""A real headless Chromium with a new empty profile, for tests that act as pages do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

START_MS_MAX = 200_000.0
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Chromium refuses some of these requests itself. Other browsers do not, so this protection is
    # off.
    "--disable-features=LocalNetworkAccessChecks",
)


@contextmanager
def chromium(names: Mapping[str, str]) -> Iterator[Browser]:
    """Run Chromium for the duration of the block; skip the test if it is not installed.

    Args:
        names: host name → address, as if resolved by a DNS server.
    """
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip("There is no Chromium; install it (Debian: apt-get install chromium).")
    rules = ",".join(f"MAP {name} {address}" for name, address in names.items())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found,
            args=[*FLAGS, f"--host-resolver-rules={rules}"],
            timeout=START_MS_MAX,
        )
        try:
            yield browser
        finally:
            browser.close()
