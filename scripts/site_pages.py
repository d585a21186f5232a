"""A hook of mkdocs: pages of the site that are kept outside `docs/`.

README.md, CONTRIBUTING.md, SECURITY.md and CHANGELOG.md stand in the root folder, where people and
code hosts look for them. The site shows them too, with other links. `docs/API.md` is `API.md`
there, and what is no page of the site leads to the file in the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")

_LOADED = re.compile(r"https://unpkg\.com/[\w@./-]+")
"""What the theme would load for diagrams, and for browsers that are too old."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root folder's pages."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=_LINK.sub(_turned, text)))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Take the addresses of other hosts out of the theme's JavaScript: nothing may be loaded."""
    for script in Path(config.site_dir, "assets", "javascripts").rglob("*.js"):
        text = script.read_text()
        if (local := _LOADED.sub("", text)) != text:
            script.write_text(local)


def _turned(link: re.Match[str]) -> str:
    """Return a link as it is right on the site; a file that is no page becomes its name."""
    target, anchor = link[1], link[2] or ""
    if target in PAGES:
        return f"]({PAGES[target]}{anchor})"
    if target.startswith("docs/"):
        return f"]({target.removeprefix('docs/')}{anchor})"
    return f"](#)<!-- {target} -->"
