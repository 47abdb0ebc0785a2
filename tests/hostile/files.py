"""Junk in every file of a run and of a user, read by the commands and functions that read them, each in a process.

Invariants: a reader ends; it succeeds, or says in one error which file is wrong; it deletes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import testing_forks
import torch
import yaml
from harness.processes import REPOSITORY
from recover_program import train
from testing_registry import RunningRegistry
from testing_workflows import IdleEngine, WaitingWorkflow
from training_cases import write_model

from arealite.api.cli_args import GRPOConfig, InferenceEngineConfig, load_expr_config
from arealite.api.errors import AReaLiteError
from arealite.api.run_folder import RunFolder
from arealite.cli.main import main
from arealite.dataset import get_custom_dataset
from arealite.dataset.loader import PromptLoader
from arealite.inference.registry import RegistryError
from arealite.rollout.account.ledger import LedgerFile
from arealite.rollout.account.store import Replay
from arealite.trainer.stats_logger import undo_from
from arealite.utils.secret import ensure_secret
from arealite.weights.log import record_weights
from hostile.common import JUNK, NESTED, SECRET, Report, judge_command

_CONFIG = REPOSITORY / "examples" / "arealite" / "configs" / "gsm8k_grpo_cpu.yaml"
_RUN = Path("e", "t")
_NAMES = {"experiment_name": "e", "trial_name": "t"}
_AT_ONCE = 3
_READER_S = 120.0
_MOVED = re.compile(r"\.\w+-\d{8}-\d{6}-\d+")
"""What the name of a file that was moved aside ends with."""
READERS = {
    "registry.json": ("serve",),
    ".secret": ("serve", "secret"),
    "run.json": ("replay", "report"),
    "config.yaml": ("replay", "report", "serve", "config", "check"),
    "metrics.jsonl": ("report", "undo"),
    "summary.json": ("report",),
    "weights.jsonl": ("replay", "weights"),
    "ledger.sqlite": ("ledger", "open"),
    "rollouts/step_1/0.parquet": ("ledger", "report", "batches"),
    "rollouts/eval_step_1/0.parquet": ("report",),
    "recover/step_3/manifest.json": ("recover", "replay"),
    "recover/step_3/state.json": ("recover",),
    "recover/step_3/actor/rng_0.json": ("recover",),
    "recover/step_3/actor/.metadata": ("recover",),
    "recover/step_3/actor/__0_0.distcp": ("recover",),
    "../../data.jsonl": ("dataset",),
    "../../data.json": ("dataset",),
    "../../data.parquet": ("dataset",),
}
READERS_OF = {reader: file for file, readers in READERS.items() for reader in readers}
"""Reader -> one of its files."""
_CONTENTS = {
    "empty": b"",
    "zeros": b"\0" * 5000,
    "null": b"null\n",
    "list": b"[]\n",
    "rows of lists": b"[1]\n[2]\n",
    "number": b"5\n",
    "text": b'"x"\n',
    "object": b"{}\n",
    "nested": b"[" * NESTED + b"\n",
    "nested objects": b'{"a":' * NESTED + b"\n",
    "UTF-16": '{"a": 1}\n'.encode("utf-16"),
    "other text": b"\xff\xfe\x00 : - {\n\t*x\n",
    "long number": b'{"step": ' + b"9" * 5000 + b"}\n",
}
KINDS = (*_CONTENTS, "cut", "random", "flipped", "fifo", "folder", "unreadable", *(f"value {n}" for n in range(4)))


def attack(report: Report, folder: Path, rng: random.Random, *, short: bool) -> None:
    """Damage one file after the other in copies of a whole run, and let everything read it."""
    torch.set_num_threads(1)
    testing_forks.preload(__name__)
    whole = folder / "whole"
    registry = RunningRegistry(SECRET, None)
    try:
        write_run(whole, registry.address)
        pairs = [(file, reader) for file, readers in READERS.items() for reader in readers]
        cases = [("none", READERS_OF[reader], reader) for reader in READERS_OF]
        for file, reader in pairs:
            kinds = rng.sample(KINDS, 2 if short else 10)
            cases += [(kind, file, reader) for kind in kinds]
        turns = itertools.count()
        seeds = {case: rng.getrandbits(64) for case in cases}
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            jobs = [threads.submit(try_one, whole, folder / f"{next(turns)}", case, seeds[case]) for case in cases]
            for job in jobs:
                report.add(job.result())
    finally:
        registry.close()


def write_run(root: Path, registry: str) -> None:
    """Write the folder of a run that is whole, and what it was made of."""
    run = RunFolder(root / _RUN)
    model = write_model(root / "model")
    train(model, root, steps=7, stop_after=4)
    config = InferenceEngineConfig(**_NAMES, fileroot=str(root), consumer_batch_size=2, max_concurrent_rollouts=4)
    engine = IdleEngine(config)
    loader = PromptLoader([{"x": index} for index in range(20)], 2)
    with contextlib.closing(engine.executor):
        for version in range(3):
            engine.set_version(version)
            engine.executor.prepare_batch(loader, WaitingWorkflow())
    for name in ("eval_step_1", "eval_step_0"):
        shutil.copytree(run.rollouts / "step_1", run.rollouts / name)
    rows = [{"step": step, "optim/grad_norm": 1.0, "time/step_s": 1.0, "reward/mean": 0.5, "staleness/max": 0.0,
             "perf/trained_tokens": 9.0, "eval/accuracy": 0.5} for step in range(4)]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.summary.write_text('{"steps": 4}')
    weights = [{"version": version, "fingerprint": "f", "threads": 1} for version in range(5)]
    run.weights_log.write_text("".join(json.dumps(row) + "\n" for row in weights))
    (root / "entry.py").write_text("print('replayed')\n")
    run.command.write_text(json.dumps({"entry": str(root / "entry.py"), "argv": []}))
    settings = yaml.safe_load(_CONFIG.read_text())
    settings |= _NAMES | {"allocation_mode": "lite.d1+d1", "tokenizer_path": str(model)}
    settings["actor"]["path"] = str(model)
    run.config.write_text(yaml.safe_dump(settings))
    run.secret.write_text(f"{SECRET}\n")
    run.secret.chmod(0o600)
    run.registry.write_text(json.dumps({"address": registry, "node": "", "pid": 1}))
    data = [{"question": f"q {number}", "answer": "#### 1"} for number in range(5)]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    (root / "data.json").write_text(json.dumps(data))
    datasets.Dataset.from_list(data).to_parquet(str(root / "data.parquet"))


def try_one(whole: Path, root: Path, case: tuple[str, str, str], seed: int) -> Report:
    """Let a reader read a copy of the run with one damaged file."""
    kind, file, reader = case
    report, what = Report(), f"{reader} with {file.removeprefix('../../')} damaged ({kind})"
    shutil.copytree(whole, root)
    path = (root / _RUN / file).resolve()
    if kind != "none":
        damage(path, kind, random.Random(seed))
    before = names_in(root)
    output = root / "output.txt"
    process = testing_forks.start(_read, reader, str(root), str(path), str(output))
    status = testing_forks.status_of(process, _READER_S)
    process.kill()
    testing_forks.status_of(process, _READER_S)
    text = output.read_text(errors="replace") if output.exists() else ""
    gone = sorted(before - names_in(root) - ({"e/t/summary.json"} if reader == "undo" else set()))
    named = "step_3" if "recover" in file else path.name
    report.count(f"{reader} {'hangs' if status is None else status}")
    if reader in ("check", "ledger") and status == 1:
        status = 0  # it has found problems, such as a lost prompt
    expected = status == 0 if kind == "none" else True
    broken = judge_command(what, status, text, named)
    broken += [f"{what} must work as long as nothing is damaged: got {status}: {text[-600:]}"] * (not expected)
    broken += [f"{what} must delete nothing: {gone} is gone"] * bool(gone)
    report.broken += broken
    if not broken:
        shutil.rmtree(root)
    return report


def names_in(root: Path) -> set[str]:
    """Name the files of the run, also those that were moved aside; models of steps that a resume redoes may go."""
    found = {_MOVED.sub("", str(path.relative_to(root))) for path in root.rglob("*")}
    return {name for name in found if not name.endswith(("-wal", "-shm")) and "/checkpoints" not in name}


def damage(path: Path, kind: str, rng: random.Random) -> None:
    """Replace a file with junk of a kind."""
    content = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "unreadable":
        path.symlink_to("/proc/self/mem")  # opens, and then fails to be read (EIO), for root as well
    elif kind == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "random":
        path.write_bytes(rng.randbytes(3000))
    elif kind == "flipped":
        flipped = bytearray(content)
        for _ in range(20):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        path.write_bytes(flipped)
    elif kind in _CONTENTS:
        path.write_bytes(_CONTENTS[kind])
    elif path.suffix == ".sqlite":
        path.write_bytes(content)
        _falsify_database(path, rng)
    else:
        path.write_bytes(falsified(content, path.suffix, rng))


def falsified(content: bytes, suffix: str, rng: random.Random) -> bytes:
    """Replace a value of structured text, or leave other content without its end."""
    if suffix == ".yaml":
        return yaml.safe_dump(_with_junk(yaml.safe_load(content), rng)).encode(errors="surrogatepass")
    if suffix not in (".json", ".jsonl"):
        return content[:-1]
    rows = [json.loads(line) for line in (content.splitlines() if suffix == ".jsonl" else [content])]
    at = rng.randrange(len(rows))
    rows[at] = _with_junk(rows[at], rng)
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _with_junk(tree: Any, rng: random.Random) -> Any:
    """Replace a random node below the root."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not keys:
        return tree
    key = rng.choice(keys)
    tree[key] = _with_junk(tree[key], rng) if tree[key] and isinstance(tree[key], dict | list) and rng.random() < 0.5 \
        else rng.choice([one for one in JUNK if not isinstance(one, int) or abs(one) < 2**200])  # fmt: skip
    return tree


def _falsify_database(path: Path, rng: random.Random) -> None:
    statements = (
        "UPDATE prompts SET state = 'nonsense'",
        "UPDATE prompts SET epoch = 'x', trained_version = x'00ff'",
        "DROP TABLE samples",
        "UPDATE cursors SET state = '[[['",
        "UPDATE prompts SET latency_s = 'slow'",
        "PRAGMA user_version = 99",
        "UPDATE prompts SET ticket = -ticket",
        "INSERT INTO cursors VALUES (99, '{\"epoch\": []}')",
    )
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(rng.choice(statements))
        database.commit()


def _read(reader: str, root: str, path: str, output: str) -> int:
    """Be the process that reads: everything it prints goes to a file."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    os.environ.pop("AREALITE_SECRET", None)
    run = RunFolder(Path(root) / _RUN)
    commands = {
        "ledger": ["ledger", str(run.path)],
        "report": ["report", str(run.path)],
        "replay": ["replay", str(run.path), "--step", "2"],
        "serve": ["serve", "--join", "e/t", "--fileroot", root, "--dry-run"],
        "check": ["check", f"{root}/entry.py", "--config", str(run.config), "train_dataset.path=data.jsonl"],
    }
    if reader in commands:
        return main(commands[reader])
    config = InferenceEngineConfig(**_NAMES, fileroot=root, consumer_batch_size=2)
    actions = {
        "secret": lambda: ensure_secret(run.path),
        "undo": lambda: undo_from(run, 2),
        "weights": lambda: record_weights(config, 5, "f", threads=1, rises=False),
        "open": lambda: _roll_back(str(run.ledger)),
        "batches": lambda: Replay(str(run.path), _At(1)).wait(2),
        "config": lambda: load_expr_config(["--config", str(run.config)], GRPOConfig),
        "dataset": lambda: get_custom_dataset(path, type="rl"),
        "recover": lambda: train(f"{root}/model", Path(root), steps=0),
    }
    try:
        actions[reader]()
    except (AReaLiteError, RegistryError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 2
    return 0


def _roll_back(path: str) -> None:
    """Open a ledger as a run does that resumes, also when nothing was written for certain."""
    with contextlib.closing(LedgerFile(path)) as file:
        file.rollback(file.last_position)


class _At:
    """An engine of which only the version counts."""

    def __init__(self, version: int) -> None:
        self.get_version = lambda: version
