"""The reference of the site is complete: no key, command, metric, message or public function without a place in it.

`make docs` builds the site itself, and refuses broken links. What is tested here needs no mkdocs.
"""

import ast
import importlib
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from testing_metrics import undocumented

import arealite
from arealite.api import errors
from arealite.api.cli_args import load_expr_config, to_yaml
from arealite.api.run_folder import RunFolder

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
sys.path.insert(0, str(DOCS / "generate"))

import api_pages  # noqa: E402
import command_pages  # noqa: E402
import config_pages  # noqa: E402
import diagrams  # noqa: E402
import message_page  # noqa: E402
import outside  # noqa: E402

INTERNAL_PROGRAMS = {
    "api.script": "reads `__main__`",
    "cli.calibrating": "what `arealite calibrate` starts",
    "cli.check.__main__": "what `arealite check` runs with another Python",
    "cli.main": "is `arealite`",
    "cli.own_trainer": "what `arealite train` starts",
    "dataset.verifiers_program": "what workflows start in another interpreter",
    "launcher.place.guard": "what launchers start",
    "launcher.place.relay": "what launchers start",
    "tinker.serve": "what `arealite tinker` starts",
    "launcher.place.slurm": "what launchers start",
    "launcher.serve.__main__": "what launchers start",
    "launcher.serve.sglang_server": "takes SGLang's flags",
    "launcher.serve.vllm_server": "takes vLLM's flags",
    "launcher.start": "what scripts call",
    "utils.worker_process": "what workflows start",
}
"""Modules with a `__main__` that have no help of their own, and why."""


def test_every_key_has_one_heading_with_its_default_and_meaning() -> None:
    pages = config_pages.pages()
    headings = Counter(re.findall(r"^#+ `[^`]+` \{ #([\w.]+) \}$", "\n".join(pages.values()), re.MULTILINE))
    keys = config_pages.declared_keys()
    assert len(keys) > 450 and headings == dict.fromkeys(keys, 1)
    assert all(key.doc for declared in keys.values() for key in declared.values())
    actor = pages["reference/config/actor.md"]
    assert "### `actor.eps_clip_higher` { #actor.eps_clip_higher }" in actor
    heading = "### `actor.optimizer.lr` { #actor.optimizer.lr }"
    assert f"{heading}\n\nnumber; default `2e-05`. *GRPO, PPO*\n\nPeak learning rate." in actor
    assert "text; follows [`actor.path`](actor.md#actor.path). *PPO*" in pages["reference/config/critic.md"]
    assert "text; must be given. *all experiments*" in pages["reference/config/index.md"]


def test_every_command_is_on_the_page() -> None:
    (page,) = command_pages.pages().values()
    (whole,) = re.findall(r"## `arealite`\n\n```text\n(.*?)```", page, re.DOTALL)
    commands = command_pages.commands(whole)
    assert {"quickstart", "train", "check-loss", "plan", "ledger"} <= {*commands}
    for command in commands:
        assert f"## `arealite {command}`\n\n```text\nusage: arealite {command}" in page
    assert "## `python3 -m arealite.launcher.slurm`\n\n```text\nusage: python3 -m arealite.launcher.slurm" in page
    package = api_pages.PACKAGE
    runnable = {
        ".".join(file.relative_to(package).with_suffix("").parts)
        for file in package.rglob("*.py")
        if '__main__"' in file.read_text() or file.name == "__main__.py"
    }
    on_the_page = {module.removeprefix("arealite.") for module in command_pages.PROGRAMS}
    assert runnable == on_the_page | INTERNAL_PROGRAMS.keys()


def test_every_public_definition_has_a_page() -> None:
    pages = "\n".join(api_pages.pages().values())
    listed = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    public = {module: [node.name for node in nodes] for module, nodes in api_pages.modules()}
    assert listed == [*public]
    assert "publish_weights" in public["arealite.weights.publish"] and "load_datasets" in public["arealite.dataset"]
    assert sum(map(len, public.values())) > 700
    assert len([*api_pages.exported()]) == len(arealite._MODULES)
    assert "| [`FSDPPPOActor`](engine.md#arealite.engine.ppo.actor.FSDPPPOActor) | The policy on FSDP2; with" in pages
    rooms = {file.parent.name for file in api_pages.PACKAGE.glob("*/__init__.py")}
    assert rooms == {name.split(".")[1] for name in public} | api_pages.PROGRAMS & rooms


NO_METRICS = {"chat", "cli", "engine", "launcher", "trainer"}
"""Beginnings of other keys with a slash: of URLs, and of files of the package."""


def test_every_metric_that_the_code_names_has_a_row() -> None:
    """The tests of runs look at every key that was written; here are those that no run of ours writes."""
    nodes = [node for file in api_pages.PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    named = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]  # also f"group/{name}": ...
    named += [node.key for node in nodes if isinstance(node, ast.DictComp)]
    starts = [key.values[0] if isinstance(key, ast.JoinedStr) else key for key in named]
    groups = {
        str(start.value).partition("/")[0]
        for start in starts
        if isinstance(start, ast.Constant) and re.match(r"[a-z_]+/(\w|$)", str(start.value))
    } - NO_METRICS
    assert {"reward", "policy", "time", "wait", "bound", "perf"} <= groups
    key = re.compile(rf"(?:{'|'.join(groups)})/\w+[a-z0-9]")
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    keys = {text for text in texts if key.fullmatch(text)}
    assert len(keys) > 60 and undocumented(keys) == set()


def test_every_kind_of_failure_is_named() -> None:
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.AReaLiteError)]
    kinds = {one.kind for one in classes} | {f"reward_{one}" for one in ("exception", "timeout", "contract", "crash")}
    page = (DOCS / "reliability.md").read_text()
    assert {kind for kind in kinds if f"`{kind}`" not in page} == set()
    assert undocumented(f"rollout/{what}_{kind}" for what in ("failed", "retried") for kind in kinds) == set()


def test_members_of_our_classes_that_pages_name_exist() -> None:
    sources: dict[str, str] = {}
    for text in (file.read_text() for file in api_pages.PACKAGE.rglob("*.py")):
        for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
            sources[name] = sources.get(name, "") + text
    pages = [page.read_text() for page in DOCS.glob("*.md") if not page.name.startswith("migration")]  # others' names
    named = [found for page in pages for found in re.findall(r"\b([A-Z]\w+)\.(_?[a-z]\w+)", page)]
    known = {(name, member) for name, member in named if name in sources}
    assert ("RolloutExecutor", "_advance") in known
    assert {one for one in known if not re.search(rf"\b{one[1]}\b", sources[one[0]])} == set()


def test_messages_are_found_with_what_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text('''
"""A docstring must not count: it is no message. Nor this."""
def check(path, sizes):
    if path:
        raise ConfigError(
            f"{path!r} must be {self._rule}: got {len(sizes)} of `it`. "
            "Change it."
        )
    problem = "rows must not be empty: got none. Add one."
    print("you must see this")
    return problem
''')
    monkeypatch.setattr(message_page, "REPOSITORY", tmp_path)
    assert message_page.messages(("",)) == [
        message_page.Message("one.py", 6, "ConfigError", "<path> must be <rule>: got … of `it`. Change it."),
        message_page.Message("one.py", 9, "", "rows must not be empty: got none. Add one."),
    ]
    (page,) = message_page.pages().values()
    assert page.startswith("# Error messages") and "`one.py`" not in page


def test_messages_of_troubleshooting_are_those_of_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^> `+(.*?)`+$", page, re.MULTILINE)
    known = [message.text for message in message_page.messages()]
    assert len(quoted) > 25
    for text in quoted:
        pattern = re.compile(".*".join(map(re.escape, text.split("…"))))
        assert any(map(pattern.match, known)), text


def test_links_that_leave_docs_lead_into_the_site() -> None:
    text = "[a](../README.md#run-it) [b](../examples/x.py) [c](core.md#d) [d](https://e.org/f.md)\n```\n[e](../g.py)\n```\n"
    assert outside.with_inner_links(text, "docs/one.md", "one.md") == (
        "[a](readme.md#run-it) [b](source/examples/x.py.md) [c](core.md#d) [d](https://e.org/f.md)\n"
        "```\n[e](../g.py)\n```\n"
    )
    assert outside.with_inner_links("[a](docs/core.md)", "README.md", "readme.md") == "[a](core.md)"
    assert outside.linked({"docs/one.md": text}) == {"examples/x.py"}


def test_diagrams_become_pictures() -> None:
    page, found = diagrams.drawn("a\n\n```mermaid\ngraph LR\n  a --> b\n```\n\nb\n", 1)
    ((path, mermaid),) = found.items()
    assert mermaid == "graph LR\n  a --> b\n" and path.endswith(".svg")
    assert page == f"a\n\n[![diagram, larger at a click](../{path}){{ .diagram }}](../{path})\n\nb\n"


def test_anchors_of_pages_exist() -> None:
    """What GitHub shows and what the site shows have the same anchors."""
    pages = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in DOCS.glob("*.md")}
    pages |= {name: (REPOSITORY / name).read_text() for name in outside.PAGES}
    anchors = {path: {*map(slug, headings(text))} for path, text in pages.items()}
    for path, text in pages.items():
        for target, anchor in re.findall(r"\]\(([^)\s:#]*)#([^)\s]+)\)", without_fences(text)):
            place = (REPOSITORY / path).parent / target if target else REPOSITORY / path
            assert anchor in anchors[place.resolve().relative_to(REPOSITORY).as_posix()], f"{path}: {target}#{anchor}"


def without_fences(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", without_fences(text), re.MULTILINE)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")


def test_the_site_loads_nothing_from_elsewhere() -> None:
    loader = yaml.SafeLoader
    config = (REPOSITORY / "mkdocs.yml").read_text().replace("!!python/object/apply:pymdownx.slugs.slugify ", "")
    read = yaml.load(config, loader)
    assert read["theme"]["font"] is False and "extra_javascript" not in read and read["strict"] is True


def test_the_page_on_configuration_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "configuration.md").read_text()
    (source,) = re.findall(r"```python\n# my_config.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_config.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NAME", "it is")
    words = [shlex.split(cell)[0] for cell in re.findall(r"^\| .* \| .* \| `(.*)` \|$", page, re.MULTILINE)]
    assert len(words) == 8
    given = ["actor.path=m", "train_dataset.path=d", "experiment_name=e", "trial_name=t", "retry_penalty=0.2"]
    (tmp_path / "empty.yaml").write_text("{}")
    config_cls = importlib.import_module("my_config").MyConfig
    argv = [
        "--config",
        str(tmp_path / "empty.yaml"),
        *given,
        "allocation_mode=sglang.d1+d1",
        "train_dataset.batch_size=8",
    ]
    config, _ = load_expr_config([*argv, *words[:5], *words[6:]], config_cls)
    assert config.retry_penalty == 0.2 and config.train_dataset.answer_key is None and config.ref is not None
    assert (
        config.actor.lora.target_modules == ["q_proj", "v_proj"] and config.train_dataset.prompt_suffix == "\nAnswer:"
    )
    assert config.reward == {"a.py:f": 1.0, "b.py:g": 0.1} and config.sglang == {"dtype": "bfloat16"}
    assert config.launcher.trainer_env_vars == "KEY=it is" and config.valid_dataset is None
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    again, _ = load_expr_config(["--config", str(tmp_path / "again.yaml"), words[5], "trial_name=again"], config_cls)
    assert RunFolder(again.rollout).path == RunFolder(again.recover).path == Path("runs/e/again").absolute()
    assert again.ref is None and again.rollout.consumer_batch_size == 8
