"""The hooks of mkdocs: they add pages generated from the code, and files outside docs/ that pages link to."""

import re
from pathlib import Path
from typing import Any

import api_pages
import command_pages
import config_pages
import diagrams
import mermaidx
import message_page
import outside
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_IN_SEARCH = "---\nsearch:\n  {}\n---\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation, and unlisted pages at the end of the guides."""
    config.site_url = outside.site_url()
    generated: list[Any] = [
        {"Configuration": [*config_pages.pages()]},
        {"Commands": command_pages.PATH},
        {"Python": [*api_pages.pages()]},
        {"Error messages": message_page.PATH},
    ]
    sections: dict[str, list[Any]] = {title: entries for part in config.nav or [] for title, entries in part.items()}
    named = re.findall(r"[\w-]+\.md", str(sections))
    sections["Guides"] += sorted({path.name for path in Path(config.docs_dir).glob("*.md")} - {*named})
    sections["Reference"] += generated
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the pages of the repository's root, and the files that any page links to."""
    written = {file.src_uri: file.content_string for file in files.documentation_pages()}
    root = {place: (outside.REPOSITORY / path).read_text(encoding="utf-8") for path, place in outside.PAGES.items()}
    texts = {f"docs/{path}": text for path, text in written.items()}
    texts |= {path: root[place] for path, place in outside.PAGES.items()}
    made = {place: outside.with_inner_links(root[place], path, place) for path, place in outside.PAGES.items()}
    made |= {place: _IN_SEARCH.format("boost: 2") + text for place, text in config_pages.pages().items()}
    for module in (command_pages, api_pages, message_page):
        made |= module.pages()
    for path in sorted(outside.linked(texts)):
        if not (outside.REPOSITORY / path).exists():
            raise PluginError(f"{path} must exist, as a page links to it: got none. Correct the link.")
        if (place := outside.place_of(path)).endswith(".md"):
            files.append(
                File.generated(
                    config,
                    place,
                    content=_IN_SEARCH.format("exclude: true") + outside.shown(path),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
        else:
            files.append(File.generated(config, place, abs_src_path=str(outside.REPOSITORY / path)))
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    for origin, text in texts.items():
        for path, mermaid in diagrams.drawn(text, 0)[1].items():
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, content=_svg(mermaid, origin)))
    return files


def _svg(mermaid: str, origin: str) -> str:
    """Draw a diagram of a page, in its own size."""
    try:
        drawn = str(mermaidx.render(mermaid).svg())
    except RuntimeError as error:
        raise PluginError(
            f"diagrams of {origin} must be Mermaid: got {error}. Correct the one that begins so:\n{mermaid[:200]}"
        ) from error
    return re.sub(r'width="100%"(.*?viewBox="\S+ \S+ (\S+) (\S+)")', r'width="\2" height="\3"\1', drawn, count=1)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to the site's own pages, and replace diagrams by pictures."""
    place = page.file.src_uri
    if page.file.generated_by is None:
        markdown = outside.with_inner_links(markdown, f"docs/{place}", place)
    return diagrams.drawn(markdown, place.count("/"))[0]


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse pages that would load anything from the network."""
    source = r"""<(?:script|img|iframe|link[^>]*stylesheet)[^>]* (?:src|href)=["']?(https?:[^"' >]+)"""
    for file in Path(config.site_dir).rglob("*.html"):
        if match := re.search(source, file.read_text(encoding="utf-8")):
            raise PluginError(f"{file.name} must load nothing from the network: got {match[1]}. Bundle it.")
