"""The server of `arealite tinker`, with the official SDK and the recipes of tinker-cookbook, unmodified."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import tinker
import torch
from harness.processes import environment
from testing_ports import held_port
from testing_processes import spawn
from testing_quickstart import write_tiny_model
from tinker import types
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

COOKBOOK = os.environ.get("TINKER_PYTHON", str(Path(__file__).parents[2] / ".venv-tinker" / "bin" / "python"))
MODEL = "Qwen/Qwen3-8B-Base"  # the recipes choose a format of conversations by the name of the model, here a folder
START_S = 120.0
QUESTION = "{} + {} = ? Provide a numerical answer without units, written inside \\boxed{{}}."
TOKENS = [5, 6, 7, 8, 9, 10]
WITHOUT_NETWORK = {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


class Server:
    """`arealite tinker`, and a client of its own."""

    def __init__(self, folder: Path, *keys: str) -> None:
        self.folder, self._keys, self.port = folder, keys, held_port()
        self.run_folder = folder / "runs" / "tinker" / "trial0"

    def start(self) -> Server:
        words = ["tinker", "--model", MODEL, "--port", str(self.port), *self._keys]
        self.log = open(self.folder / "server.log", "ab")  # noqa: SIM115  # closed with the server
        command = [sys.executable, "-m", "arealite.cli.main", *words]
        env = environment() | WITHOUT_NETWORK
        (self.run_folder / "tinker.env").unlink(missing_ok=True)
        self.process = spawn(command, cwd=self.folder, env=env, stdout=self.log, stderr=self.log)
        end = time.monotonic() + START_S
        while not (self.run_folder / "tinker.env").exists():
            assert self.process.poll() is None and time.monotonic() < end, self.told()
            time.sleep(0.1)
        words = (self.run_folder / "tinker.env").read_text().split()[1:]
        self.env = dict(word.split("=") for word in words)
        self.address, self.key = self.env["TINKER_BASE_URL"], self.env["TINKER_API_KEY"]
        self.service = tinker.ServiceClient(base_url=self.address, api_key=self.key)
        return self

    def told(self) -> str:
        return (self.folder / "server.log").read_text()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.log.close()

    def model(self, rank: int = 8, seed: int = 1) -> Any:
        return self.service.create_lora_training_client(base_model=MODEL, rank=rank, seed=seed).result()

    def ask(self, path: str, body: Any = None, *, key: str | None = None, **options: Any) -> requests.Response:
        headers = {"X-API-Key": self.key if key is None else key} | options.pop("headers", {})
        address = f"{self.address}/api/v1/{path}"
        return requests.post(address, json=body, headers=headers, timeout=60, **options)

    def recipe(self, name: str, log: str, *keys: str) -> list[dict[str, Any]]:
        """Run a recipe of the cookbook and return its metrics."""
        command = [COOKBOOK, "-W", "ignore", "-m", f"tinker_cookbook.recipes.{name}", f"model_name={MODEL}"]
        command += [f"log_path={self.folder / log}", *keys]
        env = os.environ | WITHOUT_NETWORK | self.env | {"HF_DATASETS_CACHE": str(self.folder / "cache")}
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        # Not by its exit status: a daemon thread of the SDK may abort the interpreter that ends (seen on busy cores).
        ended = "Training completed successfully" in done.stderr
        assert ended, f"{done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}{self.told()[-3000:]}"
        return [json.loads(line) for line in (self.folder / log / "metrics.jsonl").read_text().splitlines()]


def write_base(folder: Path) -> None:
    """Train a tiny model to answer questions in the recipes' format with any digit."""
    write_tiny_model(out=folder, corpus=None, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)), random.Random(0)
    digit = lambda: draw.randrange(10)  # noqa: E731
    for _ in range(100):
        texts = [
            f"User: {QUESTION.format(digit(), digit())}\n\nAssistant: \\boxed{{{digit()}}}\n\nUser:" for _ in range(16)
        ]
        ids = torch.tensor([tokenizer.encode(text) for text in texts])
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        optimizer.zero_grad()
        (-logprobs[:, -17:].mean()).backward()
        optimizer.step()
    model.save_pretrained(folder)


def write_data(folder: Path) -> None:
    """Write conversations whose answer is 3 or 7, and problems whose answer is 7."""
    draw, problems = random.Random(0), folder / "openai" / "gsm8k"
    (problems / "main").mkdir(parents=True)
    with open(folder / "conversations.jsonl", "w") as file:
        for _ in range(320):
            question = QUESTION.format(draw.randrange(10), draw.randrange(10))
            turns = [("user", question), ("assistant", f"\\boxed{{{draw.choice([3, 7])}}}")]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    for split, count in (("train", 256), ("test", 8)):
        with open(problems / "main" / f"{split}.jsonl", "w") as file:
            for _ in range(count):
                question = f"{draw.randrange(10)} + {draw.randrange(10)} = ?"
                file.write(json.dumps({"question": question, "answer": "#### 7"}) + "\n")
    files = "".join(f"  - {{split: {split}, path: main/{split}.jsonl}}\n" for split in ("train", "test"))
    (problems / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinker")
    write_base(folder / MODEL)
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    started = Server(folder).start()
    yield started
    started.stop()
    assert "Traceback" not in started.told()


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> types.Datum:
    given = inputs if inputs else {"weights": [1.0] * (len(tokens) - 1)}
    ids = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=ids, loss_fn_inputs={"target_tokens": tokens[1:], **given})


def loss_of(model: Any, **inputs: Any) -> float:
    return model.forward([datum(**inputs)], "cross_entropy").result().metrics["loss:sum"]


def step(model: Any, lr: float = 0.01) -> None:
    """Send a backward pass and a step without waiting between."""
    backward = model.forward_backward([datum()], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=lr)).result()
    backward.result()


def prompt_logprobs(sampler: Any, tokens: list[int] = TOKENS) -> list[float]:
    first, *others = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert first is None
    return others


def sampled(sampler: Any, num: int = 4, **params: Any) -> Any:
    given = types.SamplingParams(**({"max_tokens": 8} | params))
    prompt = types.ModelInput.from_ints(TOKENS[:3])
    return sampler.sample(prompt=prompt, num_samples=num, sampling_params=given).result()


def test_samples_have_the_logprobs_of_the_trainer(server: Server) -> None:
    """Of two models in turn, each with its own weights, and of the base."""
    models = [server.model(seed=seed) for seed in (1, 2)]
    for model in models:
        step(model, lr=0.01 if model is models[0] else 0.02)
    samplers = [model.save_weights_and_get_sampling_client().result() for model in models]
    base = server.service.create_sampling_client(base_model=MODEL).result()
    largest = 0.0
    for sampler, trainer in zip([*samplers, base, *samplers], [*models, server.model(), *models], strict=True):
        for sequence in sampled(sampler).sequences:
            whole = [*TOKENS[:3], *sequence.tokens]
            given = {"weights": [1.0] * (len(whole) - 1)}
            output = trainer.forward([datum(whole, **given)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
            gaps = [abs(a - b) for a, b in zip(sequence.logprobs, output.data[2:], strict=True)]
            largest = max(largest, *gaps)
    assert largest < 1e-4, largest
    print(f"largest gap of a token's logprob, sampler to trainer: {largest:.2g}")
    assert prompt_logprobs(samplers[0]) != pytest.approx(prompt_logprobs(samplers[1]), abs=1e-3)


def test_seeds_and_stops(server: Server) -> None:
    base = server.service.create_sampling_client(base_model=MODEL).result()
    once, again, other = (sampled(base, seed=seed) for seed in (7, 7, 8))
    tokens = [[list(one.tokens) for one in answer.sequences] for answer in (once, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    tokenizer = AutoTokenizer.from_pretrained(server.folder / MODEL)
    prompt = types.ModelInput.from_ints(tokenizer.encode(f"User: {QUESTION.format(1, 2)}\n\nAssistant:"))
    params = types.SamplingParams(max_tokens=40, temperature=0.3, stop=["\n\nUser:"])
    answers = base.sample(prompt=prompt, num_samples=8, sampling_params=params).result().sequences
    ends = [tokenizer.decode(one.tokens).endswith("\n\nUser:") for one in answers if one.stop_reason == "stop"]
    assert ends and all(ends)


def test_losses_of_the_server_and_of_the_client_are_one(server: Server) -> None:
    ours, theirs = server.model(seed=5), server.model(seed=5)
    ratio = {"logprobs": [-5.0, -6.0, -5.5, -7.0, -6.5], "advantages": [1.0, -1.0, 0.5, 2.0, -0.5]}

    def loss(data: Any, logprobs: Any) -> Any:
        total = -((logprobs[0] - torch.tensor(ratio["logprobs"])).exp() * torch.tensor(ratio["advantages"])).sum()
        return total, {"mine": total.item()}

    for _ in range(3):
        ours.forward_backward([datum(**ratio)], "importance_sampling")
        ours.optim_step(types.AdamParams(learning_rate=0.01)).result()
        by_client = theirs.forward_backward_custom([datum()], loss)
        theirs.optim_step(types.AdamParams(learning_rate=0.01)).result()
        assert by_client.result().metrics["mine"] == pytest.approx(by_client.result().metrics["loss:sum"], rel=1e-5)
    assert loss_of(ours) == pytest.approx(loss_of(theirs), rel=1e-5)


def test_checkpoints_outlive_the_server(folder: Path) -> None:
    own = folder / "own"
    own.mkdir()
    (own / "Qwen").symlink_to(folder / "Qwen")
    server = Server(own, "allocation_mode=lite.d1+d2").start()  # two ranks
    model = server.model(rank=4, seed=3)
    step(model)
    state = model.save_state("first").result().path
    weights = model.save_weights_for_sampler("first").result().path
    info = requests.post(
        f"{server.address}/api/v1/weights_info",
        json={"tinker_path": state},
        headers={"X-API-Key": server.key},
        timeout=9,
    ).json()
    assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == (MODEL, 4, True)
    step(model)
    expected = loss_of(model)
    gone = model.model_id
    server.stop()
    server.start()
    answer = server.ask("optim_step", {"model_id": gone, "seq_id": 9, "adam_params": {}})
    assert answer.status_code == 404 and "Make a model and load its last checkpoint." in answer.text
    resumed = server.service.create_training_client_from_state_with_optimizer(state).result()
    sampler = server.service.create_sampling_client(model_path=weights).result()
    by_trainer = resumed.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert prompt_logprobs(sampler) == pytest.approx(list(by_trainer), abs=1e-4)
    step(resumed)
    assert loss_of(resumed) == pytest.approx(expected, rel=1e-6)
    server.stop()
    assert "Traceback" not in server.told()


def test_a_request_that_is_sent_again_runs_once(server: Server) -> None:
    model = server.model(seed=8)
    model.forward_backward([datum()], "cross_entropy").result()
    body = {"model_id": model.model_id, "seq_id": 99, "adam_params": {"learning_rate": 0.01}}
    first, again = (server.ask("optim_step", body).json() for _ in range(2))
    assert first["request_id"] == again["request_id"]
    for _ in range(2):
        result = server.ask("retrieve_future", {"request_id": first["request_id"]}).json()
        assert math.isfinite(result["metrics"]["grad_norm"])
    saving = {"model_id": model.model_id, "seq_id": 100, "path": "once"}
    saved = server.ask("save_weights", saving).json()["request_id"]
    assert server.ask("retrieve_future", {"request_id": saved}).json()["path"].endswith("/weights/once")
    assert server.ask("save_weights", saving).json()["request_id"] == saved
    assert "path must be new: got once" in server.ask("save_weights", saving | {"seq_id": 101}).text


def test_what_a_client_is_told(server: Server) -> None:
    model = server.model()
    with pytest.raises(tinker.UnprocessableEntityError, match=r"loss_fn must be cross_entropy, .*: got gspo"):
        model.forward_backward([datum()], "gspo").result()
    with pytest.raises(tinker.UnprocessableEntityError, match="target_tokens of datum 0 must be ids below"):
        server.model().forward_backward([datum([5, 10**6])], "cross_entropy").result()
    with pytest.raises(tinker.UnprocessableEntityError, match=f"base_model must be {MODEL}, which is served here"):
        server.service.create_lora_training_client(base_model="other", rank=8).result()
    with pytest.raises(tinker.UnprocessableEntityError, match=r"rank must be 1 to 32: got 64. Start the server with"):
        server.model(rank=64)
    with pytest.raises(tinker.NotFoundError, match="must be an endpoint that AReaLite has: it is not implemented"):
        tinker.RestClient(base_url=server.address, api_key=server.key).list_sessions().result()
    wild = server.model()
    step(wild, lr=1e30)
    sampler = wild.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match=r"must give finite logits: got others. Train it again with a"):
        sampled(sampler)
    assert server.ask("create_session", {}, key="tml-wrong").status_code == 401


def test_the_cookbooks_recipes_learn(server: Server) -> None:
    """Fine-tune on answers 3 and 7; then problems whose answer is 7 raise its probability."""
    builder = "tinker_cookbook.supervised.data:FromConversationFileBuilder"
    common = ("batch_size=16", f"model_name_for_tokenizer={MODEL}", "renderer_name=role_colon", "max_length=512")
    rows = server.recipe(
        "sl_basic",
        "supervised",
        *(f"dataset_builder={builder}", f"dataset_builder.file_path={server.folder}/conversations.jsonl"),
        *(f"dataset_builder.common_config.{key}" for key in common),
        *("learning_rate=1e-3", "num_epochs=2", "lora_rank=16"),
    )
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert losses[-1] < 0.8 * losses[0], losses
    (last, *_) = [json.loads(line) for line in (server.folder / "supervised" / "checkpoints.jsonl").open()][-1:]
    dataset = "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"
    more = ("batch_size=16", "group_size=8", "convo_prefix=None", "renderer_name=role_colon")
    rows = server.recipe(
        "rl_basic",
        "reinforced",
        *(f"dataset_builder={dataset}", f"dataset_builder.model_name_for_tokenizer={MODEL}"),
        *(f"dataset_builder.{key}" for key in more),
        *("max_tokens=24", "lora_rank=16", "learning_rate=2e-3", "max_steps=12"),
        f"load_checkpoint_path={last['state_path']}",
    )
    rows = [row for row in rows if "env/all/correct" in row]
    right = [row["env/all/correct"] for row in rows]
    assert sum(right[-3:]) / 3 > sum(right[:3]) / 3 + 0.15, right
    assert max(abs(row["optim/kl_sample_train_v1"]) for row in rows) < 1e-6
