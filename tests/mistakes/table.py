"""The mistakes that users make, as one table: what is changed of a run that works, and how it must end.

Those that the config alone shows need no process. A row's `script` is a change to the GRPO example, `folder` one to the
folder in which it is started.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "arealite" / "gsm8k_grpo.py"
_GUARD = 'if __name__ == "__main__":\n    main(sys.argv[1:])'
_MAIN = "def main(argv: list[str]) -> None:\n"
_REWARDS = "rewards = load_rewards(config.reward)"


@dataclass(frozen=True)
class Mistake:
    """One of them."""

    name: str
    arguments: tuple[str, ...] = ()
    script: Callable[[str], str] = str
    folder: Callable[[Path], object] = str
    status: int = 2
    has_place: bool = False  # the user's file:line is among the last lines
    is_offline: bool = True  # the hub is not asked, or is asked and does not answer
    is_forked: bool = False  # only the launcher's check is run, in a fork: others of its kind start the launcher
    command: tuple[str, ...] = ("-m", "arealite.launcher.local", "train.py", "--config", "c.yaml")


def reward(body: str, parameters: str = "completions, answer, **others") -> Callable[[str], str]:
    """Give the script a reward function of its own."""
    function = f"\n\ndef score({parameters}):\n    {body}\n"
    return lambda script: changed(_REWARDS, "rewards = score")(
        changed(_MAIN, f"{function.strip()}\n\n\n{_MAIN}")(script)
    )


def changed(old: str, new: str) -> Callable[[str], str]:
    """Change the script, which must have what is changed."""

    def change(script: str) -> str:
        assert script.count(old) == 1, old
        return script.replace(old, new)

    return change


def rows(*lines: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))


def row(**columns: object) -> str:
    return json.dumps(columns)


GOOD = row(question="1 + 1?", answer="2")


def without(name: str) -> Callable[[Path], object]:
    """Leave a file out of the model."""

    def remove(folder: Path) -> None:
        for path in (folder / "model").glob(name):
            path.unlink()

    return remove


def use_port(folder: Path) -> None:
    """Write a script that serves on a port that something listens on already."""
    (folder / "train.py").write_text(
        "import socket, subprocess, sys\n"
        "with socket.create_server(('127.0.0.1', 0)) as taken:\n"
        "    port = str(taken.getsockname()[1])\n"
        "    command = [sys.executable, '-m', 'arealite.server', '--model-path', 'model', '--port', port]\n"
        "    sys.exit(subprocess.run(command).returncode)\n"
    )


def light_reward(body: str) -> Callable[[Path], object]:
    """Write a reward function into a file of its own, which its processes import quickly."""
    return lambda folder: (folder / "rewards.py").write_text(f"def score(completions, **others):\n    {body}\n")


OF_CONFIG = [
    Mistake("typo in a key", ("total_train_step=5",)),
    Mistake("typo in a block", ("actor.optimizer.learning_rat=1",)),
    Mistake("unknown block", ("rolout.max_head_offpolicyness=1",)),
    Mistake("text for a number", ("train_dataset.batch_size=many",)),
    Mistake("fraction for a whole number", ("total_train_steps=1.5",)),
    Mistake("negative learning rate", ("actor.optimizer.lr=-1",)),
    Mistake("no equals sign", ("seed", "1")),
    Mistake("a flag for a key", ("--seed=1",)),
    Mistake("evaluation without data", ("valid_dataset=null", "evaluator.freq_steps=5")),
    Mistake("one sample", ("gconfig.n_samples=1",)),
    Mistake("context too short", ("lite.context=8",)),
    Mistake("no such model", ("actor.path=./nothing",)),
    Mistake("more GPUs than there are", ("cluster.n_gpus_per_node=8",)),
    Mistake("more nodes than one", ("cluster.n_nodes=2",)),
    Mistake("sglang is not installed", ("allocation_mode=sglang.d1+d1",)),
    Mistake("vllm is not installed", ("allocation_mode=vllm.d1+d1",)),
    Mistake("allocation_mode misspelt", ("allocation_mode=lite.d1+x1",)),
    Mistake("an unknown server", ("allocation_mode=light.d1+d1",)),
    Mistake("no epochs", ("total_train_epochs=0",)),
    Mistake("syntax error in the script", script=changed("def main(argv", "def main argv")),
    Mistake("no script", command=("-m", "arealite.launcher.local", "absent.py", "--config", "c.yaml")),
    Mistake("no config", command=("-m", "arealite.launcher.local", "train.py", "--config", "absent.yaml")),
    Mistake("fileroot is a file", ("cluster.fileroot=rows.jsonl",)),
    Mistake("fileroot can't be made", ("cluster.fileroot=/proc/runs",)),
]
_REWARD = ("reward=rewards.py:score", "total_train_steps=1", "rollout.episode_retries=0")
OF_DATA_AND_MODEL = [
    Mistake("model of the hub without network", ("actor.path=some/model",), is_offline=False),
    Mistake("model of the hub, not downloaded", ("actor.path=some/model",)),
    Mistake("no tokenizer", folder=without("tokenizer*"), is_forked=True),
    Mistake("no config of the model", folder=without("config.json"), is_forked=True),
    Mistake("data file missing", ("train_dataset.path=absent.jsonl",)),
    Mistake("data of the hub without network", ("train_dataset.path=some/data",), is_offline=False),
    Mistake("data of the hub, not downloaded", ("train_dataset.path=some/data",)),
    Mistake("data file empty", folder=rows(), is_forked=True),
    Mistake("broken line", folder=rows(GOOD, '{"question": "1 + 1?", '), is_forked=True),
    Mistake("column missing", folder=rows(GOOD, row(question="1 + 1?")), is_forked=True),
    Mistake("null in a column", folder=rows(GOOD, row(question="1 + 1?", answer=None)), is_forked=True),
    Mistake("batch larger than data", ("train_dataset.batch_size=1000",), is_forked=True),
    Mistake("wandb is not installed", ("stats_logger.wandb.mode=online",)),
    Mistake("reward with a typo", script=reward("return data"), has_place=True),
    Mistake("reward returns nothing", script=reward("pass"), has_place=True, is_forked=True),
    Mistake(
        "reward returns nothing for the second row",
        script=reward("return None if '4' in answer else 1.0"),
        folder=rows(GOOD, row(question="2 + 2?", answer="4"), *[GOOD] * 6),
        has_place=True,
        is_forked=True,
    ),
    Mistake("reward exits", _REWARD, folder=light_reward("import os; os._exit(3)"), has_place=True, is_forked=True),
    Mistake(
        "reward hangs",
        (*_REWARD, "rollout.reward_timeout=1"),
        folder=light_reward("import time; time.sleep(99)"),
        has_place=True,
        is_forked=True,
    ),
    Mistake(
        "lambda as reward", script=changed(_REWARDS, "rewards = lambda **call: 1.0"), has_place=True, is_forked=True
    ),
    Mistake("reward is not a number", script=reward("return float('nan')"), has_place=True, is_forked=True),
    Mistake("reward returns text", script=reward("return 'good'"), has_place=True, is_forked=True),
    Mistake("reward returns a list", script=reward("return [1.0]"), has_place=True, is_forked=True),
    Mistake(
        "reward takes other columns", script=reward("return 1.0", "completions, solution, **others"), is_forked=True
    ),
    Mistake("reward takes no others", script=reward("return 1.0", "completions, answer"), is_forked=True),
    Mistake("reward as in TRL", script=reward("return [1.0]", "prompts, completions, **others"), is_forked=True),
    Mistake("no such reward", ("reward=my.py:score",), is_forked=True),
    Mistake("missing import", script=lambda script: f"import not_installed\n{script}", has_place=True),
    Mistake("no main guard", script=changed(_GUARD, "main(sys.argv[1:])"), has_place=True),
]
_LATE = ("launcher.preflight=false", "total_train_steps=1")
OF_RUNS = [
    Mistake("typo in the reward, in training", _LATE, reward("return data"), status=1, has_place=True),
    Mistake("typo in the reward, in a short evaluation", ("launcher.preflight=false", "evaluator.freq_steps=1"),
            reward("return data"), status=1, has_place=True),
    Mistake("no main guard, unchecked", _LATE,
            lambda script: changed(_GUARD, "main(sys.argv[1:])")(reward("return 1.0")(script)),
            status=1, has_place=True),
    Mistake("error in the script's loop", _LATE,
            changed("        stats.commit(step)\n", "        stats.commit(stepp)\n"), status=1, has_place=True),
    Mistake("a port in use", folder=use_port, command=("train.py",)),
    Mistake("started without a launcher", command=("train.py", "--config", "c.yaml")),
    Mistake("started without a launcher, typo", ("seeed=1",), command=("train.py", "--config", "c.yaml")),
]  # fmt: skip


def prepare(mistake: Mistake, folder: Path, model: Path) -> None:
    """Write a project into an empty folder, and make the mistake."""
    shutil.copytree(model, folder / "model")
    config = {
        "experiment_name": "e",
        "trial_name": "t",
        "allocation_mode": "lite.d1+d1",
        "cluster": {"n_gpus_per_node": 0, "fileroot": "runs"},
        "gconfig": {"n_samples": 2, "max_new_tokens": 8},
        "rollout": {"max_head_offpolicyness": 0, "setup_timeout": 120},
        "actor": {"path": "model", "dtype": "float32", "gradient_checkpointing": False},
        "lite": {"context": 512},
        "train_dataset": {"path": "rows.jsonl", "batch_size": 4},
        "valid_dataset": {"path": "rows.jsonl", "max_rows": 3},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    rows(*[GOOD] * 8)(folder)
    (folder / "train.py").write_text(mistake.script(EXAMPLE.read_text()))
    mistake.folder(folder)
