"""Finds what would make a run fail, before it starts.

The checks use the real model, tokenizer, data and reward. Only the parsers of servers are started, and only configs,
tokenizers and data sets are downloaded.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import datasets
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging

from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.config.run import last_name, load_run_config, script_calls
from arealite.cli import own_trainer
from arealite.cli.check.findings import Findings, counted
from arealite.cli.check.memory import check_memory
from arealite.cli.check.model import check_data, check_model, check_template, check_tokenizer, check_weights
from arealite.cli.check.script import check_declared, check_outputs, check_reward, check_trainer
from arealite.cli.devices import placements
from arealite.inference.backends.program import ServerProgram
from arealite.inference.http import ServerConnection, deadline_in, open_session
from arealite.launcher.place.local import LocalPlace
from arealite.launcher.plan.jobs import environment, samples_in_trainer
from arealite.launcher.plan.layout import foreign_servers
from arealite.launcher.plan.plan import Plan, checked_plan, entry_script
from arealite.utils.devices import Node, this_node, visible_gpus
from arealite.utils.secret import secret_of_environment

_PROGRAM_S = 300.0  # for a server's parser to answer; importing SGLang or vLLM for the first time takes a minute
_HEALTH_S = 10.0


def check(entry: str, argv: Sequence[str], *, preflight: Node | bool = False) -> int:
    """Check the run that the launcher would start with these arguments, print the findings, return the exit status.

    A preflight skips slow checks and those that the launcher itself does, and prints only problems and warnings. If it
    is of the node on which the run starts, the memory plan must fit the whole memory: other programs may end in time.
    """
    datasets.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # one line per finding
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # it reports retries
    transformers_logging.disable_progress_bar()
    script = entry_script(entry)
    calls = script_calls(script)
    names = {last_name(call.func) for call in calls}
    config, findings = load_run_config(argv, script), Findings(is_brief=preflight is not False)
    if script == Path(own_trainer.__file__):
        findings.look("trainer", check_trainer, argv)
    findings.look("graph", check_declared, argv, script)
    if preflight is False:
        plan = findings.look("processes", _check_processes, config)
        if plan is not None:
            findings.look("server", _check_server, config, plan)
    findings.look("outputs", check_outputs, config)
    model = findings.look("model", check_model, config)
    if model is not None:
        findings.look("weights", check_weights, config, model)
        longest, row = 0, None
        if (tokenizer := findings.look("tokenizer", check_tokenizer, config, model)) is not None:
            findings.look("template", check_template, config, model, tokenizer, names)
            longest, row = findings.look("data", check_data, config, model, tokenizer, names) or (0, None)
            findings.look("reward", check_reward, config, script, calls, row, tokenizer)
        if preflight is not True:
            findings.look("memory", check_memory, config, model, longest, preflight_on=preflight or None)
    return 1 if findings.summarize() else 0


def _check_processes(findings: Findings, config: Config) -> Plan:
    plan = checked_plan(config)
    if plan.num_nodes == 1:
        LocalPlace().check(config, plan)
    where = f"on {plan.num_gpus} GPUs" if plan.num_gpus else "on the CPU"
    if plan.num_nodes > 1:
        where += f" of {plan.num_nodes} nodes, which were not checked"
    servers = f"{counted(len(plan.servers), 'server')} and " if plan.servers else ""
    ranks = counted(len(plan.trainers), "trainer rank")
    if samples_in_trainer(config):
        ranks += ", which also samples,"
    if plan.groups:
        sizes = ", ".join(f"{one.name}: {one.num_ranks}" for one in plan.groups)
        ranks = f"a master with {counted(plan.num_workers, 'worker')} ({sizes})"
    findings.add("ok", f"{config.allocation_mode}: {servers}{ranks} {where}")
    findings.console.print("", placements(config, plan, this_node()), "")
    return plan


def _check_server(findings: Findings, config: Config, plan: Plan) -> None:
    """Ask running servers for their health, or the server program to check its flags and the model."""
    if foreign := foreign_servers(config):
        asyncio.run(_ask_health(findings, foreign))
    elif plan.servers and not config.server_kind.is_embedded:
        _ask_program(findings, config, plan)


async def _ask_health(findings: Findings, addresses: Sequence[str]) -> None:
    async with open_session(secret_of_environment()) as session:
        for address in addresses:
            await ServerConnection(session, address, deadline_in(_HEALTH_S)).request("GET", "/health")
            findings.add("ok", f"{address} is healthy; its flags were not checked")


def _ask_program(findings: Findings, config: Config, plan: Plan) -> None:
    devices = plan.servers[0].devices
    command = ServerProgram(config).command(index=0, num_gpus=max(1, len(devices)))
    command.insert(command.index("-m") + 2, "--check")
    gpus = {}
    if plan.num_nodes == 1:
        names = visible_gpus() if devices else []
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(names[device] for device in devices)}
    env = os.environ | environment(config.launcher.inference_server_env_vars, python=command[0], **gpus)
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=_PROGRAM_S, check=False, errors="replace"
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    if done.returncode != 0:
        refusal = next((line.partition("ConfigError: ")[2] for line in lines if "ConfigError: " in line), "")
        crash = f"exit status {done.returncode}: {lines[-1]}"
        findings.add("problem", refusal or crash, "" if refusal else f"Run it by hand: {' '.join(command)}")
        return
    server = json.loads(lines[-1])
    findings.add("ok", f"{server['program']} {server['version']}, which understands its flags")
