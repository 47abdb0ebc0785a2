"""How completions are sampled, episodes scheduled and servers reached."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from arealite.api.config.types import (
    Bool,
    ConfigBase,
    Dtype,
    FolderBlock,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Port,
    Positive,
    PositiveFraction,
    PositiveInt,
)
from arealite.api.servers import BackendName, PauseMode
from arealite.utils.network import check_address

_MAX_BATCHES = 8  # in flight by default, however large the staleness bound
ALL_TOKENS = 100_000_000
"""The `top_k` that cuts nothing off."""
DEFAULT_KEPT_IDS = 512
"""The `top_k` of training with `top_p` or `min_p` alone: servers return no unbounded sets of kept ids."""


def _split_addresses(value: object) -> object:
    return [address for address in value.split(",") if address] if isinstance(value, str) else value


def _check_address(address: str) -> str:
    host_port = address.removeprefix("http://").rstrip("/")
    try:
        return check_address(host_port)
    except ValueError:
        raise ValueError("host:port or http://host:port") from None


_Address = Annotated[str, AfterValidator(_check_address)]


class GenerationHyperparameters(ConfigBase):
    """How completions are sampled."""

    n_samples: PositiveInt = 1
    """Completions per prompt (the size of a group)."""
    max_new_tokens: PositiveInt = 16384
    """Longest completion, in tokens."""
    min_new_tokens: NonNegativeInt = 0
    """Shortest completion, in tokens; stop tokens are banned until then."""
    greedy: Bool = False
    """Always take the likeliest token."""
    top_p: PositiveFraction = 1.0
    """Sample from the likeliest tokens that hold this much probability; 1 is all. Training computes logprobs over what
    the server kept."""
    top_k: PositiveInt = ALL_TOKENS
    """Sample from this many likeliest tokens; the default is all, with `top_p` or `min_p` in training 512."""
    min_p: Fraction = 0.0
    """Sample from the tokens that are at least this many times as likely as the likeliest one; 0 is all."""
    temperature: Positive = 1.0
    """Divides the logits. For temperature 0 set `greedy: true`."""
    stop_token_ids: list[NonNegativeInt] = []
    """Token ids that end a completion, besides the model's own end token."""
    stop: list[str] = []
    """Texts that end a completion."""

    @property
    def narrows(self) -> bool:
        """Whether each token is sampled from the likeliest ones only, so that logprobs are those over a kept set."""
        return not self.greedy and (self.top_p < 1 or self.top_k < ALL_TOKENS or self.min_p > 0)


class WeightCheckConfig(ConfigBase):
    """How every weight update is verified."""

    fingerprint: Bool = True
    """Compare a fingerprint of every tensor, on servers that can (`lite`, and vLLM by broadcast)."""
    canary_tokens: NonNegativeInt = 8
    """Tokens that every server samples after an update, and whose logprobs the trainer must reproduce; 0 is off."""
    canary_bound: Positive | None = None
    """Largest mean absolute difference of those logprobs; None is 0.001 in float32 and 0.1 in shorter dtypes."""
    on_mismatch: Literal["stop", "warn"] = "stop"
    """What the run does after a mismatch."""


class LiteConfig(ConfigBase):
    """The embedded inference server."""

    threads: PositiveInt | None = None
    """CPU threads of one server; None is 1, but a share of all cores less one where it and the trainer, another process
    of its node, take turns (synchronous)."""
    slots: PositiveInt = 64
    """Sequences decoded together."""
    context: PositiveInt = 2048
    """Longest sequence, prompt and completion, in tokens."""
    dtype: Dtype = "float32"
    """Dtype of weights and cache."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where a server computes; `cuda` is the GPU that the launcher reserves for it, and has not been tried yet."""
    deterministic: Bool = False
    """Decode so that a sequence's bits do not depend on its neighbours (slower)."""


class ColocatedConfig(LiteConfig):
    """The embedded server in the trainer's process, on its device."""

    threads: PositiveInt = 1
    """CPU threads; filled in from `lite.threads`."""
    path: str = ""
    """Hugging Face folder or hub id of the model that is trained."""


class InferenceEngineConfig(FolderBlock):
    """How episodes are scheduled and how requests are sent to servers."""

    seed: NonNegativeInt = 1
    """Seed from which sampling seeds derive; filled in from the top level."""
    backend: BackendName = "sglang"
    """Protocol of the servers; filled in from `allocation_mode`."""
    server_addrs: Annotated[list[_Address], BeforeValidator(_split_addresses)] = []
    """host:port of servers that others start and stop; empty uses the servers that register for this run."""
    colocated: ColocatedConfig | None = None
    """Embedded server in the trainer's process, on the actor's parameters; filled in from `allocation_mode`
    (`lite.d1|d1`), `lite` and the model's path."""
    num_servers: NonNegativeInt = 0
    """Registered servers to wait for before the first episode; filled in from `allocation_mode`. More may join."""
    consumer_batch_size: PositiveInt = 1
    """Episodes (prompts) per training step over all ranks; filled in from `train_dataset.batch_size`."""
    num_minibatches: PositiveInt = 1
    """Minibatches in each of which every rank gets about equal tokens; filled in from `actor.ppo_n_minibatches`."""
    max_concurrent_rollouts: PositiveInt | None = None
    """Maximum number of episodes running at once over all ranks; lower while servers are missing. None is as many
    as the staleness bound admits, up to 8 batches, while servers have free slots (which a master with rollout workers
    does not see), and scaled up with more servers."""
    max_head_offpolicyness: NonNegativeInt = 0
    """Largest staleness, in weight versions, of a trajectory we train on. 0 is synchronous training."""
    queue_size: PositiveInt | None = None
    """Maximum number of episodes submitted and not yet started; None is 16 times the concurrency."""
    parallel: str = ""
    """Sizes of the trainer, whose ranks of a replica get the same rows; filled in from `allocation_mode`."""
    servers_sleep: Bool = False
    """Whether servers give their memory back from a batch to the next weight update; filled in from `allocation_mode`
    (`sglang.d1|d1`)."""
    weight_update: Literal["broadcast", "disk"] | None = None
    """How new weights reach the servers; None is broadcast, or disk if servers sleep on the trainer's devices."""
    weight_update_senders: PositiveInt | None = None
    """Trainer ranks that broadcast weights, each about as many bytes. None is one on each node, and a single one for
    SGLang, which receives from one at a time."""
    pause_mode: PauseMode = "abort"
    """What a weight update does to completions in flight. `abort`: they return and any server continues them later.
    `retract`: they stay and the server recomputes their keys and values. `in_place`: they continue on the keys and
    values of the old weights; such tokens are counted as `rollout/stale_kv_tokens`. `wait` (only vllm): the update
    waits for them, so `weight_update_timeout` must be longer than a completion takes."""
    tokenizer_path: str = ""
    """Filled in from the top level; finds stop strings that an interruption has cut in two."""
    weight_update_timeout: Positive = 120.0
    """Timeout of a weight update, in seconds."""
    setup_timeout: Positive = 600.0
    """Seconds until every server must be ready."""
    request_timeout: Positive = 3600.0
    """Timeout of one request to a server, in seconds."""
    request_retries: NonNegativeInt = 3
    """Retries of a failed request."""
    reward_timeout: Positive = 15.0
    """Timeout of a reward function, in seconds."""
    reward_workers: PositiveInt = 2
    """Processes that run a plain reward function."""
    episode_timeout: Positive = 3600.0
    """Timeout of an episode, in seconds."""
    episode_retries: NonNegativeInt = 1
    """New attempts after an episode has failed; then its whole group is dropped and counted."""
    failure_window: PositiveInt = 100
    """Number of most recent episodes that `max_failed_share` covers."""
    max_failed_share: Fraction = 0.1
    """Share of the last `failure_window` episodes that may fail; above it the run stops."""
    max_rejected_in_a_row: PositiveInt | None = None
    """Consecutive rejected or failed episodes after which the run stops; None is 20 batches."""
    overdue: Literal["wait", "drop", "train"] = "wait"
    """What happens to a running episode that would exceed the staleness bound: wait for it before training on others,
    drop and count it, or train on it late, which gives up the bound."""
    weight_check: WeightCheckConfig = WeightCheckConfig()
    """Verification that the servers hold the trainer's weights."""
    stored_share: Fraction = 1.0
    """Share of the trained episodes whose tokens and texts are stored, chosen by their prompts; of the others
    `rollouts/` has prompt, reward and server. Steps that lack one can't be replayed."""
    replay_from: str = ""
    """Run folder whose stored batches replace sampling; set by `arealite replay`."""
    replay_step: NonNegativeInt = 0
    """Last step of a replay."""

    @property
    def concurrency(self) -> int:
        """Episodes that run at once while no server is missing."""
        num_batches = min(self.max_head_offpolicyness + 1, _MAX_BATCHES)
        return self.max_concurrent_rollouts or num_batches * self.consumer_batch_size


class OnlineConfig(ConfigBase):
    """Sessions that people or other programs open, in place of a data set: `OnlineSessions`."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other nodes reach shows keys and texts to whoever can listen on the network."""
    port: Port = 0
    """Port to listen on; 0 is any free one, which the log names."""
    idle_s: Positive = 300.0
    """Seconds without a request after which a session is dropped."""
    deadline_s: Positive = 1800.0
    """Seconds from the first session of a group until those that have not ended are dropped and the others trained on.
    Must be less than `rollout.episode_timeout`."""


class AgentConfig(ConfigBase):
    """How an agent that speaks HTTP runs: `AgentWorkflow`."""

    history: Literal["keep", "template"] = "keep"
    """What happens where the chat template rewrites earlier turns. `keep`: they stay as the model saw them.
    `template`: another row begins, with what the template writes."""
    max_turns: PositiveInt | None = None
    """Most turns of one run; None is any number."""
    max_sampled_tokens: PositiveInt | None = None
    """Most tokens that one run may sample; requests at once may each take what is left. None is any number."""
    on_limit: Literal["train", "reject"] = "train"
    """What becomes of a run whose agent fails after a call was refused for `max_turns`, `max_sampled_tokens` or the
    context: trained on with a reward of 0, or rejected with its group. An agent that ends by itself is rewarded as
    always."""
    train_roots: Literal["all", "first", "longest"] = "all"
    """Which conversations of a run are trained on, if there are several: all, the first one, or the one with the most
    sampled tokens. Agents also ask for titles and summaries."""
    retry_grace: NonNegative = 30.0
    """Seconds an undelivered response is kept for a reconnecting client; later the answer is dropped."""
    heartbeat_s: Positive = 10.0
    """Seconds between the bytes that keep a client waiting while it gets nothing else."""
    online: OnlineConfig = OnlineConfig()
    """Sessions that others open over HTTP: `OnlineSessions`."""
