"""What MkDocs does not do by itself: pages from files of the repository outside of docs/.

The pages link to such files by relative paths, which work in a checkout and on a forge. In the site
each of them becomes a page: Markdown as it is, any other file as a block of code.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALWAYS = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of files outside of docs/: those that pages link to, and two always."""
    wanted = {*ALWAYS}
    for file in files.documentation_pages():
        wanted.update(_outside(Path(DOCS, file.src_uri).read_text(), file.src_uri))
    wanted.update(*(_outside((ROOT / name).read_text(), f"../{name}") for name in ALWAYS))
    for name in sorted(wanted):
        level = InclusionLevel.UNDEFINED if name in ALWAYS else InclusionLevel.NOT_IN_NAV
        page = File.generated(config, _page(name), content=_content(name), inclusion=level)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside of docs/ lead to their pages."""
    here = page.file.src_uri
    source = f"../{here}" if here in ALWAYS else here
    return LINK.sub(lambda link: _relinked(link, source, here), markdown)


def _relinked(link: re.Match[str], source: str, here: str) -> str:
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), link[1]))
    path = target.removeprefix("docs/") if target.startswith("docs/") else _page(target)
    return f"]({posixpath.relpath(path, posixpath.dirname(here) or '.')}{link[2] or ''})"


def _outside(markdown: str, src_uri: str) -> set[str]:
    """Files of the repository outside of docs/ that a page links to, from the root."""
    found = set()
    for link in LINK.finditer(markdown):
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(src_uri), link[1]))
        if not target.startswith("docs/"):
            found.add(target)
    return found


def _page(name: str) -> str:
    return name if name in ALWAYS else f"files/{name}.md".replace(".md.md", ".md")


def _content(name: str) -> str:
    path = ROOT / name
    if not path.is_file():
        raise PluginError(f"a page links to {name}, which is no file of the repository.")
    text = path.read_text()
    if path.suffix == ".md":
        return text
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {os.path.basename(name)}\n\n`{name}`\n\n````{language}\n{text}````\n"
