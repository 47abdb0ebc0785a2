"""Every template of `arealite init` is what its README says; the slow tests type its commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from testing_quickstart import write_tiny_model
from testing_runs import typed

from arealite.api.cli_args import GRPOConfig, SFTConfig, load_expr_config
from arealite.cli.examples import examples_folder
from arealite.cli.init import TEMPLATES
from arealite.cli.main import main
from arealite.launcher import local

REPOSITORY = Path(__file__).parents[2]
ON_A_CPU = "cluster: {n_gpus_per_node: 0}"


def written(template: str, folder: Path) -> Path:
    """Return an experiment of a template, as the command writes it."""
    assert main(["init", str(folder / "my.exp-1"), "--template", template]) == 0
    return folder / "my.exp-1"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_whole_and_its_own(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(template, tmp_path)
    files = {path.name: path.read_text() for path in folder.iterdir()}
    told = capsys.readouterr().out
    assert ", ".join(sorted(files)) in told and f"    cd {folder}\n" in told
    assert told.endswith("\n    python3 -m arealite.launcher.local train.py --config config.yaml\n")
    assert {*re.findall(r"^\| `(\S+)` \| \S", files["README.md"], re.M)} == files.keys() - {"README.md"}
    (where,) = re.findall(r"`docs/` with all pages is in `([^`]*)`", files["README.md"])
    assert all(Path(where, page).is_file() for page in re.findall(r"`(docs/[^`]+)`", files["README.md"]))
    assert "$" not in files["README.md"] and "# my.exp-1\n" in files["README.md"]
    command = "python3 -m arealite.launcher.local train.py --config config.yaml"
    assert command in files["train.py"] and command in files["README.md"]
    assert not re.search(r"examples/|GSM8K|EXPERIMENT", files["train.py"] + files["config.yaml"] + files["README.md"])
    rows = [json.loads(line) for line in files["data.jsonl"].splitlines()]
    assert len({row["question"] for row in rows}) == 20 and all(row.keys() == {"question", "answer"} for row in rows)
    monkeypatch.chdir(folder)
    config, _ = load_expr_config(["--config", "config.yaml"], SFTConfig if template == "sft" else GRPOConfig)
    assert (config.experiment_name, config.trained[1].path, config.total_train_steps) == ("my.exp-1", "tiny", None)
    for key in re.findall(r"`((?:train_dataset|actor|model)(?:\.\w+)+)`", files["README.md"]):
        block, *names = key.split(".")
        value = getattr(config, block)
        for name in names:
            assert hasattr(value, name), key
            value = getattr(value, name)


@pytest.mark.parametrize("template", TEMPLATES)
def test_one_changed_line_puts_it_on_a_gpu(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(written(template, tmp_path))
    plans = []
    for gpus, line in (("", ON_A_CPU), ("7", "cluster: {n_gpus_per_node: 1}")):
        text = Path("config.yaml").read_text()
        assert text.count(ON_A_CPU) == 1
        Path("now.yaml").write_text(text.replace(ON_A_CPU, line))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        capsys.readouterr()
        assert local.main(["train.py", "--config", "now.yaml", "--dry-run"]) == 0
        plans.append(capsys.readouterr().out)
    assert "CPUs only" in plans[0] and "GPU" not in plans[0].partition("runs\n")[0]
    assert re.search(r"trainer-0 +GPU 0 ", plans[1])


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, told in (
        ("used", "NAME must be a new or an empty folder that can be written: got used, which holds files"),
        ("used/file", "got .*File exists: 'used/file'"),
        ("used/file/folder", "got .*Not a directory"),
        ("x" * 300, "got .*File name too long"),
        ("my exp", "NAME must be made of letters, .*: got 'my exp'"),
        ("-", "got '-'"),
    ):
        assert main(["init", name]) == 2
        assert re.search(told, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file", "used"]
    assert main(["init", "empty"]) == 0 and Path("empty/train.py").is_file()


def test_templates_name_files_that_come_along() -> None:
    templates = yaml.safe_load((examples_folder() / "templates" / "templates.yaml").read_text())
    assert tuple(templates) == TEMPLATES
    used = {examples_folder() / source for one in templates.values() for source in one["files"].values()}
    assert all(path.is_file() for path in used)
    others = {examples_folder() / "templates" / name for name in ("README.md", "templates.yaml")}
    assert {path for path in (examples_folder() / "templates").iterdir() if path.is_file()} <= used | others


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(out=tmp_path_factory.mktemp("model"), corpus=None, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [pytest.param(one, marks=[] if one in ("rlvr", "openai-agent") else pytest.mark.long) for one in TEMPLATES],
)
def test_the_readme_typed(template: str, tiny: Path, tmp_path: Path) -> None:
    """Two steps of what it trains, in a folder that is no checkout."""
    folder = written(template, tmp_path)
    (commands,) = re.findall(r"```sh\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    with open(folder / "config.yaml", "a") as file:
        file.write("total_train_steps: 2\n")
        if template != "rlvr":  # whose model and check are those of all
            file.write("launcher: {preflight: false}\n")
            (folder / "tiny").symlink_to(tiny)
            commands = re.sub(r"arealite tiny-model .*\n", "", commands)
    tests = "" if template == "sft" else "python3 -m pytest -q"
    commands = commands.replace("pip install 'arealite[agents]'", "") + tests
    done = typed(commands, folder, tmp_path / "bin", PYTHONPATH=str(REPOSITORY))
    run = folder / "runs" / "my.exp-1" / "first"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2] and (run / "report.html").is_file()
    assert (run / "checkpoints" / "step_1" / "model.safetensors").is_file()
    if template == "sft":
        assert rows[2]["eval/loss"] < rows[0]["eval/loss"]
        return
    assert "2 passed" in done.stdout
    assert 0 < rows[0]["reward/mean"] < 0.3, "digits of random weights"
    told = {"multi-turn": "workflow/num_turns", "tools": "workflow/tool_calls", "openai-agent": "agent/turns"}
    expected = {"multi-turn": 2, "tools": 0, "openai-agent": 2}
    if template in told:
        assert rows[0][told[template]] == pytest.approx(expected[template], abs=0.2)
