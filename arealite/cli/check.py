"""`arealite check`: what a run would trip over, found before it runs.

Every check looks at the real thing: the config as the launcher reads it, the installed server's own parser, the
headers of the model's files, the tokenizer's own ids. A finding comes with its fix. Nothing is started except servers'
parsers, and nothing is downloaded except what describes a model (its configs and tokenizer) and data sets.

Exit status: 0 no problem (warnings don't count), 1 problems (2, from the front door: the config can't be read).
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import DatasetConfig, GRPOConfig, SFTConfig, TrainEngineConfig
from arealite.api.errors import AReaLiteError, ConfigError, ServerError
from arealite.dataset import load_split
from arealite.engine.hf_model import build_meta_model, pick_attention
from arealite.engine.server_http import ServerHttp
from arealite.launcher.local import read_config
from arealite.launcher.roles import Roles, check_roles, server_jobs
from arealite.utils.chat_template import PLAIN, Break, Certificate, certify
from arealite.utils.environment import SERVER_ADDRS_VARIABLE
from arealite.utils.hf import load_hf_tokenizer
from arealite.utils.memory_plan import (
    FLOAT32,
    ModelShape,
    kv_bytes_per_token,
    model_shape,
    training_state,
    training_step,
)

GIB = 2**30
_PROGRAM_S = 300.0
"""In which a server's parser must answer; importing SGLang or vLLM for the first time takes a minute."""
_HEALTH_S = 10.0
_MAX_ROWS = 256
"""Of a data set that are read."""
_AS_PROMPT = {"add_generation_prompt": True, "return_dict": False, "enable_thinking": False}
"""How `RLVRWorkflow` renders."""
_FULL, _TIGHT = 1.0, 0.85
"""Shares of a device; what the plan leaves out needs the rest."""
_SERVER_SHARE = 0.9
"""Of a GPU that SGLang and vLLM take unless told."""
_SHOWN_CHARS = 600

_READ = "the model as rank 0 reads it"
_MORE_RANKS = "Use more trainer ranks in allocation_mode, a smaller model, or {key}.fsdp.offload_params=true."
_KNOBS = {
    "activations": "Set {key}.gradient_checkpointing=true, or lower {key}.mb_spec.max_tokens_per_mb.",
    "logits": "Lower {key}.mb_spec.max_tokens_per_mb.",
    "whole gradients": "Let a batch be one micro-batch (raise {key}.mb_spec.max_tokens_per_mb, or more trainer ranks).",
    _READ: "Use a machine with more memory or a smaller model.",
    "servers' cache": "Lower lite.slots or lite.context.",
}

Level = Literal["ok", "warning", "problem"]
_STYLES = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold white on red")}


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it."""

    level: Level
    text: str
    fix: str = ""


@dataclass
class Run:
    """The run that is checked, and what checks have learnt about it for those after them."""

    config: GRPOConfig | SFTConfig
    calls: set[str]
    """Names that the entry script calls."""
    roles: Roles | None = None
    reloads_tied: bool = True
    shape: ModelShape | None = None
    model: PreTrainedModel | None = None
    tokenizer: Any = None
    longest_prompt: int = 0
    """In tokens; of demonstrations the whole row."""
    plan: Table | None = None

    @property
    def engine(self) -> TrainEngineConfig:
        """The model that is trained."""
        return self.config.actor if isinstance(self.config, GRPOConfig) else self.config.model

    @property
    def engine_key(self) -> str:
        return "actor" if isinstance(self.config, GRPOConfig) else "model"

    @property
    def backend(self) -> str:
        """Protocol of the servers; nothing if there are none."""
        return self.config.rollout.backend if isinstance(self.config, GRPOConfig) else ""

    @property
    def foreign_servers(self) -> list[str]:
        """Addresses of servers that someone else starts and stops."""
        if not isinstance(self.config, GRPOConfig):
            return []
        from_outside = os.environ.get(SERVER_ADDRS_VARIABLE, "").split(",")
        return list(self.config.rollout.server_addrs) or [address for address in from_outside if address]

    @property
    def is_single_turn(self) -> bool:
        """Whether every prompt is rendered once: fine-tuning, and workflows that are all ours."""
        workflows = {name for name in self.calls if name.endswith("Workflow")}
        return isinstance(self.config, SFTConfig) or workflows == {"RLVRWorkflow"}

    @property
    def longest(self) -> int:
        """The longest sequence, in tokens."""
        new = self.config.gconfig.max_new_tokens if isinstance(self.config, GRPOConfig) else 0
        return self.longest_prompt + new


def check(entry: str, argv: Sequence[str]) -> int:
    """Check the run that the launcher would start with these arguments, print the findings, return the exit status."""
    console = Console(highlight=False)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warned = _Warnings()
    logging.getLogger("arealite").addHandler(warned)
    try:
        script = _script(entry)
        run = Run(read_config(script, argv), _calls(script))
        levels = [level for name, look in _CHECKS.items() for level in _report(console, name, look, run, warned)]
    finally:
        logging.getLogger("arealite").removeHandler(warned)
    if run.plan is not None:
        console.print()
        console.print(run.plan)
    problems, warnings = levels.count("problem"), levels.count("warning")
    told = f"{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}"
    console.print(Text(f"\n{told}", style="bold red" if problems else "bold green"))
    return 1 if problems else 0


class _Warnings(logging.Handler):
    """Collects the warnings that our own code logs, which become findings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[Finding]:
        texts, self.texts = self.texts, []
        return [Finding("warning", text) for text in texts]


def _report(
    console: Console, name: str, look: Callable[[Run], Iterator[Finding]], run: Run, warned: _Warnings
) -> Iterator[Level]:
    """Print what a check finds, as it finds it."""
    with console.status(f"checking the {name}"):
        for finding in _caught(look, run):
            for shown in (*warned.take(), finding):
                _print(console, name, shown)
                yield shown.level


def _caught(look: Callable[[Run], Iterator[Finding]], run: Run) -> Iterator[Finding]:
    """Whatever a model, a data set or a server does instead of passing is a problem of the run."""
    try:
        yield from look(run)
    except AReaLiteError as error:
        yield Finding("problem", str(error))
    except Exception as error:
        yield Finding("problem", _short(f"{type(error).__name__}: {error}"))


def _print(console: Console, name: str, finding: Finding) -> None:
    mark, style = _STYLES[finding.level]
    line = Table.grid(padding=(0, 1))
    line.add_column(width=len("PROBLEM"))
    line.add_column(width=9)
    line.add_column(overflow="fold")
    line.add_row(Text(mark, style=style), Text(name, style="bold"), Text(finding.text))
    if finding.fix:
        line.add_row("", "", Text(f"Fix: {finding.fix}", style="cyan"))
    console.print(line)


# The run


def _check_config(run: Run) -> Iterator[Finding]:
    config = run.config
    yield Finding("ok", f"{type(config).__name__} {config.experiment_name}/{config.trial_name}")


def _check_processes(run: Run) -> Iterator[Finding]:
    run.roles = roles = check_roles(run.config)
    where = f"on {len(roles.gpus)} GPUs" if roles.gpus else "on the CPU"
    servers = f"{_counted(roles.num_servers, 'server')} and " if roles.num_servers else ""
    yield Finding("ok", f"{run.config.allocation_mode}: {servers}{_counted(roles.num_ranks, 'trainer rank')} {where}")


def _check_server(run: Run) -> Iterator[Finding]:
    """Ask servers that someone else runs for their health, or the program that will run what it says of its flags."""
    if run.foreign_servers:
        yield from asyncio.run(_ask_health(run.foreign_servers))
    elif run.roles is None:
        yield Finding("warning", "not checked: its flags follow from the processes", "Solve that problem first.")
    elif run.roles.num_servers and run.backend == "lite":
        yield Finding("ok", "lite, the embedded server")
    elif run.roles.num_servers:
        yield from _ask_program(run, run.roles)


async def _ask_health(addresses: list[str]) -> list[Finding]:
    http = ServerHttp()
    try:
        asked = (http.get(address, "/health", timeout_s=_HEALTH_S) for address in addresses)
        replies = await asyncio.gather(*asked, return_exceptions=True)
    finally:
        await http.close()
    return [
        Finding("problem", str(reply), "Start it, or correct rollout.server_addrs.")
        if isinstance(reply, ServerError)
        else Finding("ok", f"{address} is healthy; its flags were not checked")
        for address, reply in zip(addresses, replies, strict=True)
    ]


def _ask_program(run: Run, roles: Roles) -> Iterator[Finding]:
    assert isinstance(run.config, GRPOConfig)
    rollout = dataclasses.replace(run.config.rollout, untie_embeddings=False)  # a run makes the untied copy later
    job = server_jobs(dataclasses.replace(run.config, rollout=rollout), roles, [1])[0]
    module = job.command.index("-m") + 2
    command = [*job.command[:module], "--check", *job.command[module:]]
    try:
        done = subprocess.run(
            command, env=job.env, capture_output=True, text=True, timeout=_PROGRAM_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        yield Finding("problem", f"no answer in {_PROGRAM_S:g} s to: {' '.join(command)}", "Run it by hand.")
        return
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    if done.returncode == 0:
        told = json.loads(lines[-1])
        run.reloads_tied = bool(told["tied_reload"])
        yield Finding("ok", f"{told['program']} {told['version']}, which understands its flags")
    else:
        refusal = next((line for line in lines if "ConfigError: " in line), f"exit status {done.returncode}")
        fix = "" if "ConfigError: " in refusal else f"Run it by hand: {' '.join(command)}"
        yield Finding("problem", _short(refusal.partition("ConfigError: ")[2] or f"{refusal}: {lines[-1]}"), fix)


# The model


def _check_model(run: Run) -> Iterator[Finding]:
    engine = run.engine
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = pick_attention(engine.attn_impl, device, getattr(torch, engine.dtype))
    run.model = model = build_meta_model(engine.path, attention)
    run.shape = shape = model_shape(model)
    tied = "tied" if shape.is_tied else "untied"
    size = f"{shape.num_parameters / 1e6:,.3g} million parameters in {_counted(shape.num_layers, 'layer')}"
    yield Finding("ok", f"{type(model).__name__}: {size}, {tied} embeddings")
    if shape.is_tied and not run.reloads_tied and isinstance(run.config, GRPOConfig):
        if run.config.rollout.untie_embeddings:
            yield Finding("ok", "served untied, since this server can't reload tied embeddings")
        else:
            yield Finding(
                "problem",
                "this server can't reload tied embeddings: it would answer 200 and go on with the old output layer",
                "Set rollout.untie_embeddings=true, or use a model with tie_word_embeddings=false.",
            )


def _check_weights(run: Run) -> Iterator[Finding]:
    """Compare the headers of the safetensors files with the architecture."""
    if run.model is None:
        return
    if run.engine.init_from_scratch:
        yield Finding("ok", f"random ({run.engine_key}.init_from_scratch); the files are not looked at")
        return
    folder = _local_folder(run.engine.path)
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    if not files and not Path(run.engine.path).is_dir():
        yield Finding(
            "warning",
            f"{run.engine.path} is not on this machine yet; the run will download it first",
            f"Run: hf download {run.engine.path}",
        )
        return
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            yield Finding("problem", f"{file} must be a whole safetensors file: got {error}", "Download it again.")
    meta = {name: torch.empty(p.shape, device="meta") for name, p in run.model.named_parameters()}
    expected = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(run.model, meta).items()}
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{n} is {list(found[n])}, not {list(s)}" for n, s in expected.items() if found.get(n, s) != s]
    if wrong:
        told = f"{len(wrong)} of {len(expected)} tensors are not those of the architecture: {'; '.join(wrong[:3])}"
        yield Finding("problem", told, f"Save or download the model in {folder} again; what is missing is random.")
    else:
        yield Finding("ok", f"all {len(expected)} tensors in {_counted(len(files), 'safetensors file')}")


def _local_folder(path: str) -> Path | None:
    """Return the folder of a model, also of a hub id that was downloaded before."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


# Tokenizer and data


def _check_tokenizer(run: Run) -> Iterator[Finding]:
    run.tokenizer = tokenizer = load_hf_tokenizer(run.config.tokenizer_path)
    size, rows = len(tokenizer), run.shape.vocab if run.shape is not None else None
    if rows is not None and size > rows:
        yield Finding(
            "problem",
            f"the tokenizer has {size:,} tokens and the model embeddings for {rows:,}",
            "Set tokenizer_path to the model's own tokenizer, or give the model more embeddings.",
        )
    else:
        yield Finding("ok", f"{size:,} tokens" + (f" of {rows:,} that the model has" if rows is not None else ""))


def _check_template(run: Run) -> Iterator[Finding]:
    """Issue the chat-template certificate, as our workflows render: with `enable_thinking=False`."""
    if run.tokenizer is None:
        return
    if run.tokenizer.chat_template is None:
        yield Finding("problem", "the tokenizer has no chat template", "Add chat_template.jinja to tokenizer_path.")
        return
    end_ids = _end_ids(run)
    certificate = certify(run.tokenizer, end_ids=end_ids)
    if PLAIN in certificate.refused:
        yield Finding(
            "problem", f"it can't write {PLAIN}: {certificate.refused[PLAIN]}", "Correct chat_template.jinja."
        )
        return
    severity: Level = "warning" if run.is_single_turn else "problem"
    yield from _judge_breaks(run, certificate, end_ids, severity)
    yield from _judge_end(run, certificate, end_ids, severity)
    for text, back in list(certificate.garbled.items())[:1]:
        told = f"{text!r} comes back from the tokenizer as {back!r}, so rewards see other text than was sampled"
        yield Finding("warning", told, "Use a tokenizer that keeps every character (byte-level).")
    if certificate.depends_on_date:
        yield Finding(
            "warning",
            "it writes the date of today, so prompts are other ones tomorrow",
            "Give the date in the template, for runs that can be repeated.",
        )


def _judge_breaks(run: Run, certificate: Certificate, end_ids: set[int], severity: Level) -> Iterator[Finding]:
    refused = f"; no {', '.join(certificate.refused)}" if certificate.refused else ""
    preamble = f"; adds a system prompt, {_quoted(certificate.preamble)}" if certificate.preamble else ""
    between = [found for found in certificate.breaks if found.is_between_turns]
    if not certificate.breaks:
        yield Finding("ok", f"append-only in {certificate.num_compared} comparisons{refused}{preamble}")
        return
    if not between:
        yield Finding(
            "warning",
            f"{_described(certificate.breaks)}{refused}{preamble}",
            "Between turns it only appends; don't train on conversations that it renders up to an answer.",
        )
        return
    need = (
        "No matter for single-turn workflows such as this one's" if run.is_single_turn else "This run may be multi-turn"
    )
    fix = f"{need}. A multi-turn workflow must keep the sampled tokens and append only what is new to them, or use a "
    fix += "template that never rewrites a turn (tokenizer_path=<folder with another chat_template.jinja>)."
    with_thinking = certify(run.tokenizer, end_ids=end_ids, enable_thinking=True).breaks
    if not any(found.is_between_turns for found in with_thinking):
        fix += " With enable_thinking=True this one does not."
    yield Finding(severity, f"not append-only: {_described(between)}{refused}{preamble}", fix)


def _described(breaks: Sequence[Break]) -> str:
    """Tell the first break in full and the others by kind."""
    others = ", ".join(found.kind for found in breaks[1:])
    return f"{breaks[0]}" + (f" The same with {others}." if others else "")


def _judge_end(run: Run, certificate: Certificate, end_ids: set[int], severity: Level) -> Iterator[Finding]:
    """The token after an answer must end generation, and be the one that fine-tuning teaches."""
    tokenizer, tail = run.tokenizer, certificate.after_answer
    if certificate.end_id is None:
        ends = ", ".join(_quoted(tokenizer.decode([token])) for token in sorted(end_ids))
        fix = "Set eos_token_id in generation_config.json to the token that ends an answer."
        special = set(tokenizer.all_special_ids) & set(tokenizer(tail, add_special_tokens=False)["input_ids"])
        if special and isinstance(run.config, GRPOConfig):
            fix = f"Add gconfig.stop_token_ids={sorted(special)}, or set eos_token_id in generation_config.json."
        told = f"it writes {_quoted(tail)} after an answer, where the model ends with {ends}: answers may run on"
        yield Finding(severity, told, fix)
    elif isinstance(run.config, SFTConfig) and certificate.end_id != tokenizer.eos_token_id:
        ours, its = (_quoted(tokenizer.decode([token])) for token in (tokenizer.eos_token_id, certificate.end_id))
        yield Finding(
            "warning",
            f"demonstrations end with the tokenizer's eos token {ours}, where the template ends an answer with {its}",
            f"Set eos_token of the tokenizer to {its}.",
        )


def _end_ids(run: Run) -> set[int]:
    """Collect what ends generation: of tokenizer, model, its generation config, and the run's own stop tokens."""
    eos: list[Any] = [run.tokenizer.eos_token_id]
    if run.model is not None:
        eos.append(run.model.config.eos_token_id)
    if (folder := _local_folder(run.engine.path)) is not None and (folder / "generation_config.json").is_file():
        eos.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    if isinstance(run.config, GRPOConfig):
        eos.append(run.config.gconfig.stop_token_ids)
    return {token for ids in eos if ids is not None for token in (ids if isinstance(ids, list) else [ids])}


def _check_data(run: Run) -> Iterator[Finding]:
    """Read the first rows as the script will."""
    if not run.calls & {"load_split", "get_custom_dataset"}:
        yield Finding("ok", "not checked: the script has data of its own")
        return
    if run.tokenizer is None:
        return
    yield from _check_rows(run, "train_dataset", run.config.train_dataset, "train")
    if run.config.valid_dataset is not None:
        yield from _check_rows(run, "valid_dataset", run.config.valid_dataset, "test")
    limit = _context(run)
    if limit is not None and run.longest > limit:
        is_hopeless = run.longest_prompt >= limit
        told = f"the longest prompt seen has {run.longest_prompt:,} tokens, the context {limit:,}"
        yield Finding(
            "problem" if is_hopeless else "warning",
            f"{told}: {'it does not fit' if is_hopeless else 'answers to it are cut before gconfig.max_new_tokens'}",
            "Set train_dataset.max_length, lower gconfig.max_new_tokens or raise the server's context.",
        )


def _check_rows(run: Run, key: str, data: DatasetConfig, split: str) -> Iterator[Finding]:
    first = dataclasses.replace(data, max_rows=min(data.max_rows or _MAX_ROWS, _MAX_ROWS))
    rows = load_split(first, split, tokenizer=run.tokenizer, seed=run.config.seed)
    lengths = [
        len(row["input_ids"])
        if data.type == "sft"
        else len(run.tokenizer.apply_chat_template(row["messages"], **_AS_PROMPT))
        for row in rows
    ]
    run.longest_prompt = max(run.longest_prompt, *lengths)
    what = "demonstrations" if data.type == "sft" else "prompts"
    yield Finding("ok", f"{key}: the first {len(rows)} {what} have {min(lengths):,} to {max(lengths):,} tokens")


def _context(run: Run) -> int | None:
    """Return the longest sequence that servers take, as far as the config tells; of demonstrations the model's."""
    config, limit = run.config, run.shape.max_positions if run.shape is not None else None
    if isinstance(config, SFTConfig) or run.foreign_servers:
        return limit
    blocks = {"lite": config.lite.context, "sglang": config.sglang.get("context_length")}
    told = blocks.get(config.rollout.backend, config.vllm.get("max_model_len"))
    return limit if told is None else min(int(told), limit or int(told))


# Memory


def _check_memory(run: Run) -> Iterator[Finding]:
    """Plan for the GPUs of this machine, or for its memory if the run is on the CPU."""
    if run.shape is not None and run.config.allocation_mode:
        gpus = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
        yield from plan_memory(run, run.shape, gpus=gpus, host=psutil.virtual_memory().total)


def plan_memory(run: Run, shape: ModelShape, *, gpus: Sequence[int], host: int) -> Iterator[Finding]:
    """Add up what trainer ranks and servers need and hold it against the bytes of the devices."""
    mode = AllocationMode.from_str(run.config.allocation_mode)
    state, step = _trainer_parts(run, shape, mode)
    server, kv_token = _server_parts(run, shape, mode)
    ranks, num_servers = mode.train_world_size, mode.gen_dp_size if server else 0
    run.plan = _plan(state | step, ranks, server, num_servers * mode.gen_instance_size)
    if run.config.cluster.n_gpus_per_node == 0:
        together = {name: size * ranks for name, size in (state | step).items()}
        together |= {f"servers' {name}": size * num_servers for name, size in server.items()}
        yield _fits("the run", together, host, run)
        return
    if not gpus:
        yield Finding("warning", "no GPU here to hold the plan against", "Compare it with the GPUs you will use.")
        return
    offloads = run.engine.fsdp.offload_params
    on_host = {name: size * ranks for name, size in state.items()}
    yield _fits("a trainer rank", step if offloads else state | step, min(gpus), run)
    yield _fits("the host", on_host if offloads else {_READ: shape.num_parameters * FLOAT32}, host, run)
    if server:
        yield _serves(run, server, kv_token, min(gpus))


def _trainer_parts(run: Run, shape: ModelShape, mode: AllocationMode) -> tuple[dict[str, int], dict[str, int]]:
    """Return what a rank holds all the time, and on top in a step of sequences of full length."""
    engine, ranks = run.engine, mode.train_world_size
    rows = run.config.train_dataset.batch_size
    if isinstance(run.config, GRPOConfig):
        groups = -(-run.config.rollout.consumer_batch_size // run.config.actor.ppo_n_minibatches)
        rows = groups * run.config.gconfig.n_samples
    tokens, spec = -(-rows // ranks) * max(run.longest, 1), engine.mb_spec
    micro = -(-tokens // spec.n_mbs)
    if spec.max_tokens_per_mb is not None:
        micro = min(micro, max(spec.max_tokens_per_mb, run.longest))
    state = training_state(shape, ranks=ranks, has_optimizer=True)
    if isinstance(run.config, GRPOConfig) and run.config.ref is not None:
        state["reference"] = training_state(shape, ranks=ranks, has_optimizer=False)["parameters"]
    step = training_step(
        shape,
        tokens=micro,
        compute_bytes=getattr(torch, engine.dtype).itemsize,
        accumulates=micro < tokens,
        recomputes=engine.gradient_checkpointing,
    )
    return state, step


def _server_parts(run: Run, shape: ModelShape, mode: AllocationMode) -> tuple[dict[str, int], int]:
    """Return what a GPU of a server needs (all of a server on a CPU), and of it the bytes per token."""
    config = run.config
    if isinstance(config, SFTConfig) or mode.gen_dp_size == 0 or run.foreign_servers:
        return {}, 0
    options = {"lite": {"dtype": config.lite.dtype}, "sglang": config.sglang, "vllm": config.vllm}[run.backend]
    dtype = getattr(torch, str(options.get("dtype", config.actor.dtype)), torch.bfloat16)
    copied = shape.vocab * shape.hidden if config.rollout.untie_embeddings and shape.is_tied else 0
    weights = (shape.num_parameters + copied) * dtype.itemsize // mode.gen_tp_size
    kv_token = kv_bytes_per_token(shape, value_bytes=dtype.itemsize, gpus=mode.gen_tp_size)
    episodes = config.rollout.max_concurrent_rollouts or config.rollout.consumer_batch_size
    sequences = -(-episodes * config.gconfig.n_samples // mode.gen_dp_size)
    if run.backend != "lite":
        return {"weights": weights, "cache": sequences * run.longest * kv_token}, kv_token
    cache = min(sequences, config.lite.slots) * min(run.longest, config.lite.context) * kv_token
    return {"weights": weights, "next weights": weights, "cache": cache}, kv_token


def _fits(who: str, parts: dict[str, int], device: int, run: Run) -> Finding:
    needed = sum(parts.values())
    share = needed / device
    level: Level = "problem" if share > _FULL else "warning" if share > _TIGHT else "ok"
    told = f"{who} needs about {needed / GIB:.2f} of {device / GIB:.1f} GiB"
    if level == "ok":
        return Finding(level, told)
    largest = max(parts, key=lambda name: parts[name])
    told = f"{told}, most of it {largest} ({parts[largest] / GIB:.2f})"
    return Finding(level, told, _KNOBS.get(largest, _MORE_RANKS).format(key=run.engine_key))


def _serves(run: Run, server: dict[str, int], kv_token: int, gpu: int) -> Finding:
    """Compare the cache that a server has room for with the answers it is asked for at once."""
    assert isinstance(run.config, GRPOConfig)
    told = {"sglang": run.config.sglang.get("mem_fraction_static"), "lite": 1.0}
    share = float(told.get(run.backend, run.config.vllm.get("gpu_memory_utilization")) or _SERVER_SHARE)
    room = (int(gpu * share) - server["weights"]) // kv_token
    if room < run.longest:
        return Finding(
            "problem",
            f"a server has {gpu * share / GIB:.1f} GiB of each GPU, of which weights take "
            f"{server['weights'] / GIB:.2f}: no room for an answer of {run.longest:,} tokens",
            "Raise t of the servers in allocation_mode, or lower gconfig.max_new_tokens.",
        )
    fitting = f"a server's cache holds {room:,} tokens, {room // max(run.longest, 1):,} answers of full length"
    if room * kv_token < sum(server.values()) - server["weights"]:
        return Finding(
            "warning",
            f"{fitting}, fewer than are asked for at once: the others wait or are computed again",
            "Lower rollout.max_concurrent_rollouts, or give the servers more GPUs.",
        )
    return Finding("ok", fitting)


def _plan(trainer: dict[str, int], num_ranks: int, server: dict[str, int], num_servers: int) -> Table:
    """Return the plan of the devices, in GiB."""
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB for sequences of full length")
    table.add_column("each", justify="right")
    table.add_column("all", justify="right")
    for name, parts, count in (("trainer rank", trainer, num_ranks), ("server", server, num_servers)):
        rows = [(f"  {part}", size) for part, size in parts.items() if size]
        for label, size in [(name, sum(parts.values())), *rows] if parts else []:
            style = "" if label.startswith(" ") else "bold"
            table.add_row(label, *(f"{value / GIB:,.3f}" for value in (size, size * count)), style=style)
    return table


def _script(entry: str) -> Path:
    path = Path(entry)
    if not path.is_file():
        raise ConfigError(f"the entry script must be a file: got {entry}, which does not exist. Correct its path.")
    return path


def _calls(entry: Path) -> set[str]:
    """Return the last names of what a script calls."""
    nodes = ast.walk(ast.parse(entry.read_bytes()))
    return {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}


def _short(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARS]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


_CHECKS: dict[str, Callable[[Run], Iterator[Finding]]] = {
    "config": _check_config,
    "processes": _check_processes,
    "server": _check_server,
    "model": _check_model,
    "weights": _check_weights,
    "tokenizer": _check_tokenizer,
    "template": _check_template,
    "data": _check_data,
    "memory": _check_memory,
}
