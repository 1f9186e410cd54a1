"""Hooks of mkdocs: pages of other folders become pages of the site, links to files name the file.

The documents are written to be read in the repository, where a link such as `../patches/API.md`
works. In the site, the documents in EXTRA are pages at the same path without the `..`. A link to
a file that is no page is replaced by its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
EXTRA = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/README.md",
    "bench/measured/agents.md",
    "bench/measured/history.md",
    "bench/measured/model.md",
    "bench/measured/recall.md",
    "bench/measured/time.md",
    "bench/results/README.md",
    "deploy/README.md",
    "evoke_proxy/models/MODEL_CARD.md",
    "patches/API.md",
    "patches/APPLIES.md",
    "patches/README.md",
    "patches/SUPPORT.md",
)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_IMAGES = (".svg", ".png")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents of EXTRA and the images they show."""
    for name in EXTRA:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
        for _, _, target in _LINK.findall((ROOT / name).read_text("utf-8")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            if path.endswith(_IMAGES) and (ROOT / path).is_file() and not _has(files, path):
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def _has(files: Files, path: str) -> bool:
    return files.get_file_from_path(path) is not None


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Make the links of a page those of the site."""
    name = page.file.src_uri
    # Where the document lies in the repository, whose paths its links use.
    origin = posixpath.dirname(name if name in EXTRA else f"docs/{name}")
    here = posixpath.dirname(name)

    def replaced(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_, anchor = target.partition("#")
        inside = posixpath.normpath(posixpath.join(origin, path))
        page_name = inside.removeprefix("docs/") if inside.startswith("docs/") else inside
        if _has(files, page_name):
            return f"{mark}[{text}]({posixpath.relpath(page_name, here or '.')}{hash_}{anchor})"
        if (ROOT / inside).exists():
            return text
        return match[0]  # mkdocs reports it

    return _LINK.sub(replaced, markdown)
