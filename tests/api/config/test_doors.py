"""The number of files that a new experiment, key or kind of server touches, counted for those that there are."""

import re
from pathlib import Path

import pytest

from arealite.api.config.experiment import EXPERIMENTS
from arealite.api.config.model import Choice, PPOActorConfig

REPOSITORY = Path(__file__).parents[3]
PUBLIC_NAMES = {"arealite/__init__.py", "arealite/api/cli_args.py"}  # which a user of another module does not need
OLD_KEYS = {"arealite/api/config/legacy.py"}


def files_with(*words: str) -> set[str]:
    """Return the files of the package in which one of the words stands."""
    pattern = re.compile(rf"\b({'|'.join(words)})\b")
    files = (REPOSITORY / "arealite").rglob("*.py")
    return {str(file.relative_to(REPOSITORY)) for file in files if pattern.search(file.read_text())}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("arealite/engine/rw/rw_engine.py", ("RWConfig", "RWEngineConfig", "FSDPRWEngine")),
        ("arealite/engine/dpo/dpo_engine.py", ("DPOConfig", "DPOEngineConfig", "FSDPDPOEngine")),
    ],
)
def test_an_experiment_is_its_config_its_engine_and_its_script(engine: str, words: tuple[str, ...]) -> None:
    assert files_with(*words) - PUBLIC_NAMES == {"arealite/api/config/experiment.py", engine}


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda cls: cls.__name__)
def test_an_experiment_says_what_others_show(experiment: type) -> None:
    assert experiment.SCRIPTS and (experiment.TITLE or experiment.DATA_TYPE in ("", "rl"))
    for script in experiment.SCRIPTS.values():
        assert (REPOSITORY / "examples" / "arealite" / f"{script}.py").is_file()


OF_OBJECTIVES = [
    name
    for name, field in PPOActorConfig.model_fields.items()
    if any(isinstance(mark, Choice) and mark.when.startswith("objective=") for mark in field.metadata)
]


@pytest.mark.parametrize("key", [key for key in OF_OBJECTIVES if not key.startswith("eps_clip")])  # which presets set
def test_a_key_of_an_objective_is_its_field_and_its_use(key: str) -> None:
    assert files_with(key) - OLD_KEYS == {"arealite/api/config/model.py", "arealite/algorithms/objectives.py"}


def test_a_kind_of_server_is_its_facts_its_protocol_and_a_line() -> None:
    """And a block of its flags. The programs that wrap it, and the alias of the original, come on top."""
    named = files_with("VLLMBackend", "VLLM = ServerKind", "config.vllm")
    own = {name for name in named if "vllm" in name.rpartition("/")[2]}
    assert "arealite/inference/backends/vllm.py" in own
    assert named - own == {"arealite/api/servers.py", "arealite/inference/backends/__init__.py"}
