"""Reads runs from their folders, which are never changed.

The name of a run is its path below the viewer's folder; only runs listed there can be requested.
"""

import contextlib
import functools
import itertools
import json
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from arealite.api.errors import ConfigError, LedgerError
from arealite.api.run_folder import RunFolder, numbered
from arealite.api.run_metrics import is_of_training, score_name
from arealite.rollout.account.ledger import OUTCOME, open_for_reading
from arealite.rollout.account.rollout_file import PER_TOKEN
from arealite.utils.files import FileError, read_jsonl, reading, require_object
from arealite.viewer.describe import describe, is_run, score_in_words, state_of, text_of
from arealite.viewer.index import RowIndex, Stamp, stamp
from arealite.viewer.plain import readable
from arealite.viewer.samples import cut_segments, evaluations

MAX_UNTRAINED = 20_000  # prompts, the newest: waiting, running, rejected or failed
SLICE_S = 0.3  # a request indexes or searches for so long before it answers with a part
_DEPTH = 3  # of runs below the folder: <fileroot>/<experiment>/<trial>
_TOKENIZER = "tokenizer.json"
_FROZEN_TOKENS = 400_000  # with numbers in a standalone page: 20 bytes each
_ISSUES = """
SELECT epoch || '-' || idx AS prompt_id, ticket, state, reason, attempt, head_version, trained_version, latency_s,
    issued_unix_s, changed_unix_s,
    (SELECT json_group_array(json_object('sample', sample, 'tokens', tokens, 'latency_s', latency_s,
        'num_interrupts', num_interrupts, 'server', server))
        FROM samples WHERE samples.ticket = prompts.ticket) AS samples,
    (SELECT json_group_array(kind) FROM retries WHERE retries.ticket = prompts.ticket) AS retries
FROM prompts WHERE prompt_id IN (SELECT value FROM json_each(?)) ORDER BY ticket
"""
_UNTRAINED = f"""
SELECT ticket, epoch || '-' || idx AS prompt_id, {OUTCOME} AS outcome, attempt, latency_s, changed_unix_s,
    (SELECT sum(tokens) FROM samples WHERE samples.ticket = prompts.ticket) AS sampled
FROM prompts WHERE state <> 'trained' ORDER BY ticket DESC LIMIT {MAX_UNTRAINED}
"""


class Runs:
    """The runs at or below a folder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"the folder to view must exist: got {folder}. Pass a run folder, or a folder of runs.")
        self._folder = folder
        self._views: dict[str, RunView] = {}
        self._lock = threading.Lock()

    def table(self) -> list[dict[str, Any]]:
        """Return a line on each run, the last changed first; damage in a run hides no other run."""
        with self._lock:
            for path in _run_folders(self._folder, _DEPTH):
                if (name := readable(path.relative_to(self._folder).as_posix())) not in self._views:
                    self._views[name] = RunView(path)
            views = [(name, view) for name, view in self._views.items() if view.exists()]
        lines = [{"run": name, **view.line()} for name, view in views]
        return sorted(lines, key=lambda line: -line["changed_unix_s"])

    def view(self, name: str) -> "RunView":
        """Return a listed run. Raises ConfigError."""
        if name not in self._views:
            self.table()
        if name not in self._views or not self._views[name].exists():
            raise ConfigError(f"a run must be below the folder: got {name!r}. Choose one from the list.")
        return self._views[name]


class RunView:
    """A run. Thread-safe."""

    def __init__(self, folder: Path, only: Collection[str] | None = None) -> None:
        """`only` names the folders of rollouts whose rows are shown (default: all)."""
        self._run = RunFolder(folder)
        self._lock = threading.Lock()
        self._index = RowIndex(self._run.rollouts, only)

    def exists(self) -> bool:
        return is_run(self._run.path)

    def line(self) -> dict[str, Any]:
        """Return the state of the run in a few values."""
        files = (self._run.metrics, self._run.command, self._run.config)
        changed = {"changed_unix_s": max((status[1] for status in map(stamp, files) if status), default=0) / 1e9}
        try:
            return changed | self._numbers() | {"state": state_of(self._run)}
        except FileError as error:
            return changed | {"steps": 0, "reward": None, "held_out": "", "state": str(error)}

    def _numbers(self) -> dict[str, Any]:
        return _last_numbers(self._run.metrics, stamp(self._run.metrics))

    def describe(self, tag: str) -> tuple[str, dict[str, Any] | None]:
        """Return a new tag and the summary of the run with its charts; None if the run has not changed since `tag`."""
        now = _stamps((self._run.metrics, self._run.config, self._run.summary))
        with contextlib.suppress(FileError):  # `describe` raises it
            now += f"-{state_of(self._run)}"
        if now == tag:
            return now, None
        return now, describe(self._run, read_jsonl(self._run.metrics))

    def rows(self, generation: int, start: int) -> dict[str, Any]:
        """Return the columns of the rows from `start` on, and whether the index is complete."""
        with self._lock:
            is_complete = self._index.grow(SLICE_S)
            columns = self._index.columns(generation, start)
            return columns | {"is_complete": is_complete, "problems": self._index.problems}

    def snippets(self, generation: int, numbers: Sequence[int]) -> list[str]:
        with self._lock:
            return self._index.snippets(generation, numbers)

    def search(self, generation: int, text: str, start: int, end: int) -> dict[str, Any]:
        """Return the rows from `start` to `end` that contain a text, and the end of the rows left to search."""
        with self._lock:
            rows, end = self._index.search(generation, text, range(start, end), SLICE_S)
        return {"rows": rows, "end": end}

    def row(self, generation: int, number: int) -> dict[str, Any]:
        """Return a trajectory: its texts, the numbers of its tokens, and the state of its prompt."""
        with self._lock:
            row = self._index.row(generation, number)
        return self._shown([row])[0]

    def frozen(self, generation: int, numbers: Sequence[int]) -> dict[str, Any]:
        """Return all the data of a standalone page about some rows; long texts are cut."""
        numbers, num_tokens = sorted(numbers), 0
        with self._lock:
            stored = [*self._index.rows(generation, numbers)]
            columns = _taken(self._index.columns(generation, 0), numbers)
            snippets = self._index.snippets(generation, numbers)
        for row in stored:
            num_tokens += len(row["input_ids"] or ())
            if num_tokens > _FROZEN_TOKENS:
                row["input_ids"] = None
            row["segments"] = row["segments"] and cut_segments(row["segments"])
        rows = self._shown(stored)
        _, described = self.describe("")
        run = {"run": described, "runs": [{"run": ".", **self.line()}], "evaluations": self.evaluations()}
        return run | {"rows": columns, "snippets": snippets, "row": rows}

    def evaluations(self) -> dict[str, Any] | None:
        """Return held-out prompts with two completions each."""
        folders = [path for path in self._run.rollouts.glob("*") if not path.name.startswith("step_")]
        changed, is_binary = _stamps(sorted(folders)), self._numbers()["score"] == "accuracy"
        return _evaluations(self._run.rollouts, changed, is_binary)

    def prompt(self, prompt_id: str) -> list[dict[str, Any]]:
        """Return each issue of a prompt in the ledger, with its samples and failed attempts."""
        return self._issues([prompt_id]).get(prompt_id, [])

    def _shown(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the page's view of stored rows; a damaged tokenizer or ledger hides nothing else."""
        issues, texts = dict[str, list[dict[str, Any]]](), list[list[str] | None]()
        problems = [*dict.fromkeys(problem for row in rows for problem in row["problems"])]
        try:
            issues = self._issues({row["prompt_id"] for row in rows if _is_trained(row)})
        except LedgerError as error:
            problems.append(str(error))
        try:
            file = _tokenizer_file(self._run)
            texts = [
                None if file is None or (ids := row["input_ids"]) is None else _token_texts(file, ids) for row in rows
            ]
        except FileError as error:
            problems.append(str(error))
        return [
            {
                **_of_row(row),
                "texts": text,
                "prompt": issues.get(row["prompt_id"], []) if _is_trained(row) else [],  # evaluations reuse the ids
                "problems": problems,
            }
            for row, text in itertools.zip_longest(rows, texts)
        ]

    def _issues(self, prompt_ids: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        issues: dict[str, list[dict[str, Any]]] = {}
        if not (prompt_ids and self._run.ledger.exists()):
            return issues
        with open_for_reading(self._run.ledger) as database:
            for issue in _dicts(database.execute(_ISSUES, (json.dumps([*prompt_ids]),))):
                issue |= {key: json.loads(issue[key]) for key in ("samples", "retries")}
                issues.setdefault(issue.pop("prompt_id"), []).append(issue)
        return issues

    def untrained(self) -> list[dict[str, Any]]:
        """Return the prompts that are waiting, running, rejected or failed."""
        if not self._run.ledger.exists():
            return []
        with open_for_reading(self._run.ledger) as database:
            return _dicts(database.execute(_UNTRAINED))


def _run_folders(folder: Path, depth: int) -> list[Path]:
    try:
        if is_run(folder):
            return [folder]
        children = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:  # removed meanwhile, or not readable
        return []
    return [run for child in sorted(children) for run in _run_folders(child, depth - 1)] if depth else []


@functools.lru_cache(1000)
def _last_numbers(path: Path, changed: Stamp | None) -> dict[str, Any]:
    """Return steps and reward of the last training step, the last held-out score, and what scores are called."""
    newest_first = read_jsonl(path)[::-1]
    with reading(path):
        called, last = score_name(newest_first), next(filter(is_of_training, newest_first), None)
        held_out = next(filter(None, (score_in_words(row, called) for row in newest_first)), "")
        steps, reward = (0, None) if last is None else (int(last["step"]) + 1, last.get("reward/mean"))
        return {"steps": steps, "reward": reward, "held_out": held_out, "score": called}


@functools.lru_cache(16)
def _evaluations(rollouts: Path, changed: str, is_binary: bool) -> dict[str, Any] | None:
    return evaluations(rollouts, is_binary=is_binary)


def _of_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the facts, texts and tokens of a stored row."""
    ids = row["input_ids"]
    if ids is not None and any(len(row[key] or ()) != len(ids) for key in PER_TOKEN):
        ids = None  # not from our writer: numbers can't be matched to tokens
    more = {key: value for key, value in (row["more"] | row["update"]).items() if _is_per_token(value, ids)}
    facts = {
        key: value for key, value in row.items() if key not in (*PER_TOKEN, "segments", "more", "update", "problems")
    }
    facts |= {key: value for key, value in row["more"].items() if not isinstance(value, list)}
    return {
        "facts": facts,
        "segments": row["segments"],
        "tokens": None if ids is None else {key: row[key] for key in PER_TOKEN} | more,
    }


def _taken(columns: dict[str, Any], numbers: Sequence[int]) -> dict[str, Any]:
    """Return the columns of some rows, renumbered from 0."""
    names = [name for name, count in columns["names"] for _ in range(count)]
    taken = [names[number] for number in numbers]
    lengths = [(name, len([*same])) for name, same in itertools.groupby(taken)]
    of_all = {"generation": 0, "start": 0, "count": len(numbers), "names": lengths, "is_complete": True, "problems": []}
    keys = columns.keys() - of_all.keys()
    return of_all | {key: [columns[key][number] for number in numbers] for key in sorted(keys)}


def _is_trained(row: dict[str, Any]) -> bool:
    return str(row["name"]).startswith("step_")


def _stamps(paths: Iterable[Path]) -> str:
    """Return a text that changes when a file does."""
    return "-".join(".".join(map(str, stamp(path) or ())) for path in paths)


def _is_per_token(value: Any, ids: Sequence[int] | None) -> bool:
    is_list = ids is not None and isinstance(value, list) and len(value) == len(ids)
    return is_list and all(isinstance(one, (int, float)) for one in value)


def _dicts(cursor: Any) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row)) for row in cursor]


def _tokenizer_file(run: RunFolder) -> Path | None:
    """Return the file of the tokenizer that a run used, of its model or of a checkpoint; nothing is downloaded."""
    with reading(run.config, yaml.YAMLError):
        config = require_object(yaml.safe_load(text_of(run.config)) or {})
        blocks = ("actor", "model")
        named = [config.get("tokenizer_path"), *((config.get(block) or {}).get("path") for block in blocks)]
        for path in [str(path) for path in named if path]:
            if (file := Path(path) / _TOKENIZER).exists():
                return file
            with contextlib.suppress(HFValidationError):  # the path is not a hub id
                if isinstance(cached := try_to_load_from_cache(path, _TOKENIZER), str):
                    return Path(cached)
    saved = [folder / _TOKENIZER for folder in numbered(run.checkpoints, "step_").values()]
    return next((file for file in reversed(saved) if file.exists()), None)


def _token_texts(file: Path, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a character of several tokens stands at its last one. Raises FileError."""
    with reading(file, Exception):  # the library has no classes for its errors
        tokenizer, stream = _tokenizer(file, file.stat().st_mtime_ns), DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) or "" for token in ids]


@functools.lru_cache(4)
def _tokenizer(file: Path, changed_ns: int) -> Tokenizer:
    return Tokenizer.from_file(str(file))
