"""Finds what would make a run fail, before it starts.

The checks use the real model, tokenizer, data and reward; only configs, tokenizers and data sets are downloaded. What a
server program makes of its flags, and whether weights are whole, the run itself reports when it loads them.
"""

import sys
from collections.abc import Sequence
from typing import Any

import datasets
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging

from arealite.api.config.run import last_name, load_run_config, script_calls
from arealite.cli.check.findings import Findings
from arealite.cli.check.memory import check_memory
from arealite.cli.check.model import check_data, check_environments, check_model, check_template, check_tokenizer
from arealite.cli.check.script import check_declared, check_outputs, check_reward
from arealite.launcher.plan.plan import checked_plan, entry_script
from arealite.utils.devices import Node, this_node


def check(entry: str, argv: Sequence[str], *, preflight: Node | bool = False) -> int:
    """Check the run that the launcher would start with these arguments, print the findings, return the exit status.

    A preflight prints only problems and warnings; it plans memory if it is given the node on which the run starts.
    Raises ConfigError for a config that has no plan.
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
    checked_plan(config)
    findings.look("graph", check_declared, argv, script)
    findings.look("outputs", check_outputs, config)
    findings.look("environment", check_environments, config)
    model = findings.look("model", check_model, config)
    if model is not None:
        longest, rows = 0, list[dict[str, Any]]()
        if (tokenizer := findings.look("tokenizer", check_tokenizer, config, model)) is not None:
            findings.look("template", check_template, tokenizer)
            longest, rows = findings.look("data", check_data, config, model, tokenizer, names) or (0, [])
            findings.look("reward", check_reward, config, script, calls, rows, tokenizer)
        if preflight is not True:
            findings.look("memory", check_memory, config, model, longest, preflight or this_node())
    return 1 if findings.summarize() else 0
