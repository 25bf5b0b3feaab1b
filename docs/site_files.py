"""Which files the documentation's site is made of: `mkdocs.yml` calls this as a hook.

MkDocs takes pages from one folder. Ours stand where a reader of the repository looks for them: beside the
code, in `docs/`, and with each example. The site keeps their places, so a link works in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
LOST_LIST = re.compile(r"<p>(?:(?!</p>).)*\n(?:[-*]|\d+\.) ", re.DOTALL)
"""A paragraph with a list that Python-Markdown did not see; GitHub does."""
log = get_plugin_logger("site_files")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages, and what they link to, in the place of what lies in `docs_dir`."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    for path in dict.fromkeys([*pages, *_linked(pages)]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def _linked(pages: list[Path]) -> Iterator[Path]:
    """Files that pages link to: pictures, configurations, code."""
    for page in pages:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                yield target


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Warn of what looks different here and on GitHub; `mkdocs build --strict` makes it an error."""
    if found := LOST_LIST.search(html):
        log.warning("%s: put an empty line before this list: %r", page.file.src_uri, found.group())
    return html
