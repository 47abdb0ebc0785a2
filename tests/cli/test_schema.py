"""The JSON schema of configs: whatever the loader takes is valid, and mistakes are marked where they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from arealite.api.config.types import config_keys
from arealite.cli.main import main
from arealite.cli.schema import CLASSES, schema

CONFIGS = Path(__file__).parents[2] / "examples/arealite/configs"
KINDS = {
    "gsm8k_grpo": "grpo",
    "gsm8k_ppo": "ppo",
    "gsm8k_sft": "sft",
    "dpo": "dpo",
    "reward_model": "rw",
    "distill": "distill",
    "evaluate": "eval",
}
VALIDATORS: dict[str, Draft7Validator] = {}


def mistakes(tree: Any, kind: str = "grpo") -> list[str]:
    """Return the keys that a validator marks."""
    if kind not in VALIDATORS:
        VALIDATORS[kind] = Draft7Validator(schema(CLASSES[kind]))
    found = []
    for error in VALIDATORS[kind].iter_errors(tree):
        while error.context:  # of the alternatives of a value, the one that came furthest
            error = max(error.context, key=lambda one: len(one.absolute_path))
        found.append(".".join(map(str, error.absolute_path)))
    return sorted(found)


@pytest.mark.parametrize("name", KINDS)
def test_the_configs_of_examples_are_valid(name: str) -> None:
    for suffix in ("", "_cpu"):
        tree = yaml.safe_load((CONFIGS / f"{name}{suffix}.yaml").read_text())
        assert mistakes(tree, KINDS[name]) == []


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("actor: {optimizer: {lr: -1}}", ["actor.optimizer.lr"]),
        ("actor: {optimizer: {lr: '${x}'}, path: '???', eps_clip: null, mb_spec: null}", []),
        ("actor: {eps_klip: 1}\ngconfig: {temperature: 0, top_p: 2}", ["actor", "gconfig.top_p"]),
        ("actor: {kl_in: both}", ["actor.kl_in"]),
        ("rollout: 5\ntrial_name: 0\nseed: 1.5", ["rollout", "seed"]),
        ("train_dataset: {mixed_with: [{path: a, weight: 2}, {wait: 1}]}", ["train_dataset.mixed_with.1"]),
        ("vllm: {anything: [1]}\nref: null\nreward: {'a.py:b': 0.5}", []),
        ("actor: {gradient_checkpointing: 'yes'}", ["actor.gradient_checkpointing"]),
    ],
)
def test_mistakes_are_marked(text: str, marked: list[str]) -> None:
    found = mistakes(yaml.safe_load(text))
    assert [key.removesuffix(".path") for key in dict.fromkeys(found)] == marked


def test_the_command_offers_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "another"]) == 2
    assert f"the kind must be one of {', '.join(CLASSES)}, or FILE.py:CLASS" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["schema", "--help"])
    told = capsys.readouterr().out
    assert all(kind in told for kind in CLASSES)


def test_every_key_has_its_description_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "ppo"]) == 0
    root = json.loads(capsys.readouterr().out)
    for key in config_keys(CLASSES["ppo"]):
        block, defaults = root, {}
        for part in filter(None, key.parent.split(".")):
            node = block["properties"][part]
            reference = node["anyOf"][0].get("$ref") or node["anyOf"][0]["anyOf"][0]["$ref"]
            block, defaults = root["$defs"][reference.rpartition("/")[2]], node.get("default") or {}
        node = block["properties"][key.leaf]
        assert " ".join(node["description"].split()) == key.doc != ""
        default = defaults.get(key.leaf, node.get("default", "???"))
        assert key.block is not None or default == key.default, key.name


def test_a_class_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own_config.py").write_text(
        "from arealite.api.cli_args import GRPOConfig\n\n"
        'class MyConfig(GRPOConfig):\n    bonus: float = 0.5\n    """Added to each reward."""\n'
        "def function(): ...\n"
    )
    assert main(["schema", f"{tmp_path}/own_config.py:MyConfig"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["title"] == "MyConfig" and own["properties"]["bonus"]["description"] == "Added to each reward."
    assert "train_dataset" in own["properties"]
    for wrong in ("grop", f"{tmp_path}/own_config.py:function"):
        assert main(["schema", wrong]) == 2
        assert f"or FILE.py:CLASS of a config class: got {wrong}. Correct it." in capsys.readouterr().err
