"""Lines that lead to pages of an installation, and to the same pages of the site where its address is known."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from arealite.utils import doc_pages
from arealite.utils.doc_pages import more


def test_long_messages_cost_nothing() -> None:
    began = time.process_time()
    for text in (
        " must be : got " * 10**5,
        "allocation_mode must fit the" * 10**5,
        "… must be\n" * 10**5,
        "\x00" * 10**7,
    ):
        doc_pages.page_of_message(text)
    assert time.process_time() - began < 1.0


def test_without_pages_there_is_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc_pages, "_PACKAGE", tmp_path / "arealite")
    doc_pages._lines.cache_clear()
    try:
        assert more("models.md#lora") == more("") == []
        assert doc_pages.page_of_message("x must fit the y") == ""
        (tmp_path / "arealite" / "docs").mkdir(parents=True)
        (tmp_path / "arealite" / "docs" / "models.md").write_text("# Models\n```\n# no heading\n```\n## LoRA\n")
        doc_pages._lines.cache_clear()
        assert more("models.md#lora") == [f"  more: {tmp_path}/arealite/docs/models.md:5 (LoRA)"]
        assert more("models.md#no-heading") == []
    finally:
        doc_pages._lines.cache_clear()


@pytest.mark.parametrize(
    ("urls", "behind"),
    [
        (
            "Project-URL: Source, https://example.org\nProject-URL: Documentation, https://example.org/docs/\n",
            True,
        ),
        ("Project-URL: Source, https://example.org/code\nProject-URL: nonsense\n", False),
        ("", False),
    ],
)
def test_the_site_follows_where_the_metadata_have_its_address(
    urls: str, behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "arealite-9.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: arealite\nVersion: 9\n{urls}"
    (tmp_path / "arealite-9.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    doc_pages.address.cache_clear()
    try:
        lines = more("models.md#lora") + more("models.md")
    finally:
        doc_pages.address.cache_clear()
    at = "https://example.org/docs/models.html"
    ends = [" (LoRA)", " (Models that train)"]
    assert all(line.startswith(f"  more: {doc_pages.folder()}/models.md:") for line in lines)
    assert [line[line.index(" (") :] for line in lines] == (
        [f"{ends[0]}, {at}#lora", f"{ends[1]}, {at}#models-that-train"] if behind else ends
    )
