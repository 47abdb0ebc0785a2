"""Checks of the trained model, its tokenizer and chat template, the first rows of data, and its environments."""

import asyncio
import copy
import sys
from typing import Any

from transformers import PreTrainedModel

from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.config.data import OPENENV
from arealite.chat.demonstration import turn_ends
from arealite.chat.template import prompt_tokens
from arealite.cli.check.findings import Findings, counted
from arealite.cli.check.memory import load_model
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader
from arealite.dataset.prepare import expanded
from arealite.planner.memory import model_shape
from arealite.planner.needs import context_of, positions_of
from arealite.utils.hf import load_hf_tokenizer, load_image_processor
from arealite.utils.images import sees_images
from arealite.workflow.openenv import OpenEnv

_MAX_ROWS = 256  # read of a data set
_NUM_SHOWN = 3  # to a reward function


def check_model(findings: Findings, config: Config) -> PreTrainedModel:
    """Build the architecture without its weights."""
    model = load_model(config)
    shape = model_shape(model)
    size = f"{shape.num_parameters / 1e6:,.3g} million parameters in {counted(shape.num_layers, 'layer')}"
    size += f", {shape.num_frozen / shape.num_parameters:.1%} of them frozen" if shape.num_frozen else ""
    findings.add("ok", f"{type(model).__name__}: {size}, {'tied' if shape.is_tied else 'untied'} embeddings")
    return model


def check_tokenizer(findings: Findings, config: Config, model: PreTrainedModel) -> Any:
    """Load the tokenizer and compare its size with the model's embeddings."""
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    size, rows = len(tokenizer), model.get_input_embeddings().weight.shape[0]
    if size > rows:
        findings.add(
            "problem",
            f"the tokenizer has {size:,} tokens and the model embeddings for {rows:,}",
            "Set tokenizer_path to the model's own tokenizer, or give the model more embeddings.",
        )
    else:
        findings.add("ok", f"{size:,} tokens of {rows:,} that the model has")
    return tokenizer


def check_template(findings: Findings, tokenizer: Any) -> None:
    """Report by which tokens the chat template ends an answer."""
    if tokenizer.chat_template is None:
        text = "the tokenizer has none: prompts are plain texts, without roles"
        fix = "Add chat_template.jinja to tokenizer_path if the model is one to chat with."
        return findings.add("warning", text, fix)
    ends = " or ".join(map(repr, map(tokenizer.decode, turn_ends(tokenizer))))
    if ends:
        return findings.add("ok", f"it ends an answer with {ends}")
    findings.add("warning", "it ends an answer with no token: completions may run on", "Set gconfig.stop_token_ids.")


def check_data(
    findings: Findings, config: Config, model: PreTrainedModel, tokenizer: Any, calls: set[str]
) -> tuple[int, list[dict[str, Any]]]:
    """Read the first rows as the script will; return the longest prompt or demonstration in tokens, and some."""
    if not calls & {"load_datasets", "get_custom_dataset", "Master"}:
        findings.add("ok", "not checked: the script has data of its own")
        return 0, []
    config = copy.deepcopy(config)
    blocks = {"train_dataset": config.train_dataset, "valid_dataset": config.valid_dataset}
    for block in filter(None, blocks.values()):
        block.max_rows = min(block.max_rows or sys.maxsize, max(_MAX_ROWS, block.batch_size))
    longest, some = 0, list[dict[str, Any]]()
    processor = load_image_processor(config.tokenizer_path) if sees_images(model.config) else None
    for (key, data), rows in zip(blocks.items(), load_datasets(config, tokenizer, processor), strict=True):
        if data is None or not rows:
            continue
        sequences = [one for row in rows for one in row.get("pair", [row])]
        lengths = [_num_tokens(one, tokenizer, processor) for one in sequences]
        longest, some = max(longest, *lengths), some or [rows[at] for at in range(min(_NUM_SHOWN, len(rows)))]
        if key == "train_dataset" and "PromptLoader" in calls:
            PromptLoader(rows, data.batch_size)  # refuses a batch that is larger
        what = {"rl": "prompts", "sft": "demonstrations"}.get(data.type, "pairs")
        findings.add("ok", f"{key}: the first {len(rows)} {what} have {min(lengths):,} to {max(lengths):,} tokens")
    context = context_of(config, positions_of(model))
    new = config.sampling.max_new_tokens if config.sampling is not None else 0
    if longest + new > context:
        is_hopeless = longest >= context
        findings.add(
            "problem" if is_hopeless else "warning",
            f"the longest prompt seen has {longest:,} tokens, the context {context:,}: "
            f"{'it does not fit' if is_hopeless else 'completions are cut before gconfig.max_new_tokens'}",
            "Set train_dataset.max_length, lower gconfig.max_new_tokens or raise the server's context.",
        )
    return longest, some


def check_environments(findings: Findings, config: Config) -> None:
    """Begin an episode on each OpenEnv server whose rows are trained on."""
    for path in [config.train_dataset.path, *(source.path for source in config.train_dataset.mixed_with)]:
        if path.startswith(OPENENV):
            asyncio.run(OpenEnv({"environment": path}).check())
            findings.add("ok", f"{path} begins an episode")


def _num_tokens(row: dict[str, Any], tokenizer: Any, processor: Any) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    (ids,) = prompt_tokens(tokenizer, [row["messages"]])
    if "images" in row and processor is not None:
        ids = expanded({"input_ids": ids}, row["images"], tokenizer, processor)["input_ids"]
    return len(ids)
