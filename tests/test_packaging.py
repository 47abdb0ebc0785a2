"""What is installed without a checkout: extras, the version, and a wheel that brings all that its commands use."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from datetime import date
from pathlib import Path

import pytest
import yaml
from testing_runs import typed

import arealite
from arealite.cli.init import TEMPLATES

REPOSITORY = Path(__file__).parents[1]
TYPED = """
arealite --version
arealite tiny-model --out tiny
for template in TEMPLATES; do
    arealite init $template --template $template
    (cd $template && ln -s ../tiny . && python3 -m arealite.launcher.local train.py --config config.yaml --dry-run)
done
cd rlvr && arealite train --model tiny --data data.jsonl --reward reward.py:score --dry-run
arealite train trainer.type=sft model.path=tiny --dry-run
! arealite train trainer.type=nothing
"""


def test_every_extra_that_is_named_exists() -> None:
    """In messages, pages, examples and Dockerfiles, and in other extras."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [REPOSITORY / name for name in ("README.md", "Dockerfile", "Dockerfile.cuda", "Makefile", "pyproject.toml")]
    for folder, suffixes in (("arealite", "py"), ("docs", "md"), ("examples", "py md yaml")):
        files += (path for suffix in suffixes.split() for path in (REPOSITORY / folder).rglob(f"*.{suffix}"))
    lists = {
        names for path in files for names in re.findall(r"(?:arealite|[ './])\[([a-z,]+)\]['\"]", path.read_text())
    }
    named = {name for names in lists for name in names.split(",")}
    assert {"lora", "ray", "dev"} <= named <= extras.keys()


def test_the_changelog_begins_with_the_version() -> None:
    headings = re.findall(r"^## (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(arealite.__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", headings[0])


def test_the_citation_has_the_version() -> None:
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert cited["version"] == arealite.__version__ and date.fromisoformat(cited["date-released"])


def test_the_extra_of_agents_has_what_the_template_imports() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    template = ast.parse((REPOSITORY / "examples/templates/openai_agent.py").read_text())
    imports = {str(node.module).partition(".")[0] for node in ast.walk(template) if isinstance(node, ast.ImportFrom)}
    others = imports - sys.stdlib_module_names - {"arealite", "reward", "loop"}
    assert others == {"openai"} <= {re.split("[<>=]", name)[0] for name in extras["agents"]}


def broken_links(package: Path) -> list[str]:
    """Return the links of an installed package's pages that lead nowhere in it."""
    broken = []
    for page in [package / "README.md", *(package / "docs").glob("*.md")]:
        text = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
        targets = re.findall(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)", text)
        broken += [f"{page.name}: {target}" for target in targets if not (page.parent / target).exists()]
    return broken


def test_links_of_pages_lead_to_what_the_wheel_has(tmp_path: Path) -> None:
    """As the wheel is declared; a slow test looks at a real one."""
    target = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    renamed = target["sources"] | target["force-include"]
    for glob in [*target["include"], *target["force-include"]]:
        for path in REPOSITORY.glob(glob.lstrip("/")):
            top, _, rest = path.relative_to(REPOSITORY).as_posix().partition("/")
            if top != "arealite":
                place = tmp_path / renamed[top] / rest
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(path)
    package = tmp_path / "arealite"
    assert (package / "docs" / "index.md").is_file() and (package / "README.md").is_file()
    assert broken_links(package) == []
    (package / "README.md").unlink()
    (package / "README.md").write_text("[a](docs/index.md#b) [c](Makefile) [d](https://e.org/f.md)")
    assert broken_links(package) == ["README.md: Makefile"]


@pytest.mark.slow
def test_a_wheel_of_what_an_image_gets_serves_outside_of_a_checkout(tmp_path: Path) -> None:
    """It is unpacked, as an installation does, and comes first on the path."""
    image, site, folder = (tmp_path / name for name in ("image", "site", "folder"))
    image.mkdir()
    for name in re.findall(r"^!(\S+)$", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, image / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, image)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(image)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob(f"arealite-{arealite.__version__}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    assert "arealite = arealite.cli.main:main" in next(site.rglob("entry_points.txt")).read_text()
    brought, wanted = (
        {path.relative_to(top) for path in (top / "examples").rglob("*") if path.is_file()}
        for top in (site / "arealite", image)
    )
    assert brought == wanted and len(wanted) > 50
    shipped = {path.name for path in (site / "arealite" / "docs").glob("*.md")}
    assert shipped == {path.name for path in (REPOSITORY / "docs").glob("*.md")}

    assert broken_links(site / "arealite") == []

    folder.mkdir()
    done = typed(TYPED.replace("TEMPLATES", " ".join(TEMPLATES)), folder, tmp_path / "bin", PYTHONPATH=str(site))
    assert f"arealite {arealite.__version__}\n" in done.stdout and done.stdout.count("CPUs only") == len(TEMPLATES) + 2
    assert f"{site}/arealite/examples/arealite/gsm8k_sft.py" in done.stderr and str(REPOSITORY) not in done.stderr
