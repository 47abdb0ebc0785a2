from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file
from testing_lite import logprobs_by, slow_down
from testing_ports import held_port
from tiny_models import EOS, VOCAB_SIZE, build, config, save_qwen3, tokenizer
from transformers import PreTrainedModel

from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner
from arealite.server.app import Server
from arealite.utils.fingerprint import fingerprints
from arealite.utils.hf import load_causal_lm
from arealite.utils.weight_transfer import close_group, join_group, send_bucket

Reply = tuple[int, dict[str, Any]]
GROUP = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2, "group_name": "g", "backend": "gloo"}
"""A trainer's rank and this server's."""


class Client:
    """A server in this process, on a real port, and a session to it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, engine: GenerationEngine, server: Server) -> None:
        self.server = server
        self.url = url
        self.session = session
        self.engine = engine

    async def post(
        self, path: str, body: object = None, *, raw: bytes | None = None, encoding: str = "identity"
    ) -> Reply:
        in_json = {"Content-Type": "application/json", "Content-Encoding": encoding}
        kwargs: dict[str, Any] = (
            {"data": raw, "headers": in_json} if raw is not None else {"json": {} if body is None else body}
        )
        async with self.session.post(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Reply:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def generate(self, input_ids: list[int], **params: object) -> dict[str, Any]:
        body = {"input_ids": input_ids, "return_logprob": True, "sampling_params": {"ignore_eos": True, **params}}
        status, reply = await self.post("/generate", body)
        assert status == 200, reply
        return reply

    async def wait_for_tokens(self, count: int) -> None:
        """Return once that many tokens were generated; from now on each takes so long that a test can act meanwhile."""
        slow_down(self.engine._runner.model)
        async with asyncio.timeout(120):
            while (await self.get("/server_info"))[1]["generated_tokens"] < count:
                await asyncio.sleep(0)


@pytest.fixture
async def client(model_path: str) -> AsyncIterator[Client]:
    runner = ModelRunner(load_causal_lm(model_path, dtype=torch.float32), slots=4, context=256)
    engine = GenerationEngine(runner, eos_ids=frozenset({EOS}), tokenizer=tokenizer())
    server = Server(engine, model_path=model_path)
    web_runner = web.AppRunner(server.app, handler_cancellation=True, shutdown_timeout=1)
    await web_runner.setup()
    await web.TCPSite(web_runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        yield Client(f"http://127.0.0.1:{web_runner.addresses[0][1]}", session, engine, server)
    await asyncio.to_thread(engine.close)
    await web_runner.cleanup()


def server_logprobs(reply: dict[str, Any]) -> list[float]:
    entries = reply["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == reply["output_ids"]
    assert all(entry[2] is None for entry in entries)
    return [entry[0] for entry in entries]


def check_logprobs(model: PreTrainedModel, prompt: list[int], reply: dict[str, Any]) -> None:
    expected = logprobs_by(model, prompt, reply["output_ids"]).tolist()
    assert server_logprobs(reply) == pytest.approx(expected, abs=1e-4)


async def test_a_reply_has_sglangs_shape_and_the_models_logprobs(client: Client, reference: PreTrainedModel) -> None:
    prompt = [5, 6, 7]
    body = {
        "input_ids": prompt,
        "return_logprob": True,
        "rid": "mine",
        "sampling_params": {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 3},
    }
    status, reply = await client.post("/generate", body)
    assert status == 200
    check_logprobs(reference, prompt, reply)
    meta = reply["meta_info"]
    meta.pop("output_token_logprobs")
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 20},
        "prompt_tokens": 3,
        "completion_tokens": 20,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": 20}],
        "stale_kv_tokens": 0,
    }


async def test_narrowed_sampling_returns_what_it_sampled_from(client: Client, reference: PreTrainedModel) -> None:
    prompt, params = [5, 6, 7], {"top_p": 0.9, "top_k": 12, "max_new_tokens": 40, "sampling_seed": 3}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    plain, masked = [
        (await client.post("/generate", body | {"return_sampling_mask": wanted}))[1] for wanted in (False, True)
    ]
    assert plain["output_ids"] == masked["output_ids"] and "output_token_sampling_mask" not in plain["meta_info"]
    kept = masked["meta_info"]["output_token_sampling_mask"]
    assert masked["meta_info"]["output_token_sampling_logprobs"] == server_logprobs(masked) == server_logprobs(plain)
    with torch.no_grad():
        logits_TV = reference(torch.tensor([prompt + masked["output_ids"]])).logits[0, len(prompt) - 1 : -1]
    masses = []
    for probs_V, ids, token, logprob in zip(
        logits_TV.double().softmax(-1), kept, masked["output_ids"], server_logprobs(masked), strict=True
    ):
        order = probs_V.argsort(descending=True).tolist()
        nucleus = [id for rank, id in enumerate(order) if rank < 12 and probs_V[order[:rank]].sum() < 0.9]
        assert ids == sorted(nucleus) and token in ids
        masses.append(probs_V[ids].sum().item())
        assert logprob == pytest.approx((probs_V[token] / masses[-1]).log().item(), abs=1e-4)
    assert min(masses) < 0.9, "top_k has cut some"


async def test_greedy_equals_hugging_face(client: Client, reference: PreTrainedModel) -> None:
    prompt = [9, 8, 7]
    reply = await client.generate(prompt, temperature=0.0, max_new_tokens=24)
    expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, min_new_tokens=24)
    assert EOS not in expected[0]  # which min_new_tokens would have banned
    assert reply["output_ids"] == expected[0, 3:].tolist()


async def test_stop_strings_and_stop_tokens_stay_in_the_ids(client: Client) -> None:
    free = (await client.generate([5], max_new_tokens=80, sampling_seed=1))["output_ids"]
    text = tokenizer().decode(free, skip_special_tokens=False)[30:33]
    assert "<" not in text and ">" not in text
    token = next(token for token in free[5:] if 2 <= token < 28)
    for stop, matched in (({"stop": [text, "0"]}, text), ({"stop_token_ids": [token]}, token)):
        reply = await client.generate([5], max_new_tokens=80, sampling_seed=1, **stop)
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        assert reply["output_ids"] == free[: len(reply["output_ids"])]
        ends = tokenizer().decode(reply["output_ids"], skip_special_tokens=False), reply["output_ids"][-1]
        assert matched in ends[0] if isinstance(matched, str) else matched == ends[1]


async def test_requests_without_a_seed_differ(client: Client) -> None:
    replies = await asyncio.gather(*(client.generate([5], max_new_tokens=30) for _ in range(4)))
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 4


BAD_REQUESTS: list[tuple[object, str]] = [
    ({}, "input_ids: Field required"),
    ({"input_ids": [5], "text": "a"}, "text: Extra inputs are not permitted"),
    ({"input_ids": []}, "1 to 255 tokens: got 0"),
    ({"input_ids": [5] * 256}, "got 256"),
    ({"input_ids": [VOCAB_SIZE]}, f"got {VOCAB_SIZE}"),
    ({"input_ids": [-1]}, "got -1"),
    ({"input_ids": ["5"]}, "input_ids.0"),
    ([1, 2], "should be an object"),
    ({"input_ids": [5], "image_data": ["x"]}, "image_data must be left out: got images for a model"),
    ({"input_ids": [5], "stream": True}, "stream: Input should be False"),
    ({"input_ids": [5], "sampling_params": {"beam_width": 3}}, "sampling_params.beam_width"),
    ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"input_ids": [5], "sampling_params": {"top_k": 0}}, "top_k"),
    ({"input_ids": [5], "sampling_params": {"min_p": 1.1}}, "min_p"),
    ({"input_ids": [5], "return_sampling_mask": True, "sampling_params": {"top_p": 0.9}}, "must have a top_k"),
    ({"input_ids": [5], "return_sampling_mask": True, "sampling_params": {"top_k": 2, "temperature": 0.0}}, "above 0"),
    ({"input_ids": [5], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"input_ids": [5], "sampling_params": {"max_new_tokens": 3, "min_new_tokens": 4}}, "min_new_tokens"),
    ({"input_ids": [5], "sampling_params": {"frequency_penalty": 0.5}}, "frequency_penalty"),
    ({"input_ids": [5], "sampling_params": {"n": 2}}, "sampling_params.n"),
    ({"input_ids": [5], "sampling_params": {"stop": [""]}}, "stop"),
    ({"input_ids": [5], "sampling_params": {"stop_token_ids": [VOCAB_SIZE]}}, f"got {VOCAB_SIZE}"),
    ({"input_ids": [5], "rid": "\udfff"}, "Invalid JSON"),
]
NESTED = (b"[" * 100_000, b'{"rid":' * 100_000, b'{"input_ids": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


async def test_bad_requests_are_refused_and_harm_nobody(client: Client) -> None:
    alone = await client.generate([5, 6], max_new_tokens=120, sampling_seed=2)
    victim = asyncio.create_task(client.generate([5, 6], max_new_tokens=120, sampling_seed=2))
    for body, message in BAD_REQUESTS:
        status, reply = await client.post("/generate", body)
        assert status == 400, body
        assert message in reply["error"]["message"], reply
    for raw in (b"{", b"\xff\xfe", b"null", b'{"input_ids": [5], "sampling_params": {"temperature": NaN}}', *NESTED):
        status, reply = await client.post("/generate", raw=raw)
        assert status == 400 and reply["error"]["message"]
    assert (await client.post("/generate", raw=b"{}", encoding="gzip"))[0] == 400
    assert (await client.get("/generate"))[0] == 405
    assert (await client.get("/nowhere"))[0] == 404
    assert (await victim)["output_ids"] == alone["output_ids"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json", "Origin": "http://evil.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
    ],
)
async def test_web_pages_can_not_use_a_server_without_a_secret(
    client: Client, headers: dict[str, str], status: int
) -> None:
    """What a page of another site may send without asking first."""
    async with client.session.post(f"{client.url}/pause_generation", data=b"{}", headers=headers) as response:
        assert response.status == status
    assert not (await client.get("/server_info"))[1]["is_paused"]


async def test_pause_abort_and_continue(client: Client) -> None:
    running = [asyncio.create_task(client.generate([5], max_new_tokens=250, sampling_seed=i)) for i in range(6)]
    await client.wait_for_tokens(40)
    assert (await client.post("/pause_generation", {"mode": "abort"}))[0] == 200
    replies = await asyncio.gather(*running)
    reasons = [reply["meta_info"]["finish_reason"] for reply in replies]
    assert {reason["type"] for reason in reasons} == {"abort"}
    unstarted = [reply for reply in replies if not reply["output_ids"]]
    assert len(unstarted) == 2
    assert all(one["meta_info"]["finish_reason"]["message"] == "Abort before prefill" for one in unstarted)
    held = asyncio.create_task(client.generate([5], max_new_tokens=5, sampling_seed=0))
    async with asyncio.timeout(120):
        while not (await client.get("/server_info"))[1]["waiting"]:
            await asyncio.sleep(0)
    assert (await client.post("/continue_generation"))[0] == 200
    assert (await held)["output_ids"] == replies[0]["output_ids"][:5]
    assert (await client.post("/pause_generation", {"mode": "sideways"}))[0] == 400


async def test_bodyless_posts_of_older_clients_work(client: Client) -> None:
    assert (await client.post("/pause_generation", raw=b""))[0] == 200
    assert (await client.post("/continue_generation", raw=b""))[0] == 200


async def test_a_client_that_leaves_frees_its_slot(client: Client) -> None:
    gone = [asyncio.create_task(client.generate([5], max_new_tokens=250)) for _ in range(4)]
    await client.wait_for_tokens(8)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    async with asyncio.timeout(120):
        while (await client.get("/server_info"))[1]["running"]:
            await asyncio.sleep(0)
    assert (await client.get("/server_info"))[1]["generated_tokens"] < 1000


async def test_information(client: Client, model_path: str) -> None:
    assert await client.get("/health") == (200, {"status": "ok"})
    told = (await client.get("/get_model_info"))[1]
    assert (told["model_path"], told["weight_version"], told["slots"]) == (model_path, "0", 4)
    info = (await client.get("/server_info"))[1]
    assert (info["running"], info["waiting"], info["slots"]) == (0, 0, 4)


async def test_what_is_only_staged_is_served_from_the_next_end_on(client: Client, tmp_path: Path) -> None:
    body = {"model_path": save_qwen3(tmp_path / "new", seed=5), "weight_version": "1", "only_stage": True}
    before = await client.generate([5, 6], max_new_tokens=30, sampling_seed=0)
    assert (await client.post("/update_weights_from_disk", body))[0] == 200
    assert (await client.post("/end_weight_update", {"only_stage": True}))[0] == 200  # as after a broadcast
    meanwhile = await client.generate([5, 6], max_new_tokens=30, sampling_seed=0)
    assert meanwhile["output_ids"] == before["output_ids"] and meanwhile["meta_info"]["weight_version"] == "0"
    assert (await client.post("/end_weight_update"))[0] == 200
    reply = await client.generate([5, 6], max_new_tokens=30, sampling_seed=0)
    assert reply["meta_info"]["weight_version"] == "1"
    check_logprobs(build(config(), seed=5), [5, 6], reply)
    assert (await client.post("/end_weight_update"))[0] == 400, "it is used once"


async def test_a_partial_update_keeps_what_updates_have_brought(client: Client, tmp_path: Path) -> None:
    """Its fingerprints are of all weights."""
    old, new = ({name: p.detach() for name, p in build(config(), seed=seed).named_parameters()} for seed in (5, 6))
    mixed = old | {name: new[name] for name in list(new)[:3]}
    for name, weights in {"old": old, "part": {name: new[name] for name in list(new)[:3]}}.items():
        (tmp_path / name).mkdir()
        save_file(weights, tmp_path / name / "model.safetensors")
    part = {"model_path": str(tmp_path / "part"), "is_partial": True, "fingerprints": fingerprints(mixed)}
    status, reply = await client.post("/update_weights_from_disk", part)
    assert status == 400 and "a partial update must follow a whole one" in reply["error"]["message"]
    whole = {"model_path": str(tmp_path / "old"), "fingerprints": fingerprints(old)}
    assert (await client.post("/update_weights_from_disk", whole))[0] == 200
    status, reply = await client.post("/update_weights_from_disk", part | {"fingerprints": fingerprints(new)})
    num_kept = sum(not torch.equal(mixed[name], one) for name, one in new.items())
    assert status == 409 and f"got {num_kept} of {len(new)} with other" in reply["error"]["message"]
    assert (await client.post("/update_weights_from_disk", part | {"is_partial": False}))[0] == 409
    assert (await client.post("/update_weights_from_disk", part | {"only_stage": True}))[0] == 200
    assert (await client.post("/end_weight_update"))[0] == 200
    reply = await client.generate([5, 6], max_new_tokens=30)
    model = build(config(), seed=5)
    model.load_state_dict(mixed, strict=False)
    check_logprobs(model, [5, 6], reply)
    assert (await client.post("/update_weights_from_disk", part | {"fingerprints": None, "is_partial": False}))[
        0
    ] == 400


async def test_a_checkpoint_that_does_not_fit_keeps_the_old_weights(client: Client, tmp_path: Path) -> None:
    build(config(intermediate_size=65), seed=5).save_pretrained(tmp_path / "wider")
    build(config(num_hidden_layers=1), seed=5).save_pretrained(tmp_path / "shallower")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    before = await client.generate([5, 6], max_new_tokens=20, sampling_seed=0)
    reasons = {"wider": "shape of", "shallower": "missing", "torn": "model.safetensors", "absent": "safetensors"}
    for name, reason in reasons.items():
        body = {"model_path": str(tmp_path / name), "weight_version": "1"}
        status, reply = await client.post("/update_weights_from_disk", body)
        assert status == 400 and reason in reply["error"]["message"], reply
    assert (await client.generate([5, 6], max_new_tokens=20, sampling_seed=0))["output_ids"] == before["output_ids"]
    assert (await client.get("/get_model_info"))[1]["weight_version"] == "0"


class Trainer:
    """The sending half, as a trainer does it: joins and sends in a thread while the server is asked to."""

    def __init__(self, client: Client, name: str, seed: int) -> None:
        self.client = client
        self.name = name
        self.weights = {name: p.detach() for name, p in build(config(), seed=seed).named_parameters()}
        self.port = held_port()

    async def join(self, timeout_s: float = 120.0) -> None:
        body = GROUP | {"master_port": str(self.port), "group_name": self.name, "timeout_s": timeout_s}
        joining = asyncio.to_thread(join_group, "127.0.0.1", self.port, 0, 2, self.name, timeout_s=timeout_s)
        self.group, (status, reply) = await asyncio.gather(
            joining, self.client.post("/init_weights_update_group", body)
        )
        assert (status, reply["success"]) == (200, True), reply

    def bucket(self, names: list[str], **changes: object) -> dict[str, object]:
        return {
            "names": names,
            "dtypes": ["float32"] * len(names),
            "shapes": [list(self.weights[name].shape) for name in names],
            "group_name": self.name,
            **changes,
        }

    async def send(self, names: list[str], **changes: object) -> Reply:
        sending = asyncio.to_thread(send_bucket, self.group, [self.weights[name] for name in names])
        asking = self.client.post("/update_weights_from_distributed", self.bucket(names, **changes))
        _, reply = await asyncio.gather(sending, asking)
        return reply


async def test_update_by_broadcast_again_and_again(client: Client) -> None:
    for round_number in range(2):
        trainer = Trainer(client, f"group-{round_number}", seed=10 + round_number)
        await trainer.join()
        names = list(trainer.weights)
        for half in range(2):
            version = str(2 * round_number + half + 1)
            assert (await client.post("/begin_weight_update", {}))[0] == 200
            assert (await trainer.send(names[:9]))[0] == 200
            assert (await client.get("/get_model_info"))[1]["weight_version"] != version
            assert (await trainer.send(names[9:], weight_version=version))[0] == 200
            assert (await client.post("/end_weight_update"))[0] == 200
            assert (await client.get("/get_model_info"))[1]["weight_version"] == version
        reply = await client.generate([5, 6], max_new_tokens=30)
        check_logprobs(build(config(), seed=10 + round_number), [5, 6], reply)
        assert (await client.post("/destroy_weights_update_group", {"group_name": trainer.name}))[0] == 200
        close_group(trainer.group)


async def test_one_call_takes_several_buckets(client: Client) -> None:
    trainer = Trainer(client, "g", seed=5)
    await trainer.join()
    names = list(trainer.weights)
    wrong = trainer.bucket(names, bucket_sizes=[9])
    status, reply = await client.post("/update_weights_from_distributed", wrong)
    assert status == 400 and f"must add up to the {len(names)} tensors: got [9]" in reply["error"]["message"]
    await client.post("/begin_weight_update")
    body = trainer.bucket(names, bucket_sizes=[9, len(names) - 9], weight_version="7")
    receiving = asyncio.create_task(client.post("/update_weights_from_distributed", body))
    for part in (names[:9], names[9:]):
        assert not receiving.done()
        await asyncio.to_thread(send_bucket, trainer.group, [trainer.weights[name] for name in part])
    assert (await receiving)[0] == 200 and (await client.post("/end_weight_update"))[0] == 200
    check_logprobs(build(config(), seed=5), [5, 6], await client.generate([5, 6], max_new_tokens=30))
    close_group(trainer.group)


async def test_an_unfinished_update_changes_nothing(client: Client) -> None:
    trainer = Trainer(client, "g", seed=5)
    await trainer.join()
    before = await client.generate([5, 6], max_new_tokens=30, sampling_seed=0)
    await client.post("/begin_weight_update")
    await trainer.send(list(trainer.weights)[:9], weight_version="1")
    during = await client.generate([5, 6], max_new_tokens=30, sampling_seed=0)
    status, reply = await client.post("/end_weight_update")
    assert status == 400 and "missing" in reply["error"]["message"]
    after = await client.generate([5, 6], max_new_tokens=30, sampling_seed=0)
    assert before["output_ids"] == during["output_ids"] == after["output_ids"]
    assert after["meta_info"]["weight_version"] == "0"
    close_group(trainer.group)


@pytest.mark.parametrize("reason", ["no begin", "unknown name", "wrong shape"])
async def test_a_refused_bucket_ends_the_senders_wait_at_once(client: Client, reason: str) -> None:
    trainer = Trainer(client, "g", seed=5)
    await trainer.join()
    name = "model.embed_tokens.weight"
    trainer.weights["big"] = torch.zeros(30_000_000)  # more than the buffers of a socket take
    body = trainer.bucket([name])
    if reason != "no begin":
        await client.post("/begin_weight_update")
    if reason == "unknown name":
        body["names"] = ["no.such.weight"]
    if reason == "wrong shape":
        body["shapes"] = [[3, 3]]
    failed = threading.Event()

    def send() -> None:
        with pytest.raises(ConnectionError, match="broadcast in 'g' must finish"):
            send_bucket(trainer.group, [trainer.weights["big"]])
        failed.set()

    sending = asyncio.create_task(asyncio.to_thread(send))
    status, reply = await client.post("/update_weights_from_distributed", body)
    assert status == 400, reply
    await asyncio.wait_for(sending, 120)
    assert failed.is_set()
    close_group(trainer.group)


async def test_a_sender_that_leaves_is_an_error_and_the_old_weights_stay(client: Client) -> None:
    trainer = Trainer(client, "g", seed=5)
    await trainer.join()
    before = await client.generate([5, 6], max_new_tokens=30, sampling_seed=0)
    await client.post("/begin_weight_update")
    receiving = asyncio.create_task(
        client.post("/update_weights_from_distributed", trainer.bucket(list(trainer.weights)))
    )
    await asyncio.sleep(0.5)
    close_group(trainer.group)
    status, reply = await asyncio.wait_for(receiving, 120)
    assert status == 400 and "Connection closed by peer" in reply["error"]["message"]
    assert (await client.post("/end_weight_update"))[0] == 400
    after = await client.generate([5, 6], max_new_tokens=30, sampling_seed=0)
    assert after["output_ids"] == before["output_ids"]


async def test_joining_nobody_ends_at_the_deadline(client: Client) -> None:
    body = GROUP | {"master_port": held_port(), "timeout_s": 1.0}
    status, reply = await asyncio.wait_for(client.post("/init_weights_update_group", body), 120)
    assert status == 400 and "must form within 1 s" in reply["error"]["message"]
    assert (await client.get("/health"))[0] == 200


async def test_a_group_that_does_not_form_keeps_nobody_waiting(client: Client) -> None:
    port = held_port()
    place = GROUP | {"master_port": port}
    joining = asyncio.create_task(client.post("/init_weights_update_group", place))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(60):
        assert (await client.post("/begin_weight_update"))[0] == 200
        assert (await client.generate([5, 6], max_new_tokens=2))["output_ids"]
    assert not joining.done()
    group = await asyncio.to_thread(join_group, "127.0.0.1", port, 0, 2, "g")
    assert (await joining)[0] == 200
    close_group(group)  # not before: this end may have formed while the other connects
    status, reply = await client.post("/init_weights_update_group", place)
    assert status == 400 and "group_name must be new" in reply["message"]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("master_address", ("", "a" * 256, "../..", "a b")),
        ("world_size", (1, 2**31)),
        ("timeout_s", (1e300, 1e9, 0, -1)),
    ],
)
async def test_a_group_that_can_not_form_is_refused(client: Client, key: str, values: tuple[object, ...]) -> None:
    for value in values:
        body = GROUP | {"master_port": 1, "timeout_s": 0.1, key: value}
        status, reply = await client.post("/init_weights_update_group", body)
        assert status == 400 and reply["message"].startswith(f"{key}: "), value
