"""What a run reads and writes: data sets, metrics, and when it saves, evaluates and writes checkpoints."""

from typing import Any, Literal

from arealite.api.config.types import MISSING, Bool, ConfigBase, FolderBlock, NonNegativeInt, Positive, PositiveInt


class SourceConfig(ConfigBase):
    """A further source of a mixture; columns and texts are those of the data set's block unless given."""

    path: str
    """As in the data set's block."""
    weight: Positive | None = None
    """As in the data set's block."""
    config_name: str | None = None
    """As in the data set's block."""
    split: str | None = None
    """As in the data set's block."""
    prompt_key: str | None = None
    """Column of the prompt."""
    answer_key: str | None = None
    """Column of the answer."""
    chosen_key: str | None = None
    """Column of the better answer of a pair."""
    rejected_key: str | None = None
    """Column of the worse one."""
    system_prompt: str | None = None
    """System message."""
    prompt_suffix: str | None = None
    """Text at the end of the last user message."""


GYM = "reasoning_gym:"
"""Begins the path of a task of reasoning-gym."""
VERIFIERS = "verifiers:"
"""Begins the path of an environment of verifiers."""
OPENENV = "openenv:"
"""Begins the name of an OpenEnv server."""
PAIRS = ("dpo", "rw")
"""Types of data sets whose rows are pairs of answers."""


class DatasetConfig(ConfigBase):
    """Prompts, demonstrations or pairs of answers."""

    path: str = MISSING
    """Hub id, local file or folder, `FILE.py:FUNCTION?option=value`, or `hf-dataset://org/name/file`."""
    config_name: str | None = None
    """Configuration of a data set of the hub, e.g. `main`; None is its only one."""
    split: str | None = None
    """Split or part of it, e.g. `train[:95%]`; None is `train`, and `test` for `valid_dataset`."""
    type: Literal["sft", "rl", "dpo", "rw"] = "rl"
    """Demonstrations, prompts, or pairs of answers (dpo and rw)."""
    prompt_key: str | None = None
    """Column of the prompt: a text or a list of messages; `a.b` is a key of a nested column. None is the first of
    `messages`, `conversations`, `question` and `prompt` that a row has; of pairs `prompt`, where a row has it."""
    answer_key: str | None = "answer"
    """Column that rewards get as `answer` and fine-tuning teaches; None: rewards need none."""
    image_key: str | None = None
    """Column of a prompt's images, one or a list; `<image>` in the prompt is the place of the next, else they come
    first. None: prompts are texts."""
    chosen_key: str = "chosen"
    """Column of the better answer of a pair: a text or a list of messages, with or without the prompt's."""
    rejected_key: str = "rejected"
    """Column of the worse one."""
    system_prompt: str = ""
    """System message of conversations that begin without one."""
    prompt_suffix: str = ""
    """Text at the end of the last user message, e.g. in which form to answer."""
    max_length: PositiveInt | None = None
    """Rows with more tokens are left out; None keeps all."""
    max_rows: PositiveInt | None = None
    """Use only this many rows from the start; None is all."""
    batch_size: PositiveInt = 1
    """Rows per step over all ranks."""
    shuffle: Bool = True
    """A new order in every epoch."""
    drop_last: Bool = True
    """Leave out the last rows of an epoch that do not fill a batch."""
    weight: Positive | None = None
    """Rows of this source in a mixture, relative to the weights of `mixed_with`; None there and here: each row once."""
    mixed_with: list[SourceConfig] = []
    """Further sources of the same batches, each `{path: ..., weight: ...}` and the keys in which it differs."""


class _Frequency(FolderBlock):
    """How often something happens: each trigger counts from the last time, and any one is enough."""

    freq_epochs: PositiveInt | None = None
    """Number of epochs between two; None is never."""
    freq_steps: PositiveInt | None = None
    """Number of steps between two; None is never."""
    freq_secs: Positive | None = None
    """Number of seconds between two; None is never."""


class SaverConfig(_Frequency):
    """When the model is saved."""


class EvaluatorConfig(_Frequency):
    """When the model is evaluated."""


class RecoverConfig(_Frequency):
    """Checkpoints to resume an interrupted run from; the triggers say when they are written."""

    mode: Literal["disabled", "auto", "fault", "resume"] = "disabled"
    """`auto` resumes from the last checkpoint if there is one, `resume` requires one, `fault` resumes only when the
    launcher restarts a failed run, `disabled` never resumes and writes none."""
    retries: NonNegativeInt = 3
    """How often the launcher restarts a failed run (`auto` and `fault`) without a new checkpoint in between; errors of
    the config are not retried."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep, besides the one of the best evaluation."""


LOGGER_MODES = {
    "wandb": ("disabled", "online", "offline", "shared"),
    "swanlab": ("disabled", "local", "cloud", "offline"),
    "trackio": ("disabled", "online"),
}
"""Values of `mode` of each service."""


class TensorBoardConfig(ConfigBase):
    """TensorBoard."""

    path: str | None = None
    """Folder of the event files; None is off."""


class StatsLoggerConfig(FolderBlock):
    """Where metrics go besides `metrics.jsonl`."""

    line_freq_steps: PositiveInt = 1
    """Steps per line on the console, for very short steps: one at least every 30 s. `metrics.jsonl` has every step."""
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """TensorBoard."""
    wandb: dict[str, Any] = {"mode": "disabled"}
    """Weights & Biases, passed to `wandb.init` unless mode is disabled; the run's names and config are filled in."""
    swanlab: dict[str, Any] = {"mode": "disabled"}
    """SwanLab, passed to `swanlab.init` likewise."""
    trackio: dict[str, Any] = {"mode": "disabled"}
    """Trackio, passed to `trackio.init` likewise; mode is disabled or online."""
