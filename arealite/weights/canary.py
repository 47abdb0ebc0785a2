"""A canary: after a weight update every server samples a few tokens, whose logprobs the trainer must agree with. It
verifies the whole way, from the trainer's parameters through names, dtypes and caches to the server's kernels."""

# B servers, T padded tokens

import logging
from collections.abc import Mapping

import torch
from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import ModelRequest
from arealite.api.servers import KINDS
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.backends.base import Segment
from arealite.inference.pool import Server
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.distributed import from_rank_0, on_rank_0
from arealite.utils.tensors import concat_padded_tensors

logger = logging.getLogger("arealite.engine")

_PROMPT_TOKENS = 8
_FLOAT32_BOUND, _SHORTER_BOUND = 1e-3, 0.1


def check_canary(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int) -> None:
    """Compare every server's logprobs with the actor's, between a transfer and the advance of versions (collective).
    A difference raises WeightUpdateError, or is logged, as `rollout.weight_check` says; `policy/canary_gap` is the
    largest one."""
    check = rollout.config.weight_check
    if check.canary_tokens == 0:
        return
    vocab_size = actor.model_config.vocab_size
    request = ModelRequest(
        [(7 * index + 3) % vocab_size for index in range(_PROMPT_TOKENS)],  # ids that any model has
        GenerationHyperparameters(max_new_tokens=check.canary_tokens, temperature=actor.config.temperature),
    )
    canaries = on_rank_0(lambda: rollout.run(rollout.receiver.sample_canaries(request))) or {}
    logprobs_BT = actor.compute_logprobs(from_rank_0(_batch(request, canaries)))  # on every rank, as some share rows
    on_rank_0(lambda: _judge(actor, rollout, version, canaries, logprobs_BT))


def _batch(request: ModelRequest, canaries: Mapping[Server, Segment]) -> TensorDict:
    """Return one row per server."""
    rows = [torch.tensor([[*request.input_ids, *one.tokens]]) for one in canaries.values()]
    return concat_padded_tensors(
        [
            TensorDict({"input_ids": row, "attention_mask": torch.ones_like(row, dtype=torch.bool)}, len(row))
            for row in rows or [torch.zeros(0, 1, dtype=torch.long)]
        ]
    )


def _judge(
    actor: FSDPPPOActor,
    rollout: RemoteInferenceEngine,
    version: int,
    canaries: Mapping[Server, Segment],
    logprobs_BT: torch.Tensor,
) -> None:
    """Record the largest gap; refuse weights beyond the bound or of another version, and remove a server that has them
    if it was only joining."""
    check, model_config = rollout.config.weight_check, actor.model_config
    dtypes = {actor.config.dtype, *(server.facts.dtype for server in canaries)}
    default_bound = _FLOAT32_BOUND if dtypes == {"float32"} else _SHORTER_BOUND
    bound = default_bound if check.canary_bound is None else check.canary_bound
    complaints: dict[Server, str] = {}
    gaps = []
    for (server, one), logprobs_T in zip(canaries.items(), logprobs_BT.double().cpu(), strict=True):
        expected = logprobs_T[_PROMPT_TOKENS : _PROMPT_TOKENS + len(one.tokens)]
        gap = (torch.tensor(one.logprobs, dtype=torch.float64) - expected).abs().mean().item()
        gaps.append(gap)
        if not gap <= bound:
            complaints[server] = f"{server.address} differs by {gap:.3g} per token over {len(one.tokens)} tokens"
        elif one.versions is not None and set(one.versions) != {version}:
            complaints[server] = f"{server.address} says version {', '.join(map(str, sorted(set(one.versions))))}"
    rollout.canary_gap = max(gaps, default=None)
    if not complaints:
        return
    stops, others = check.on_mismatch == "stop", {*canaries, *rollout.servers.serving} - complaints.keys()
    if stops and others and all(server.state == "joining" for server in complaints):
        rollout.run(rollout.receiver.remove(complaints))
        return
    defect = KINDS[rollout.config.backend].tied_embeddings_defect if model_config.tie_word_embeddings else ""
    cause = f"{defect}. Else look at that server's log" if defect else "Look at that server's log"
    text = (
        f"every server must sample from weights of version {version}, with logprobs within {bound:g} of the trainer's: "
        f"{'; '.join(complaints.values())}. {cause}; rollout.weight_check.canary_bound is the bound."
    )
    if stops:
        raise WeightUpdateError(text)
    logger.warning("%s", text)
