"""Every error has a page with a section on it, and the line below a message leads there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensordict import TensorDict

from arealite.api import errors, pages
from arealite.api.config.experiment import SFTConfig
from arealite.api.config.loader import load_expr_config
from arealite.cli.check.findings import PAGES
from arealite.engine.ppo.batch import require_key
from arealite.launcher.plan.plan import entry_script
from arealite.utils import doc_pages
from arealite.utils.files import FileError, reading

PACKAGE = Path(pages.__file__).parents[1]
DOCS = PACKAGE.parent / "docs"
QUOTES = [
    (quote[2], heading)
    for section in "\n".join(doc_pages._lines(doc_pages.TROUBLESHOOTING)).split("\n#")
    for heading, *lines in [section.split("\n")]
    for quote in map(doc_pages._QUOTE.fullmatch, lines)
    if quote
]


def raised(file: Path, body: str) -> BaseException:
    """Return what code raises that lies in a file, or seems to."""
    with pytest.raises(Exception, match="must") as caught:
        exec(compile(body, str(file), "exec"), {"errors": errors})
    return caught.value


def test_every_class_and_every_room_has_a_page_that_exists() -> None:
    classes = {one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.AReaLiteError)}
    for one in classes - {errors.AReaLiteError, errors.ConfigError}:
        assert any(kind in pages.CLASSES for kind in one.__mro__), one
    for folder in {init.parent for init in PACKAGE.glob("*/__init__.py")} - {PACKAGE / "utils"}:
        assert doc_pages.page_of_file(str(folder / "some.py")), folder
    for place in doc_pages.PLACES:
        assert [*PACKAGE.glob(f"{place}*")], place
    for page in {*pages.CLASSES.values(), *doc_pages.PLACES.values(), *PAGES.values(), doc_pages.TROUBLESHOOTING}:
        (line,) = doc_pages.more(page)
        path, number = line.removeprefix("  more: ").partition(" (")[0].rsplit(":", 1)
        heading = Path(path).read_text().splitlines()[int(number) - 1]
        assert Path(path).parent == DOCS and line.endswith(f" ({heading.lstrip('# ')})")


def test_a_message_leads_to_the_symptom_that_quotes_it() -> None:
    assert len(QUOTES) == sum(line.startswith("> ") for line in doc_pages._lines(doc_pages.TROUBLESHOOTING)) > 30
    for quote, heading in QUOTES:
        page = doc_pages.page_of_message(f"{quote.replace('…', 'x')} and more")
        if quote == "… must be …: got …":
            assert page == "", "what anything may say tells nothing"
        else:
            assert doc_pages.more(page)[0].endswith(f" ({heading.lstrip('# ')})"), quote


@pytest.mark.parametrize(
    ("file", "body", "page"),
    [
        ("engine/lora.py", "raise errors.ConfigError('peft must: none')", "models.md#lora"),
        ("engine/optimizer.py", "raise ValueError('a schedule must: none')", "models.md"),
        ("engine/optimizer.py", "raise errors.CheckpointError('it must: none')", pages.CLASSES[errors.CheckpointError]),
        ("engine/ppo/own_functions.py", "raise ValueError('it must: none')", "own-loss.md#1-write-it"),
        ("cli/check_loss.py", "raise errors.ConfigError('check-loss must: none')", "own-loss.md#2-check-it"),
        ("utils/files.py", "raise ValueError('a file must: none')", "troubleshooting.md"),
        ("rollout/x.py", "try: open('/')\nexcept OSError as e: raise errors.ConfigError('it must') from e", None),
        ("/home/me/engine/lora.py", "raise ValueError('mine must: none')", "troubleshooting.md"),
        ("engine.py", "raise ValueError('mine must: none')", "troubleshooting.md"),
    ],
)
def test_others_lead_to_the_page_of_their_class_or_of_the_file_that_raised_them(
    file: str, body: str, page: str | None
) -> None:
    is_ours = "/" in file and not file.startswith("/")
    error = raised(PACKAGE / file if is_ours else Path(file), body)
    assert pages.page_of(error) == (page or doc_pages.PLACES["rollout"])


def test_what_a_leaf_raises_belongs_to_its_caller(tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught, reading(tmp_path):
        pass
    assert pages.page_of(caught.value) == "troubleshooting.md"
    with pytest.raises(errors.ConfigError) as refused:
        load_expr_config(["--config", str(tmp_path / "absent.yaml")], SFTConfig)
    assert pages.page_of(refused.value) == "troubleshooting.md#a-value-is-refused"
    with pytest.raises(errors.ConfigError) as again:
        raise errors.ConfigError("it must be: got it") from refused.value
    assert pages.page_of(again.value) == "troubleshooting.md#a-value-is-refused"


def test_a_missing_script_and_a_missing_key_of_a_batch_lead_to_what_their_reader_is_at() -> None:
    """Neither is about clusters or models, whose rooms raise them."""
    with pytest.raises(errors.ConfigError, match="the entry script must be a file") as no_script:
        entry_script("absent.py")
    assert pages.page_of(no_script.value) == "troubleshooting.md#a-command-line-is-refused"
    with pytest.raises(ValueError, match="a batch must have 'proximal_logprobs'") as no_key:
        require_key(TensorDict({}, batch_size=[]), "proximal_logprobs", "a clipped loss", "Compute them")
    assert pages.page_of(no_key.value) == "algorithms.md"
