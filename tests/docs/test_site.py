"""The documentation as a site: it builds without a warning, and loads nothing from another host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements for which a browser sends a request, with the attribute that names the address."""
CALLED = re.compile(r"https?://[^\s\"'`)]*(?:unpkg|cdn|googleapis|gstatic|jsdelivr|cloudflare)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(directory)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return directory


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in {"canonical", "next", "prev"}:
            return
        if (attribute := LOADED.get(tag)) and (address := values.get(attribute)):
            self.addresses.append(address)


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    foreign = []
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text())
        assert loads.addresses, f"{page.name} has no style"
        foreign += [a for a in loads.addresses if re.match(r"(?:\w+:)?//", a)]
    assert not foreign


def test_no_script_or_style_names_a_host_that_serves_code(site: Path) -> None:
    sources = [*site.rglob("*.js"), *site.rglob("*.css")]
    assert sources
    assert not [f"{s.name}: {m[0]}" for s in sources for m in CALLED.finditer(s.read_text())]


def test_the_search_finds_guides_decisions_and_docstrings(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"] for entry in found}
    assert "API.html" in places
    assert any(place.startswith("decisions/0001") for place in places)
    assert "reference/indilog.html#indilog.Log.append" in places


def test_every_public_name_has_a_place_in_the_reference(site: Path) -> None:
    import bokiflow
    import bokiqueue
    import bokistore
    import bokistream
    import bokiviews
    import indilog.replayed
    import indilog.sdk

    libraries = (bokistore, bokiflow, bokiqueue, bokistream, bokiviews)
    packages = (indilog, indilog.sdk, indilog.replayed, *libraries)
    names = {p: p.__name__.rpartition(".")[2] for p in packages}
    pages = {p: (site / "reference" / f"{name}.html").read_text() for p, name in names.items()}
    for package in packages:
        for name in package.__all__:
            owners = [p for p in (package, indilog) if hasattr(p, name)]
            anchors = [f'id="{p.__name__}.{name}"' in pages[p] for p in owners]
            assert any(anchors), f"{package.__name__}.{name}"


def test_every_diagram_is_rendered(site: Path) -> None:
    for page in ("ARCHITECTURE", "libs/bokiflow"):
        diagrams = (ROOT / "docs" / f"{page}.md").read_text().count("```mermaid")
        text = (site / f"{page}.html").read_text()
        assert text.count('<figure class="sequence"><svg') == diagrams >= 2
        assert "sequenceDiagram" not in text
        assert "stateDiagram" not in text
