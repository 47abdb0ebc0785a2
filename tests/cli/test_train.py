"""`arealite train` is the example's script with the example's config; one real run of a trainer of the user's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from arealite.api.cli_args import GRPOConfig, SFTConfig, load_expr_config, to_yaml
from arealite.api.config.run import last_name, script_calls
from arealite.api.errors import ConfigError
from arealite.cli.examples import TRAINERS, examples_folder
from arealite.cli.main import main
from arealite.cli.own_trainer import load_trainer
from arealite.launcher.start import LAUNCHERS

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "arealite"
PAGE = (REPOSITORY / "docs" / "trainers.md").read_text()
MODELS = {"ppo": "actor", "grpo": "actor", "distill": "actor"}  # else `model`


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, which is no checkout, of a node without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command that succeeds prints."""
    assert main([*words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def dry_run(kind: str, config: str, *words: str) -> list[str]:
    """Return the launcher's own command line for an example."""
    script = EXAMPLES / f"{TRAINERS[kind]}.py"
    return [str(script), "--config", str(EXAMPLES / "configs" / config), "--dry-run", *words]


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_type_is_its_script_with_its_config_of_a_cpu(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    block, config = MODELS.get(kind, "model"), f"{TRAINERS[kind]}_cpu.yaml"
    given = [f"{block}.path=org/name", "experiment_name=e", "trial_name=t"]
    keys = [*(["teacher.path=org/teacher"] if kind == "distill" else []), *given]
    told = shown(
        capsys, *(f"trainer.{kind}.{key}" for key in keys[:-2]), *keys[-2:], f"trainer.type={kind}", "--dry-run"
    )
    key = "valid_dataset" if kind in ("eval", "null") else "train_dataset"
    data = yaml.safe_load((EXAMPLES / "configs" / config).read_text())[key]["path"]
    assert Path(REPOSITORY / data.partition(":")[0]).is_file(), "it comes with the examples"
    words = dry_run(kind, config, f"{key}.path={REPOSITORY / data}", *keys)
    assert LAUNCHERS["local"](words) == 0
    assert told == capsys.readouterr().out and "e/t: " in told


@pytest.mark.parametrize("mode", LAUNCHERS)
def test_gpus_choose_the_config(mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this node for a local run; a cluster has some unless it is said to have none."""
    if mode == "local":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(8))))
    told = shown(capsys, "train", "--dry-run", f"mode={mode}", "trainer.type=grpo", "actor.path=org/name")
    assert LAUNCHERS[mode](dry_run("grpo", "gsm8k_grpo.yaml", f"mode={mode}", "actor.path=org/name")) == 0
    assert told == capsys.readouterr().out and "sglang.d4p1t1+d4p1t1" in told
    on_cpu = shown(capsys, f"mode={mode}", "trainer.type=dpo", "model.path=m", "cluster.n_gpus_per_node=0", "--dry-run")
    assert "CPUs only" in on_cpu and f"{EXAMPLES}/configs/dpo_cpu.yaml" in on_cpu


def test_a_config_of_ones_own_is_taken_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my.yaml").write_text((EXAMPLES / "configs" / "dpo_cpu.yaml").read_text())
    told = shown(
        capsys, "--config", "my.yaml", "trainer.type=dpo", "model.path=a", "trainer.dpo.model.path=b", "--dry-run"
    )
    assert told.endswith(" --config my.yaml model.path=a model.path=b\n")


def test_options_for_ones_own_data_are_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config that they make is printed, and saved as a file that makes the same run."""
    words = ["--model", "some/model", "--data", "rows/my.jsonl", "--reward", "r.py:right=0.7"]
    words += ["--reward", "pkg.mod:brief=0.3", "train_dataset.prompt_key=problem", "gconfig.n_samples=4", "--dry-run"]
    assert main(["train", *words, "--save-config", "my.yaml"]) == 0
    told = capsys.readouterr()
    assert "my-grpo/trial0: lite.d1+d1 on 1 node, CPUs only" in told.out and list(folder.iterdir()) == [
        folder / "my.yaml"
    ]
    keys = ["experiment_name=my-grpo", "actor.path=some/model", "train_dataset.path=rows/my.jsonl"]
    keys += ['reward={"r.py:right": 0.7, "pkg.mod:brief": 0.3}', "train_dataset.prompt_key=problem"]
    keys += ["gconfig.n_samples=4"]
    same, _ = load_expr_config(["--config", str(EXAMPLES / "configs" / "own_grpo.yaml"), *keys], GRPOConfig)
    saved, _ = load_expr_config(["--config", "my.yaml"], GRPOConfig)
    assert to_yaml(saved) == to_yaml(same) and saved.reward == {"r.py:right": 0.7, "pkg.mod:brief": 0.3}
    first, _, text = (folder / "my.yaml").read_text().partition("\n")
    assert yaml.safe_load(told.err.partition("\n")[2]) == yaml.safe_load(text), "what was given, without the defaults"
    again = [*first.removeprefix("# arealite ").split(), "--dry-run"]
    assert shown(capsys, *again).splitlines()[:4] == told.out.splitlines()[:4]


def test_tasks_of_reasoning_gym_have_their_scorer_as_reward(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "some/model", "--data", "reasoning_gym:countdown?size=20", "--dry-run"]
    for given, reward in (
        ([], "arealite.reward.gym:reasoning_gym_reward_fn"),
        (["--reward", "r.py:own"], "r.py:own"),
        (["reward=r.py:own"], "r.py:own"),
    ):
        assert main(["train", *words, *given]) == 0
        shown = yaml.safe_load(capsys.readouterr().err.partition("\n")[2])
        assert (shown["reward"], shown["experiment_name"]) == (reward, "reasoning_gym-countdown-grpo")


def test_an_environment_of_verifiers_has_a_script_and_needs_no_reward(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "some/model", "--env", "envs/my_env.py?tasks=8", "--dry-run"]) == 0
    told, _, text = capsys.readouterr().err.partition("\n")
    shown = yaml.safe_load(text)
    assert "examples/agents/environment.py" in told and "reward" not in shown
    assert shown["train_dataset"]["path"] == "verifiers:envs/my_env.py?tasks=8"
    assert shown["experiment_name"] == "my_env-grpo"


def test_a_server_of_openenv_has_that_script_and_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    path = "openenv:http://127.0.0.1:8000?tasks=8&action=my.py:act"
    for option in ("--env", "--data"):
        assert main(["train", "--model", "some/model", option, path, "--dry-run"]) == 0
        told, _, text = capsys.readouterr().err.partition("\n")
        shown = yaml.safe_load(text)
        assert "examples/agents/environment.py" in told and "reward" not in shown
        assert (shown["train_dataset"]["path"], shown["experiment_name"]) == (path, "127.0.0.1-8000-grpo")


def test_fine_tuning_on_ones_own_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys count more than options, and a file of one's own replaces only the file."""
    words = ["train", "--sft", "--model", "a", "--data", "org/chats", "--dry-run", "--save-config"]
    assert "chats-sft/trial0: d1 on 1 node" in shown(capsys, *words, "sft.yaml", "model.path=b")
    config, _ = load_expr_config(["--config", "sft.yaml"], SFTConfig)
    assert (config.model.path, config.train_dataset.path, config.model.optimizer.lr) == ("b", "org/chats", 2e-5)
    given = ["--sft", "model.path=c", "train_dataset.path=d", "experiment_name=e", "--dry-run"]
    assert "e/trial0: d1 on 1 node" in shown(capsys, *given)
    own = ["train", "--sft", "--config", "sft.yaml", "--data", "other.csv", "--dry-run", "--save-config", "other.yaml"]
    assert "chats-sft/trial0" in shown(capsys, *own)
    assert load_expr_config(["--config", "other.yaml"], SFTConfig)[0].train_dataset.path == "other.csv"


def test_what_any_trainer_is_given_can_be_saved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own.py").write_text(OWN)
    (folder / "my.yaml").write_text(CONFIG)
    words = ["train", "--config", "my.yaml", "trainer.type=own:Full", "trainer.Full.model.path=m", "--dry-run"]
    assert "e/t: d2 on 1 node" in shown(capsys, *words, "--save-config", "saved.yaml")
    saved = yaml.safe_load((folder / "saved.yaml").read_text())
    assert saved == yaml.safe_load(CONFIG) | {"model": {"path": "m"}}
    assert (folder / "saved.yaml").read_text().startswith("# arealite train trainer.type=own:Full --config saved.yaml")


@pytest.mark.parametrize(
    ("gpus", "words", "told"),
    [
        ("3,4", "--reward r.py:f", {"cluster.n_gpus_per_node": 1, "allocation_mode": "lite.d1|d1"}),
        ("3,4", "--sft mode=local", {"cluster.n_gpus_per_node": 2, "allocation_mode": "d2"}),
        ("3,4", "--sft mode=ray", {"cluster.n_gpus_per_node": 0, "allocation_mode": "d1"}),
        ("3,4", "--sft cluster.n_gpus_per_node=0", {"cluster.n_gpus_per_node": 0, "allocation_mode": "d1"}),
        ("", "--sft", {"cluster.n_gpus_per_node": 0, "allocation_mode": "d1"}),
    ],
)
def test_own_data_uses_the_gpus_that_are_there(
    gpus: str, words: str, told: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    shown(capsys, "train", "--model", "m", "--data", "d.json", *words.split(), "--dry-run", "--save-config", "c.yaml")
    config = yaml.safe_load(Path("c.yaml").read_text())
    found = {
        "cluster.n_gpus_per_node": config["cluster"]["n_gpus_per_node"],
        "allocation_mode": config["allocation_mode"],
    }
    assert found == told
    block = config.get("actor") or config["model"]
    assert block["dtype"] == ("bfloat16" if told["cluster.n_gpus_per_node"] else "float32")


@pytest.mark.parametrize(
    ("model", "data", "reward"),
    [("a: b", "[x].jsonl", "007"), ("null", 'it"s.json', "a #b")],
)
def test_values_of_options_are_texts(model: str, data: str, reward: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--model", model, "--data", data, "--reward", f"{reward}=1.py:f=-0.5", "--dry-run"]
    shown(capsys, *words, "--save-config", "c.yaml")
    config, _ = load_expr_config(["--config", "c.yaml"], GRPOConfig)
    assert (config.actor.path, config.train_dataset.path) == (model, data)
    assert config.reward == {f"{reward}=1.py:f": -0.5}


def test_the_printed_config_has_no_secrets_and_none_if_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--model", "m", "--data", "d", "--sft", "--dry-run"]
    assert main([*words, "launcher.trainer_env_vars=KEY=hunter2"]) == 0
    told = capsys.readouterr()
    assert "KEY=***" in told.err and "hunter2" not in told.err
    assert main([*words, "total_train_epoch=1"]) == 2
    told = capsys.readouterr()
    assert "allocation_mode" not in told.err and "Did you mean total_train_epochs" in told.err


def test_an_option_is_not_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "m", "--data", "d.json", "--sft", "--dry-run", "--mode=ray"]) == 2
    assert "Write mode=ray" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("/a b/my rows.v2.jsonl", "my-rows.v2"),
        ("org/name", "name"),
        ("folder/", "folder"),
        ("x/games.py:rows?level=a/b", "games"),
        ("hf-dataset://org/name/f.jsonl", "f"),
        ("./.é", "own"),
    ],
)
def test_an_experiment_is_named_after_its_data(data: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{name}-sft/trial0: " in shown(capsys, "train", "--model", "m", "--sft", "--data", data, "--dry-run")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--data d.jsonl --sft", r"--model must be given: got nothing\. Add --model FOLDER\."),
        ("--model m --reward r.py:f", r"--data must be given"),
        ("--model m --data d.jsonl", r"--reward must be given: got nothing\. Add --reward FILE.py:FUNCTION, or --sft"),
        ("--model m --data d --reward r.py:f --sft", "reward must be a key of SFTConfig"),
        ("--model m --data d --reward r.py", "--reward must be FILE.py:FUNCTION .*: got r.py. Correct"),
        ("--model m --data d --reward r.py:f=x", "reward must be a valid number.*: got 'x'"),
        ("--model m --data d --reward r.py:f --reward r.py:f=2", "each function once: got r.py:f=2"),
        ("--model m --env e --data d", "--env must stand in place of --data, --reward and --sft"),
        ("--model m --env e --reward r.py:f", "--env must stand in place of --data, --reward and --sft"),
        ("--model m --env e --sft", "--env must stand in place of --data, --reward and --sft"),
        ("--env e", r"--model must be given"),
        ("--model m trainer.type=dpo", r"must go with trainer\.type=grpo, or sft .*: got dpo"),
        ("--model m --sft trainer.type=grpo", "got grpo and --sft"),
        ("--model m --data d --sft gconfig.n_samples=2", r"gconfig must be a key of SFTConfig"),
        ("--model m --data d --sft --save-config used.yaml", "--save-config must be a new file .*: got .*File exists"),
        ("--model m --data d --sft --save-config no/c.yaml", "got .*No such file or directory: 'no/c.yaml'"),
    ],
)
def test_options_that_are_refused(words: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "used.yaml").touch()
    assert main(["train", *words.split(), "--dry-run"]) == 2
    assert re.search(told, capsys.readouterr().err)
    assert list(folder.iterdir()) == [folder / "used.yaml"] and (folder / "used.yaml").read_text() == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("experiment_name=e", f"trainer.type must be {', '.join(TRAINERS)}, or a class of yours .*: got nothing"),
        ("trainer.type=GRPO", "trainer.type must be grpo, .*: got GRPO"),
        ("trainer.type=grpo mode=torchrun", "mode must be local, ray or slurm: got torchrun"),
        (
            "trainer.type=grpo trainer.sft.model.path=m",
            r"trainer must be a key of GRPOConfig: got it on the command line",
        ),
        ("trainer.type=grpo trainer.grpo.actor.pth=m", r"actor\.pth must be a key of GRPOConfig: .* mean actor\.path"),
        ("trainer.type=grpo", r"actor\.path must be given"),
        ("trainer.type=grpo word", "arguments must be --config FILE or key=value: got 'word'"),
        ("trainer.type=grpo --no-wait", "got '--no-wait'"),
        ("trainer.type=my:Trainer", "--config must be given for a trainer of your own"),
    ],
)
def test_what_is_refused(words: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words.split()]) == 2
    assert re.search(told, capsys.readouterr().err)
    assert list(folder.iterdir()) == []


def test_the_page_and_the_help_name_every_type_and_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)\.py` \|", PAGE, re.M))
    assert rows == TRAINERS
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert ", ".join(TRAINERS) in " ".join(capsys.readouterr().out.split())
    for script in TRAINERS.values():
        calls = {last_name(call.func) for call in script_calls(examples_folder() / "arealite" / f"{script}.py")}
        assert "load_expr_config" in calls


OWN = """
from arealite.api.cli_args import SFTConfig

class Full:
    config_class = SFTConfig
    def __init__(self, config): ...
    def train(self): ...

class Empty:
    config_class = SFTConfig
    def train(self): ...

class Nameless:
    def train(self): ...

class Idle:
    config_class = SFTConfig
"""
CONFIG = """
experiment_name: e
trial_name: t
allocation_mode: d2
cluster: {n_gpus_per_node: 0}
model: {path: ./none}
train_dataset: {path: none.jsonl, batch_size: 2}
launcher: {preflight: false}
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_such_module:Full", "trainer.type must be FILE.py:CLASS or module:CLASS that exists: got no_such_mo"),
        ("{stem}.py:Ful", "must have a class Ful: got none. Correct trainer.type"),
        ("{stem}:Nameless", "Nameless must name the config class of its experiment: got config_class None"),
        ("{stem}:Idle", r"Idle must have a method train\(\): got none"),
        ("{stem}:Empty", "Empty must be made with the config alone: too many positional arguments"),
        ("{stem}:Full model.pth=m", r"model.pth must be a key of SFTConfig"),
    ],
)  # fmt: skip
def test_classes_that_are_no_trainers(name: str, told: str, folder: Path) -> None:
    stem = folder.name.replace("-", "_")  # a process knows one file of a name
    (folder / f"{stem}.py").write_text(OWN)
    (folder / "my.yaml").write_text(CONFIG)
    kind, *words = name.format(stem=stem).split()
    argv = ["--config", "my.yaml", *words, f"trainer.type={kind}"]
    with pytest.raises(ConfigError, match=told):
        load_trainer(argv)


def test_a_trainer_of_ones_own_runs_on_every_rank(folder: Path) -> None:
    """The class of the page, with a file of the user's that is called like one of ours."""
    (source,) = re.findall(r"```python\n# my_trainer.py\n(.*?)```", PAGE, re.DOTALL)
    (folder / "my_trainer.py").write_text("import replay\n" + source)
    (folder / "replay.py").write_text("print('the replay of the user')")
    (folder / "my.yaml").write_text(CONFIG)
    (line,) = re.findall(r"arealite (train trainer\.type=my_trainer:MyTrainer .*)", PAGE)
    command = [sys.executable, "-m", "arealite.cli.main", *line.replace("/tmp/tiny", str(folder)).split()]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        log = (folder / "runs" / "e" / "t" / "logs" / f"trainer-{rank}.log").read_text()
        assert "the replay of the user" in log and f"a loop like that of gsm8k_sft.py, with {folder}" in log
