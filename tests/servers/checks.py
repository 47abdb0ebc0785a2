"""What a server must do for us, one function per row of the table.

A check returns a note for its cell, fails with an AssertionError (any other error is a failure as well), or raises
`NotApplicable`. Where a row says that a server may refuse, a ConfigError of our client or a status 400 that names what
is refused is no failure. Numbers come from plain transformers, never from the server itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from harness.processes import environment
from safetensors.torch import load_file
from testing_quickstart import PAD, ROLES
from testing_senders import Senders
from transformers import AutoTokenizer

from arealite.api.cli_args import LoRAConfig, OptimizerConfig, PPOActorConfig
from arealite.api.errors import ContextOverflowError, ServerError, WeightUpdateError
from arealite.api.io_struct import (
    FinetuneSpec,
    ModelRequest,
    ModelResponse,
    ParamSpec,
    SaveLoadMeta,
    WeightUpdateMeta,
)
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.fingerprint import fingerprints
from arealite.utils.tensors import concat_padded_tensors
from arealite.utils.weight_transfer import close_group, join_group, send_bucket
from arealite.weights.canary import check_canary
from arealite.weights.publish import publish_weights
from arealite.workflow.trajectory import trajectory_from_response
from servers.models import Reference, Scored, end_ids
from servers.programs import CONTEXT
from servers.subject import Flight, Subject, prompt, requests

_IN_FLIGHT_S = 900.0
"""In which a publication must have met requests in flight."""
RATIO_GAP = 1e-5
"""Most that the trainer's ratio at equal weights may differ from 1."""
_UPDATE_S = 60.0
"""Deadline of each part of a weight update."""
GAP = 1e-3
"""Most that a server's logprob may differ from the reference's, both in float32."""
MAX_Z = 5.0
"""Standard deviations by which the sampled tokens' surprise may differ from its expectation."""


class NotApplicable(Exception):
    """The server has nothing of the kind; the text goes into the cell."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One row."""

    name: str
    run: Callable[[Subject], str]
    may_refuse: bool = False
    is_in_place: bool = False
    """Whether it takes a server that was started for the pause mode in_place."""


# Generation


def greedy(subject: Subject) -> str:
    """Greedy tokens are the likeliest ones, and logprobs those of the whole distribution."""
    scored = subject.sample(8, greedy=True)
    _require_complete(scored, 32)
    regret = max(one.regret() for one in scored)
    assert regret <= GAP, f"every token must be the likeliest: got one that is {regret:.3g} below"
    return _agree(scored)


def sampled(subject: Subject) -> str:
    """Sampled tokens follow the model's distribution, whatever the folder's generation config says."""
    return _follows(subject, lambda one: one.logprobs_TV())


def temperature(subject: Subject) -> str:
    """Logprobs are those after temperature."""
    return _follows(subject, lambda one: one.logprobs_TV(0.5), temperature=0.5)


def top_k(subject: Subject) -> str:
    """Logprobs are those of the distribution that top_k leaves."""

    def expected(one: Scored) -> torch.Tensor:
        least_T = one.logits_TV.topk(5).values[:, -1:]
        return one.logits_TV.masked_fill(one.logits_TV < least_T, -torch.inf).log_softmax(-1)

    return _follows(subject, expected, top_k=5)


def top_p(subject: Subject) -> str:
    """Logprobs are those of the distribution that top_p leaves."""

    def expected(one: Scored) -> torch.Tensor:
        sorted_TV, order_TV = one.logprobs_TV().sort(descending=True)
        is_cut_TV = (sorted_TV.exp().cumsum(-1) - sorted_TV.exp()) >= 0.7
        mask_TV = torch.zeros_like(is_cut_TV).scatter(-1, order_TV, is_cut_TV)
        return one.logits_TV.masked_fill(mask_TV, -torch.inf).log_softmax(-1)

    return _follows(subject, expected, top_p=0.7, top_k=512)


def min_p(subject: Subject) -> str:
    """Logprobs are those of the distribution that min_p leaves."""

    def expected(one: Scored) -> torch.Tensor:
        logprobs_TV = one.logprobs_TV()
        is_cut_TV = logprobs_TV < logprobs_TV.max(-1, keepdim=True).values + math.log(0.3)
        return one.logits_TV.masked_fill(is_cut_TV, -torch.inf).log_softmax(-1)

    return _follows(subject, expected, min_p=0.3, top_k=512)


def kept_sets(subject: Subject) -> str:
    """With the kept sets the trainer's ratio at equal weights is 1, without them the kept mass, also if interrupted."""
    if subject.program.name == "vllm":
        raise NotApplicable("on GPUs only")
    with subject.client(pause_mode="abort", weight_update="disk") as engine:
        flight = Flight(subject, engine, requests(16, 96, top_p=0.9, top_k=20))
        time.sleep(1)
        subject.publish(engine, subject.history[-1])
        responses = flight.land()
    actor, num_interrupts = subject.laboratory.actor, sum(one.num_interrupts for one in responses)
    batch = concat_padded_tensors([trajectory_from_response(one, 0.0) for one in responses])
    mask_BT = batch["loss_mask"].bool()
    with_kept_N, without_N = (
        (actor.compute_logprobs(batch, whole=whole) - batch["logprobs"])[mask_BT].double().exp()
        for whole in (False, True)
    )
    gap = (with_kept_N - 1).abs().max().item()
    assert gap <= RATIO_GAP, f"every ratio must be 1 within {RATIO_GAP:g}: it is {gap:.3g} off"
    mass_N = torch.cat([_kept_mass(one) for one in subject.score(responses)])
    without_gap = (without_N - mass_N).abs().max().item()
    assert without_gap <= RATIO_GAP, f"without kept sets ratios must be their mass: they are {without_gap:.3g} off"
    assert mass_N.min() < 0.7, f"some sets must have a small mass: got {mass_N.min():.3g} at least"
    return f"{gap:.0e} off 1, {mass_N.min():.2f}-{mass_N.max():.2f} without, {num_interrupts} interrupts"


def _kept_mass(one: Scored) -> torch.Tensor:
    assert one.response.output_kept is not None
    probs_TV = one.logprobs_TV().exp()
    return torch.stack([probs_V[ids].sum() for probs_V, ids in zip(probs_TV, one.response.output_kept)])


def seeds(subject: Subject) -> str:
    """The samples of a run depend on its seed, and on nothing else."""

    if not subject.program.honours_seeds:
        raise NotApplicable("samples of its own")

    def run(seed: int) -> list[list[int]]:
        with subject.client(seed=seed) as engine:
            return [one.output_tokens for one in subject.complete(engine, requests(8, 24))]

    first, again, other = run(1), run(1), run(2)
    assert first == again, "equal seeds must give equal samples: they did not"
    num_equal = sum(a == b for a, b in zip(first, other))
    assert num_equal == 0, f"other seeds must give other samples: got {num_equal} of 8 equal"
    return "equal, others differ"


def group(subject: Subject) -> str:
    """Samples of one prompt differ from each other."""
    request = requests(8, 24)[3]
    with subject.client() as engine:
        samples = subject.complete(engine, [dataclasses.replace(request, rid="group") for _ in range(8)])
    num_different = len({tuple(one.output_tokens) for one in samples})
    assert num_different == 8, f"8 samples of one prompt must differ: got {num_different} different ones"
    return "8 different"


# Ends of completions


def end_tokens(subject: Subject) -> str:
    """Both end tokens end a completion, which includes them."""
    ends = end_ids(subject.laboratory.models["first"])
    scored = subject.sample(64, 128, temperature=2.0)
    seen: set[int] = set()
    for response in (one.response for one in scored):
        *before, last = response.output_tokens
        assert not set(before) & set(ends), "a completion must stop at its first end token: it went on"
        has_ended = last in ends
        assert response.stop_reason == ("stop" if has_ended else "length"), f"got {response.stop_reason} at {last}"
        assert has_ended or response.output_len == 128, f"got {response.output_len} tokens without an end"
        seen |= {last} & set(ends)
    assert seen == set(ends), f"both end tokens, {ends}, must be sampled and end completions: got {sorted(seen)}"
    gap = max(one.gap(one.logprobs_TV(2.0)) for one in scored)
    assert gap <= GAP, f"logprobs differ by {gap:.3g}"
    return f"gap {gap:.0e}"


def stop_ids(subject: Subject) -> str:
    """A stop token ends a completion, which includes it."""
    whole = [one.response for one in subject.sample(4, greedy=True)]
    stop = whole[0].output_tokens[5]
    with subject.client() as engine:
        cut = subject.complete(engine, requests(4, 32, greedy=True, stop_token_ids=[stop]))
    for before, after in zip(whole, cut):
        tokens = before.output_tokens
        expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert after.output_tokens == expected, f"expected {expected}: got {after.output_tokens}"
        assert after.stop_reason == ("stop" if stop in tokens else "length")
    return "included"


def stop_strings(subject: Subject) -> str:
    """A stop string ends a completion with the token that completes it."""
    tokenizer = AutoTokenizer.from_pretrained(subject.laboratory.models["first"])
    whole = [one.response for one in subject.sample(16, greedy=True)]
    texts = [[tokenizer.decode(one.output_tokens[:end]) for end in range(33)] for one in whole]
    index, end = next(
        (index, end)
        for index, text in enumerate(texts)
        for end in range(4, 32)
        if (last := text[end][-2:]).isascii() and last.isprintable() and text[end].find(last) == len(text[end - 2])
    )
    stop = texts[index][end][-2:]
    with subject.client() as engine:
        cut = subject.complete(engine, requests(16, 32, greedy=True, stop=[stop]))
    for before, text, after in zip(whole, texts, cut):
        has_ended = stop in text[32]
        length = next((length for length in range(33) if stop in text[length]), 32)
        assert after.output_tokens == before.output_tokens[:length], (
            f"{stop!r} must end a completion after {length} tokens: got {after.output_len}"
        )
        assert after.stop_reason == ("stop" if has_ended else "length")
    return "token-exact"


def special_stop_strings(subject: Subject) -> str:
    """The text of a special token is a stop string like any other."""
    tokenizer = AutoTokenizer.from_pretrained(subject.laboratory.models["first"])
    whole = [one.response.output_tokens for one in subject.sample(64, greedy=True)]
    specials = {text: tokenizer.convert_tokens_to_ids(text) for text in (ROLES[0], ROLES[2], PAD)}
    stop, token = next(one for one in specials.items() if any(one[1] in tokens for tokens in whole))
    with subject.client() as engine:
        cut = subject.complete(engine, requests(64, 32, greedy=True, stop=[stop]))
    for before, after in zip(whole, cut):
        length = before.index(token) + 1 if token in before else 32
        assert after.output_tokens == before[:length], f"{stop} must end a completion after {length} tokens"
    return f"at {stop}"


def min_tokens(subject: Subject) -> str:
    """No stop token comes before min_new_tokens."""
    ends = end_ids(subject.laboratory.models["first"])
    stop = subject.sample(1, greedy=True)[0].response.output_tokens[2]
    banned = torch.tensor([stop, *ends])

    def expected(one: Scored) -> torch.Tensor:
        logits_TV = one.logits_TV.clone()
        logits_TV[:8, banned] = -torch.inf
        return logits_TV.log_softmax(-1)

    scored = subject.sample(8, 24, greedy=True, min_new_tokens=8, stop_token_ids=[stop])
    for one in scored:
        early = one.response.output_tokens[:8]
        assert len(early) == 8 and not set(early) & set(banned.tolist()), f"a stop token came early: got {early}"
    return _agree(scored, [expected(one) for one in scored])


def load(subject: Subject) -> str:
    """128 requests of mixed lengths at once all come back whole."""
    batch = [
        dataclasses.replace(one, gconfig=one.gconfig.new(max_new_tokens=1 + 13 * index % 48))
        for index, one in enumerate(requests(128, 1, min_new_tokens=0, greedy=True))
    ]
    started = time.monotonic()
    with subject.client() as engine:
        responses = subject.complete(engine, batch)
    wall_s = time.monotonic() - started
    lengths = [one.output_len for one in responses]
    assert lengths == [one.gconfig.max_new_tokens for one in batch], f"some are too short or too long: got {lengths}"
    assert [one.input_tokens for one in responses] == [one.input_ids for one in batch]
    _agree(subject.score(responses))
    return f"{sum(lengths) / wall_s:.0f} tokens/s"


# Bad input


def overflow(subject: Subject) -> str:
    """A prompt longer than the context is a ContextOverflowError."""
    with subject.client() as engine:
        error = _refusal(subject, engine, ModelRequest(prompt(1, CONTEXT + 50)))
    assert isinstance(error, ContextOverflowError), f"expected a ContextOverflowError: got {error!r}"
    place, _, body = str(error).partition("status 400: ")
    assert f"http://{subject.address}/" in place, f"the error must name server and endpoint: got {error}"
    assert str(CONTEXT) in body or str(CONTEXT - 1) in body, f"the error must show the body: got {error}"
    return "ContextOverflowError"


def outgrown(subject: Subject) -> str:
    """A completion that outgrows the context ends there, or is a ContextOverflowError."""
    request = ModelRequest(prompt(1, CONTEXT - 20), requests(1, 60, greedy=True)[0].gconfig)
    with subject.client() as engine:
        try:
            response = subject.complete(engine, [request])[0]
        except ContextOverflowError:
            return "ContextOverflowError"
    _agree(subject.score([response]))
    assert response.stop_reason == "length" and 18 <= response.output_len <= 20, (
        f"20 tokens fit at most: got {response.output_len} and {response.stop_reason}"
    )
    return f"cut after {response.output_len} of 20"


def bad_input(subject: Subject) -> str:
    """A token that the model does not have is refused by name, before or by the server, which stays as it was."""
    notes = []
    with subject.client() as engine:
        for request, part in (
            (ModelRequest([5, 10**6]), "1000000"),
            (ModelRequest([5, -1]), "-1"),
            (ModelRequest([]), "input_ids"),
            (ModelRequest([5], requests(1, 4, n_samples=2)[0].gconfig), "n_samples"),
        ):
            error = _refusal(subject, engine, request)
            assert part in str(error), f"the error must name {part}: got {error}"
            if isinstance(error, ServerError):
                assert f"http://{subject.address}/" in str(error) and "status 4" in str(error), f"got {error}"
            notes.append("server" if isinstance(error, ServerError) else "client")
        subject.complete(engine, requests(1, 4))
    return f"refused by {' and '.join(sorted(set(notes)))}"


# Pausing, with requests in flight


def pause_mode(mode: str) -> Callable[[Subject], str]:
    """Make the check of one pause mode."""

    def check(subject: Subject) -> str:
        if mode not in subject.program.pause_modes:
            raise NotApplicable("")
        with subject.client(pause_mode=mode, weight_update="disk") as engine:
            same = subject.score(_publish_in_flight(subject, engine, subject.history[-1], mode))
        _agree(same)
        regret = max(one.regret() for one in same)
        assert regret <= GAP, f"a continuation must be what it would have been: got a token {regret:.3g} below"
        with subject.client(pause_mode=mode, weight_update="broadcast") as engine:
            responses = _publish_in_flight(subject, engine, subject.other, mode)
        gap = _gap_by_version(subject, responses, is_stale_after=mode == "in_place")
        assert gap <= GAP, f"tokens must come from the version that they name: logprobs differ by {gap:.3g}"
        num_interrupts = sum(one.num_interrupts for one in responses)
        num_split = sum(len(set(one.output_versions)) > 1 for one in responses)
        return f"{num_split} of {len(responses)} split, {num_interrupts} interrupts"

    return check


def _publish_in_flight(subject: Subject, engine: RemoteInferenceEngine, model: str, mode: str) -> list[ModelResponse]:
    """Publish a model while requests are under way, until one of them has seen both versions."""
    batch = requests(8, 160, greedy=True)
    started = time.monotonic()
    subject.complete(engine, batch)
    whole_s = time.monotonic() - started
    length = 160 if whole_s > 2 else 400
    batch, too_early_s, too_late_s = requests(8, length, greedy=True), 0.0, whole_s
    while time.monotonic() < started + _IN_FLIGHT_S:
        flight = Flight(subject, engine, batch)
        time.sleep(delay_s := (too_early_s + too_late_s) / 2)
        was_over, version, before = flight.is_over, subject.version, subject.history[-1]
        subject.publish(engine, model)
        responses = flight.land()
        _require_complete(subject.score(responses), length)
        expected = {version} if mode == "wait" else {version, version + 1}
        for one in responses:
            assert one.output_versions == sorted(one.output_versions), "versions must not go back"
            assert set(one.output_versions) <= expected, f"versions must be in {expected}: {set(one.output_versions)}"
        if not was_over and (mode == "wait" or any(set(one.output_versions) == expected for one in responses)):
            return responses
        if was_over or any(version in one.output_versions for one in responses):
            too_late_s = delay_s
        else:
            too_early_s = delay_s
        if too_late_s - too_early_s < 0.02 * whole_s:  # the server's speed has changed meanwhile
            too_early_s, too_late_s = 0.0, whole_s
        if before != model:
            subject.publish(engine, before)
    raise AssertionError(f"a request must span versions {version} and {version + 1}: none did in {_IN_FLIGHT_S:.0f} s")


def _gap_by_version(subject: Subject, responses: Sequence[ModelResponse], *, is_stale_after: bool) -> float:
    """Return the largest gap between a token's logprob and that of the model which its version was."""
    largest = 0.0
    for response in responses:
        versions_T = torch.tensor(response.output_versions)
        logprobs_T = torch.tensor(response.output_logprobs, dtype=torch.float64)
        first = int(versions_T.min())
        for version in set(response.output_versions):
            if is_stale_after and version != first:
                continue  # on keys and values of both
            scored = subject.score([response], subject.history[version])[0]
            gap_T = (scored.of_tokens(scored.logprobs_TV()) - logprobs_T).abs()
            largest = max(largest, gap_T[versions_T == version].max().item())
    return largest


# Weights


def update_by(way: str) -> Callable[[Subject], str]:
    """Make the check of publications through the disk or by broadcast."""

    def check(subject: Subject) -> str:
        gaps = []
        for _ in range(2):
            with subject.client(weight_update=way) as engine:
                for _ in range(2):  # the second time in the same group
                    subject.publish(engine, subject.other)
                    responses = subject.complete(engine, requests(4, 24, greedy=True))
                    _agree(subject.score(responses))
                    versions = {version for one in responses for version in one.output_versions}
                    assert versions == {subject.version}, f"expected version {subject.version}: got {versions}"
                    gaps.append(engine.metrics()["policy/canary_gap"])
        return f"canary {max(gaps):.0e}"

    return check


def two_senders(subject: Subject) -> str:
    """Every second tensor comes from another sender, twice over the same groups."""
    if subject.program.name == "colocated":
        raise NotApplicable("")
    senders: Senders | None = None
    with subject.client() as engine:
        for _ in range(2):
            weights, version = _weights(subject), subject.version + 1
            meta = _broadcast_meta(subject, weights, num_senders=2)
            received = engine.update_weights(meta)
            senders = senders or Senders(meta)
            meta.transfer.fingerprints = fingerprints(weights)
            senders.send(meta, weights)
            received.result(2 * _UPDATE_S)
            engine.set_version(version)
            subject.history.append(subject.other)
            subject.num_updates += 1
            gap = _agree(subject.score(subject.complete(engine, requests(4, 24, greedy=True))))
    assert senders is not None
    senders.close()
    return gap


def adapters_by(way: str) -> Callable[[Subject], str]:
    """Make the check of publications with LoRA: the first sends all weights, others those that can change."""

    def check(subject: Subject) -> str:
        if subject.program.name == "colocated":
            raise NotApplicable("")
        laboratory, base = subject.laboratory, subject.other
        lora = LoRAConfig(rank=4, target_modules=["q_proj"], merge_on_save=True)
        actor = FSDPPPOActor(
            PPOActorConfig(
                path=str(laboratory.models[base]), dtype="float32", optimizer=OptimizerConfig(), lora=lora, seed=3
            )
        )
        actor.initialize(None, FinetuneSpec(1, 10, 1))
        sent = []
        try:
            with subject.client(weight_update=way) as engine:
                for number, name in enumerate((base, f"{way}-1", f"{way}-2")):
                    if number:
                        for one in (p for p in actor.model.parameters() if p.requires_grad):
                            one.detach().to_local().normal_(0, 0.2)
                        folder = laboratory.folder / name
                        actor.save(SaveLoadMeta(str(folder)))
                        laboratory.models[name], laboratory.references[name] = folder, Reference(folder)
                    publish_weights(actor, engine, version=subject.version + 1)
                    subject.history.append(name)
                    subject.num_updates += 1
                    gap = _agree(subject.score(subject.complete(engine, requests(4, 24, greedy=True))))
                    sent.append(engine.metrics()["weights/sent_mib"])
                is_partial = {"disk": "disk", "broadcast": "nccl"}[way] in engine._backend.takes_partial
        finally:
            actor.destroy()
        assert sent[1] == sent[2] and (sent[1] < 0.5 * sent[0]) == is_partial, f"sent {sent} MiB"
        return f"{sent[1] / sent[0]:.2f} of the bytes, {gap}"

    return check


def canary(subject: Subject) -> str:
    """A server that was given other weights than the trainer holds is found out."""
    if subject.program.name == "colocated":
        raise NotApplicable("")
    with subject.client() as engine:
        version, sent = subject.version + 1, subject.other
        engine.pause()
        meta = WeightUpdateMeta("disk", version=version, path=str(subject.laboratory.folder / "planted"))
        received = engine.update_weights(meta)
        subject.hold(sent)
        subject.laboratory.actor.upload_weights(meta)
        received.result(2 * _UPDATE_S)
        subject.hold(subject.history[-1])
        subject.history.append(sent)
        try:
            check_canary(subject.laboratory.actor, engine, version)
        except WeightUpdateError as error:
            assert subject.address in str(error), f"the error must name the server: got {error}"
        else:
            raise AssertionError("wrong weights must be found out: nothing was said")
        gap = engine.metrics()["policy/canary_gap"]
    return f"gap {gap:.2g}"


def fingerprint(subject: Subject) -> str:
    """A tensor with other bits than were sent is found out, by name."""
    if not subject.program.verifies_fingerprints:
        raise NotApplicable("")
    weights = _weights(subject)
    name = "model.layers.1.mlp.up_proj.weight"
    with subject.client() as engine:
        meta = _broadcast_meta(subject, weights)
        received = engine.update_weights(meta)
        sent = join_group(
            *meta.transfer.meeting_point,
            0,
            meta.transfer.world_size,
            meta.transfer.group_name,
            timeout_s=_UPDATE_S,
        )
        for specs in meta.nccl_param_specs:
            send_bucket(sent, [weights[spec.name] for spec in specs])
        meta.transfer.fingerprints = fingerprints(weights) | fingerprints({name: weights[name].flip(0)})
        meta.transfer.uploaded.set_result(None)
        error = _failure(received, within_s=2 * _UPDATE_S)
        close_group(sent)
    assert name in str(error), f"the error must name {name}: got {error}"
    return "names the tensor"


def dying_sender(subject: Subject) -> str:
    """The receiving half ends within its deadline when the sender dies in the middle."""
    if subject.program.name == "colocated":
        raise NotApplicable("")
    weights = _weights(subject)
    command, env = [sys.executable, "-m", "servers.dying_sender"], environment(also_tests=True)
    with (
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender,
        subject.client() as engine,
    ):
        assert sender.stdin is not None and sender.stdout is not None
        assert sender.stdout.readline() == "ready\n"  # for the receivers wait for no longer than their deadline
        meta = _broadcast_meta(subject, weights)
        received = engine.update_weights(meta)
        description = {
            "address": meta.transfer.meeting_point[0],
            "port": meta.transfer.meeting_point[1],
            "world_size": meta.transfer.world_size,
            "name": meta.transfer.group_name,
            "shapes": [spec.shape for spec in meta.nccl_param_specs[0]],
            "timeout_s": _UPDATE_S,
        }
        sender.stdin.write(json.dumps(description) + "\n")
        sender.stdin.flush()
        died = sender.wait(2 * _UPDATE_S)
        assert died == -9, f"the sender must have died of SIGKILL: got {died}"
        started = time.monotonic()
        error = _failure(received, within_s=2 * _UPDATE_S)
        wall_s = time.monotonic() - started
    assert subject.address in str(error) or "rank" in str(error), f"the error must name the server: got {error}"
    return f"after {wall_s:.1f} s"


def usable_again(subject: Subject) -> str:
    """After all of that the next publication makes the server as good as new."""
    with subject.client() as engine:
        subject.publish(engine, subject.other)
    return greedy(subject)


CHECKS = (
    Check("greedy tokens and logprobs", greedy),
    Check("sampled tokens and logprobs", sampled),
    Check("temperature", temperature, may_refuse=True),
    Check("top_k", top_k, may_refuse=True),
    Check("top_p", top_p, may_refuse=True),
    Check("min_p", min_p, may_refuse=True),
    Check("kept sets", kept_sets),
    Check("seeds", seeds, may_refuse=True),
    Check("samples of a group differ", group),
    Check("end tokens", end_tokens),
    Check("stop tokens", stop_ids),
    Check("stop strings", stop_strings, may_refuse=True),
    Check("stop strings of special tokens", special_stop_strings, may_refuse=True),
    Check("min_new_tokens", min_tokens, may_refuse=True),
    Check("load: 128 at once", load),
    Check("prompt beyond the context", overflow),
    Check("completion beyond the context", outgrown),
    Check("bad input", bad_input),
    Check("pause: abort", pause_mode("abort"), may_refuse=True),
    Check("pause: retract", pause_mode("retract"), may_refuse=True),
    Check("pause: in_place", pause_mode("in_place"), may_refuse=True, is_in_place=True),
    Check("pause: wait", pause_mode("wait"), may_refuse=True),
    Check("weights through the disk", update_by("disk")),
    Check("weights by broadcast", update_by("broadcast")),
    Check("weights by broadcast from two", two_senders),
    Check("adapters through the disk", adapters_by("disk")),
    Check("adapters by broadcast", adapters_by("broadcast")),
    Check("canary finds wrong weights", canary),
    Check("fingerprint finds a wrong tensor", fingerprint),
    Check("sender dies in a broadcast", dying_sender),
    Check("usable afterwards", usable_again),
)


def _require_complete(scored: Sequence[Scored], length: int) -> None:
    lengths = {one.response.output_len for one in scored}
    assert lengths == {length}, f"every completion must have {length} tokens: got {sorted(lengths)}"


def _agree(scored: Sequence[Scored], expected: Sequence[torch.Tensor] | None = None) -> str:
    """Hold every logprob against the reference."""
    pairs = zip(scored, expected or [one.logprobs_TV() for one in scored])
    gap = max(one.gap(logprobs_TV) for one, logprobs_TV in pairs)
    assert gap <= GAP, f"logprobs must be the reference's within {GAP:g}: they differ by {gap:.3g}"
    return f"gap {gap:.0e}"


def _follows(subject: Subject, expected: Callable[[Scored], torch.Tensor], **sampling: float) -> str:
    """Hold sampled tokens and their logprobs against a distribution.

    The surprise, minus the sum of logprobs, of tokens that are drawn from it has the entropies' sum as its mean.
    """
    scored = subject.sample(64, **sampling)
    distributions = [expected(one) for one in scored]
    surprise = variance = 0.0
    for one, logprobs_TV in zip(scored, distributions):
        finite_TV = logprobs_TV.clamp_min(-1e4)
        entropy_T = -(finite_TV.exp() * finite_TV).sum(-1)
        variance += ((finite_TV.exp() * finite_TV**2).sum(-1) - entropy_T**2).sum().item()
        surprise += (-one.of_tokens(logprobs_TV) - entropy_T).sum().item()
    z = surprise / variance**0.5
    assert abs(z) <= MAX_Z, f"tokens must follow the distribution: their surprise is {z:.1f} standard deviations off"
    return f"{_agree(scored, distributions)}, z {z:.1f}"


def _refusal(subject: Subject, engine: RemoteInferenceEngine, request: ModelRequest) -> Exception:
    """Return the error of a request that our client or the server must refuse."""
    try:
        responses = subject.complete(engine, [request])
    except (ServerError, ValueError) as error:
        return error
    raise AssertionError(f"the request must be refused: got {responses}")


def _weights(subject: Subject) -> dict[str, torch.Tensor]:
    """Return the weights that the server does not hold."""
    return load_file(Path(subject.laboratory.models[subject.other]) / "model.safetensors")


def _broadcast_meta(subject: Subject, weights: dict[str, torch.Tensor], num_senders: int = 1) -> WeightUpdateMeta:
    """Describe an update with one bucket for as many tensors as there are senders."""
    shapes = enumerate((name, tuple(one.shape)) for name, one in weights.items())
    specs = [ParamSpec(name, shape, "float32", owner=index % num_senders) for index, (name, shape) in shapes]
    buckets = [specs[i : i + num_senders] for i in range(0, len(specs), num_senders)]
    return WeightUpdateMeta("nccl", version=subject.version + 1, nccl_param_specs=buckets, timeout_s=_UPDATE_S)


def _failure(received: Future[None], *, within_s: float) -> WeightUpdateError:
    """Return the error of an update that must fail."""
    try:
        received.result(within_s)
    except WeightUpdateError as error:
        return error
    raise AssertionError("the update must fail: it did not")
