"""What tutorials and the README show is typed: files and `sh` blocks by test_docs.py, everything else here.

Commands are typed with --dry-run, or as far as their options are read; YAML is loaded; functions run.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from test_docs import REPOSITORY
from testing_proxy import chatml_tokenizer

from arealite.agent.online import OnlineSessions
from arealite.agent.workflow import AgentWorkflow
from arealite.api.cli_args import GRPOConfig, PPOConfig, load_expr_config
from arealite.api.config.run import load_run_config
from arealite.api.run_folder import RunFolder
from arealite.cli.main import main, make_parser
from arealite.launcher import local, ray, slurm, torchrun

CONFIGS = REPOSITORY / "examples/arealite/configs"
PAGES = [
    "README.md",
    "docs/run.md",
    *(f"docs/{name}.md" for name in ("data-and-rewards", "workflows", "agents", "own-loss", "one-gpu", "cluster")),
    *(f"docs/{name}.md" for name in ("core", "not-learning", "evaluation")),
]
LAUNCHERS = {f"arealite.launcher.{one.__name__.rpartition('.')[2]}": one for one in (local, ray, slurm, torchrun)}
OF_THE_SHELL = {
    "docker": "tests/test_packaging.py holds the Dockerfiles, and an image needs a daemon",
    "make": "the targets are those of the suite itself",
    "pip": "the venv of the tests has it",
    "ray": "make test-ray starts Ray",
    "export": "of Ray's address",
    **dict.fromkeys((".", "source"), "the tests run in a venv"),
    **dict.fromkeys(("mkdir", "cd"), "each test has a folder"),
}
"""Programs that are not typed, and why."""
SNIPPETS = {
    "limits": ("docs/data-and-rewards.md", "from arealite.reward.code import judge"),
    "agent": ("docs/agents.md", "from openai import AsyncOpenAI"),
    "online": ("docs/agents.md", "sessions = OnlineSessions"),
    "workers": ("docs/core.md", "def lengths(engine, batch)"),
}
"""Functions without a file, which tests below run."""
SHOWN = {
    ("README.md", "for step in range("): "the loop of examples/arealite/gsm8k_grpo.py",
    ("README.md", "def score("): "a signature",
    ("docs/own-loss.md", "half_blame("): "an output, which is compared below",
    ("docs/one-gpu.md", "ok: memory: the run needs"): "an output, which is compared below",
    ("docs/core.md", "+from arealite.core.workers"): "tests/core/test_equal_numbers.py trains with these edits",
}
"""Blocks that are typed by no test, and why, by page and beginning."""


class Block(NamedTuple):
    page: str
    line: int
    language: str  # "" has none, "indented" is a block without a fence
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    text = (REPOSITORY / page).read_text()
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(page, text[: found.start()].count("\n") + 1, found[1], found[2])
    outside = re.sub(r"^```.*?^```$", lambda found: "x\n" * found[0].count("\n") + "x", text, flags=re.DOTALL | re.M)
    for found in re.finditer(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+", outside):
        if not outside[: found.start()].rstrip().rpartition("\n")[2].lstrip().startswith(("-", "*")):
            line = outside[: found.start()].count("\n") + 1
            yield Block(page, line, "indented", re.sub("^ {4}", "", found[0], flags=re.M))


ALL = [block for page in PAGES for block in blocks(page)]


def commands(text: str) -> list[list[str]]:
    """Return the words of each command, with something in place of what a reader fills in."""
    text = re.sub(
        r"<model>|/tmp/(tiny|teacher)\b|\bTINY_MODEL\b|\bMODEL\b", "org/model", text.replace("\\\n", " ")
    ).replace(" ...", "")
    text = re.sub(r"<[a-z ]+>", "filled-in", text).replace("$E", str(REPOSITORY / "examples/arealite"))
    text = re.sub(r"^([A-Z_0-9]+=\S+ )+", "", text.replace("$(cat ", "$("), flags=re.M)
    found = (shlex.split(part, comments=True) for line in text.splitlines() for part in line.split(" && "))
    return [words for words in found if words]


def is_commands(block: Block) -> bool:
    if block.language not in ("", "bash", "indented"):
        return False
    first = next((line for line in block.text.splitlines() if line and not line.startswith("#")), "")
    return re.sub(r"^([A-Z_0-9]+=\S+ )+", "", first).partition(" ")[0] in {
        "python3",
        "arealite",
        "torchrun",
        *OF_THE_SHELL,
    }


TYPED = [
    pytest.param(
        words,
        id=f"{block.page}:{block.line}: {' '.join(words)[:60]}",
        marks=[pytest.mark.slow] if words[1].startswith("training/") else [],  # starts a process
    )
    for block in ALL
    if is_commands(block)
    for words in commands(block.text)
    if words[0] not in OF_THE_SHELL and words[:3] != ["python3", "-m", "venv"]
]


@pytest.mark.parametrize("words", TYPED)
def test_a_command_is_as_it_is_typed(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    program, *rest = words
    if rest[:1] == ["-m"] and rest[1] in LAUNCHERS:
        entry = "examples/arealite/gsm8k_grpo.py" if rest[2] == "my_grpo.py" else rest[2]
        status = LAUNCHERS[rest[1]].main([entry, *rest[3:], *["--dry-run"] * ("--dry-run" not in rest)])
    elif program == "python3" and not rest[0].startswith("training/"):
        compile(Path(rest[0]).read_text(), rest[0], "exec")
        status = 0
    elif program == "python3":
        monkeypatch.setattr(sys, "argv", [*rest, *["--dry-run"] * ("--dry-run" not in rest)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(rest[0], run_name="__main__")
        status = ended.value.code
    elif program == "torchrun":
        script = next(word for word in rest if word.endswith(".py"))
        status = load_run_config(rest[rest.index(script) + 1 :], Path(script)) is None
    elif rest[0] == "train" and any(word.startswith("trainer.type") for word in rest):
        status = main([*rest, "--dry-run"])
    else:
        known, more = make_parser(rest).parse_known_args(rest)
        status = bool(more) and "overrides" not in known
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "block", [pytest.param(one, id=f"{one.page}:{one.line}") for one in ALL if one.language == "yaml"]
)
def test_yaml_loads(block: Block, tmp_path: Path) -> None:
    (tmp_path / "block.yaml").write_text(block.text)
    is_core = block.page == "docs/core.md"
    base = [f"--config={CONFIGS / 'gsm8k_ppo.yaml'}"] if is_core else [f"--config={CONFIGS / 'gsm8k_grpo.yaml'}"]
    words = [*base, *_as_words(yaml.safe_load(block.text)), "experiment_name=e", "trial_name=t"]
    config, _ = load_expr_config(
        [*words, *["ref={}", "actor.kl_ctl=0.1"] * is_core], PPOConfig if is_core else GRPOConfig
    )
    for key, value in yaml.safe_load(block.text).items():
        found = getattr(config, key)
        assert found is not None and (isinstance(value, dict) or found == value), key


def _as_words(tree: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in tree.items()]


def snippet(name: str) -> str:
    page, beginning = SNIPPETS[name]
    (found,) = (block.text for block in ALL if block.page == page and block.text.startswith(beginning))
    return found


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_reward_with_limits_of_its_own() -> None:
    names: dict[str, Any] = {}
    exec(snippet("limits"), names)
    program = "```python\ndef add(a, b):\n    return a + b\n```"
    assert names["my_code_reward"](completions=program, answer=["assert add(1, 2) == 3"]) == 1.0
    assert names["my_code_reward"](completions=program, answer=["assert add(1, 2) == 4"]) == 0.0


class _Engine:
    """Keeps what it was asked for."""

    def prepare_batch(self, *given: Any) -> tuple[Any, ...]:
        return given


def test_agents_that_are_called_and_that_call(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    config, _ = load_expr_config(
        [
            f"--config={CONFIGS / 'gsm8k_grpo.yaml'}",
            "trial_name=t",
            "experiment_name=e",
            f"cluster.fileroot={tmp_path}",
        ],
        GRPOConfig,
    )
    given = {
        "config": config,
        "rollout": _Engine(),
        "train_dataloader": ["rows"],
        "tokenizer": chatml_tokenizer(tmp_path),
    }
    names = given | {"OnlineSessions": OnlineSessions, "RunFolder": RunFolder}
    exec(snippet("agent"), names)
    assert names["batch"][0] == ["rows"] and isinstance(names["batch"][1], AgentWorkflow)
    exec(snippet("online"), names)
    assert isinstance(names["sessions"], OnlineSessions) and names["batch"] == (names["sessions"], names["sessions"])


def test_a_function_of_workers() -> None:
    names: dict[str, Any] = {}
    definition, _, use = snippet("workers").partition("\n\n")
    exec(definition, names)
    assert names["lengths"](None, {"loss_mask": torch.tensor([[0, 1, 1], [0, 0, 1]])}).tolist() == [2, 1]
    compile(use, "core.md", "exec")


def shown_on(page: str, beginning: str) -> list[str]:
    """Return the lines of an output, with single spaces."""
    (found,) = (block.text for block in ALL if block.page == page and block.text.startswith(beginning))
    return [" ".join(line.split()) for line in found.splitlines() if line]


def test_the_memory_plan_is_what_check_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = (block for block in ALL if block.page == "docs/one-gpu.md" and "[ -d tiny ]" in block.text)
    _, *words = next(words for words in commands(found.text) if "arealite.launcher.local" in words)
    (tmp_path / "digits.py").write_text("def digits(completions, **others):\n    return 0.0\n")
    assert main(["tiny-model", "--out", "tiny"]) == 0
    assert main(["check", *words[2:]]) == 0
    told = " ".join(capsys.readouterr().out.split())
    memory, *table = shown_on("docs/one-gpu.md", "ok: memory: the run needs")
    assert memory.partition(" of ")[0] in told and " ".join(table) in told


def test_what_check_loss_prints_of_the_loss_is_on_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (loss,) = (block.text for block in ALL if block.page == "docs/own-loss.md" and block.text.startswith("# my_loss"))
    (tmp_path / "my_loss.py").write_text(loss)
    monkeypatch.chdir(tmp_path)
    assert main(["check-loss", "my_loss.py"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert " ".join(shown_on("docs/own-loss.md", "half_blame(")) in told


def test_every_block_is_typed_or_has_a_reason() -> None:
    untyped = [f"{block.page}:{block.line}" for block in ALL if not _is_typed(block)]
    assert not untyped, "write `# file.py` above it or mark it sh (test_docs.py), or type it here"
    assert len(ALL) > 50 and len(TYPED) > 25
    for page, beginning in SHOWN:
        assert any(block.page == page and block.text.startswith(beginning) for block in ALL), f"{beginning} is gone"


def _is_typed(block: Block) -> bool:
    if block.language == "sh" or (block.language == "python" and re.match(r"# \S+\.py\n", block.text)):
        return f'"{block.page.removeprefix("docs/")}"' in (REPOSITORY / "tests/test_docs.py").read_text()
    listed = [*SNIPPETS.values(), *SHOWN]
    return (
        block.language in ("yaml", "mermaid")
        or is_commands(block)
        or any((block.page, True) == (page, block.text.startswith(beginning)) for page, beginning in listed)
    )
