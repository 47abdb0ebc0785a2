"""The embedded server against what a user would pick in its place: same weights, same prompts, alternating in one run.

    python benchmarks/engine.py [--rounds 5] [--case equal ...] [--vllm PYTHON] [--sglang PYTHON]
        [--json] [--out FILE]

A Qwen3 of 4.9 million parameters in float32, `--threads` threads for each side, sampling with logprobs. Sides:
`generate` and `continuous` (continuous batching) of transformers in this process, and over HTTP `lite`, a real
server process, and vLLM and SGLang where the interpreters of their environments are given. `gemm` generates nothing: it
computes the matrix products alone, of all layers and the output layer, with which 64 rows decode as many tokens. What
lite reaches of that is `of_gemm_bound`; lite also prefills, so the bound can't be reached. Cases:

- equal: 64 prompts of 64 tokens, 64 sampled tokens each, so that batching itself does not matter
- exponential: 256 prompts, lengths exponential with a mean of 64, at most 256; `generate` runs static batches of 64
- shared: 128 requests in groups of 8 that share a prompt of 256 tokens
- turns: 32 conversations of 4 turns; 32 tokens are sampled, then a tool adds 32

Prints wanted tokens per second and per second of CPU time of the side's processes (on a busy machine only the latter
says something), medians over the rounds, and ratios of lite to the others, medians of ratios within a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from circumstances import options, report
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from arealite.utils.network import LOOPBACK, hold_port, port_of

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "examples" / "quickstart"))
from tiny_model import make_tiny_model  # noqa: E402

SIDES = ("generate", "continuous", "gemm")
BATCH = 64
CONTEXT = 1024
READY_S = 600.0


@dataclass(frozen=True)
class Turn:
    """What a conversation adds before the model answers, and how many tokens it samples then."""

    new: list[int]
    length: int


Conversation = list[Turn]


def cases() -> dict[str, list[Conversation]]:
    """Return the conversations of every case."""
    draw = random.Random(0)

    def words(count: int) -> list[int]:
        return [draw.randrange(5, 250) for _ in range(count)]

    shared = [words(256) for _ in range(16)]
    return {
        "equal": [[Turn(words(64), 64)] for _ in range(64)],
        "exponential": [[Turn(words(64), min(256, 1 + int(draw.expovariate(1 / 64))))] for _ in range(256)],
        "shared": [[Turn(prompt, 64)] for prompt in shared for _ in range(8)],
        "turns": [[Turn(words(128), 32), *(Turn(words(32), 32) for _ in range(3))] for _ in range(32)],
    }


class Transformers:
    """The two ways of sampling that transformers has; runs in this process."""

    def __init__(self, path: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.process = psutil.Process()
        layers = [one for one in self._model.modules() if isinstance(one, torch.nn.Linear)]
        self._products = [(layer, torch.randn(BATCH, layer.in_features)) for layer in layers]

    @torch.inference_mode()
    def gemm(self, conversations: Sequence[Conversation]) -> int:
        """Compute what a full batch multiplies for as many tokens; return how many."""
        wanted = sum(turn.length for turns in conversations for turn in turns)
        for _ in range(wanted // BATCH):
            for layer, rows in self._products:
                layer(rows)
        return wanted

    def generate(self, conversations: Sequence[Conversation]) -> int:
        """Sample static batches; return how many wanted tokens came."""
        num_tokens = 0
        for start in range(0, len(conversations), BATCH):
            batch = conversations[start : start + BATCH]
            texts: list[list[int]] = [[] for _ in batch]
            for turns in zip(*batch, strict=True):
                texts = [text + turn.new for text, turn in zip(texts, turns, strict=True)]
                ids = torch.tensor(texts)
                with torch.inference_mode():
                    found: Any = self._model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        do_sample=True,
                        max_new_tokens=max(turn.length for turn in turns),
                        return_dict_in_generate=True,
                        output_logits=True,
                        pad_token_id=0,
                        eos_token_id=None,
                    )
                texts = found.sequences.tolist()
                num_tokens += sum(turn.length for turn in turns)
        return num_tokens

    def continuous(self, conversations: Sequence[Conversation]) -> int:
        """Sample by continuous batching; a conversation returns with its next turn when it has ended one."""
        config = GenerationConfig(do_sample=True, max_new_tokens=CONTEXT, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(return_logprobs=True, num_blocks=512, max_batch_tokens=BATCH * 16, seed=0)
        num_tokens, running = 0, {str(i): iter(turns) for i, turns in enumerate(conversations)}
        with self._model.continuous_batching_context_manager(config, continuous_batching_config=batching) as manager:

            def go_on(name: str, text: list[int]) -> None:
                if turn := next(running[name], None):
                    manager.add_request(text + turn.new, f"{name}.{len(text)}", max_new_tokens=turn.length)
                else:
                    del running[name]

            for name in list(running):
                go_on(name, [])
            while running:
                found = manager.get_result(timeout=READY_S)
                if found is None or not found.generated_tokens:
                    raise RuntimeError(f"continuous batching must end its requests: got {found}")
                num_tokens += len(found.generated_tokens)
                go_on(found.request_id.split(".")[0], found.prompt_ids + found.generated_tokens)
        return num_tokens


class Served:
    """A server process that is asked over HTTP, all conversations at once, and is stopped while it is not its turn."""

    def __init__(self, process: psutil.Process, url: str, body: Body) -> None:
        self.process, self._url, self._body = process, url, body
        suspend(process)

    def __call__(self, conversations: Sequence[Conversation]) -> int:
        resume(self.process)
        try:
            return asyncio.run(self._run(conversations))
        finally:
            suspend(self.process)

    async def _run(self, conversations: Sequence[Conversation]) -> int:
        limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(READY_S)
        async with aiohttp.ClientSession(connector=limits[0], timeout=limits[1]) as session:
            return sum(await asyncio.gather(*(self._converse(session, *one) for one in enumerate(conversations))))

    async def _converse(self, session: aiohttp.ClientSession, seed: int, turns: Conversation) -> int:
        text: list[int] = []
        num_tokens = 0
        for turn in turns:
            text += turn.new
            async with session.post(self._url, json=self._body(text, turn.length, seed)) as reply:
                answer = await reply.json()
                if reply.status != 200:
                    raise RuntimeError(f"{self._url} must reply 200: got {reply.status}: {answer}")
            tokens, num_logprobs = output_of(answer)
            assert len(tokens) == num_logprobs == turn.length
            text += tokens
            num_tokens += turn.length
        return num_tokens


def lite_body(tokens: list[int], length: int, seed: int) -> dict[str, Any]:
    """Return the body of a request to lite."""
    params = {"max_new_tokens": length, "ignore_eos": True, "sampling_seed": seed}
    return {"input_ids": tokens, "return_logprob": True, "sampling_params": params}


def vllm_body(tokens: list[int], length: int, seed: int) -> dict[str, Any]:
    """Return the body of a request to vLLM."""
    params = {"max_tokens": length, "ignore_eos": True, "seed": seed, "logprobs": 0, "temperature": 1.0}
    return {"prompt": tokens, "return_token_ids": True, **params}


def sglang_body(tokens: list[int], length: int, seed: int) -> dict[str, Any]:
    """Return the body of a request to SGLang, which takes no seeds on CPUs."""
    body = lite_body(tokens, length, seed)
    del body["sampling_params"]["sampling_seed"]
    return body


Body = Callable[[list[int], int, int], dict[str, Any]]
PEERS: dict[str, tuple[str, Body, list[str], dict[str, str]]] = {
    "vllm": (
        "v1/completions",
        vllm_body,
        ["--model", "", "--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(BATCH)],
        {"VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
    "sglang": (
        "generate",
        sglang_body,
        [
            *("--model-path", "", "--dtype", "float32", "--context-length", str(CONTEXT), "--device", "cpu"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule"),
            *("--max-running-requests", str(BATCH), "--max-total-tokens", str(BATCH * CONTEXT // 2)),
        ],
        {"SGLANG_USE_CPU_ENGINE": "0"},
    ),
}
"""Servers of other environments: path and body of requests, flags (an empty one is the model), variables."""


def output_of(answer: dict[str, Any]) -> tuple[list[int], int]:
    """Return the sampled tokens of a reply, and how many logprobs it has."""
    if "choices" in answer:
        (choice,) = answer["choices"]
        return choice["token_ids"], len(choice["logprobs"]["token_logprobs"])
    return answer["output_ids"], len(answer["meta_info"]["output_token_logprobs"])


@contextlib.contextmanager
def started(command: Sequence[str], env: dict[str, str], log: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Start a server on a port of its own, wait until it is ready, and end it with its children."""
    with hold_port() as holder, log.open("wb") as output:
        url = f"http://{LOOPBACK}:{port_of(holder)}"
        words = [*command, "--host", LOOPBACK, "--port", str(port_of(holder))]
        # The guard ends the server with all its processes when its standard input does.
        guarded = [sys.executable, "-m", "arealite.launcher.place.guard", *words]
        process = subprocess.Popen(
            guarded, env=os.environ | env, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd="/"
        )
        try:
            deadline = time.monotonic() + READY_S
            while not is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server must be ready in {READY_S:g} s. Log:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield psutil.Process(process.pid), url
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def suspend(guard: psutil.Process) -> None:
    """Stop a server: SGLang's never sleeps, and threads of other sides would wait for the core that it takes."""
    for one in guard.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            one.suspend()


def resume(guard: psutil.Process) -> None:
    """Let a server go on."""
    for one in guard.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.resume()


def is_ready(url: str) -> bool:
    """Ask a server whether it is ready."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=60):
        return True
    return False


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and its children."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def measure(
    sides: dict[str, tuple[psutil.Process, Callable[[Sequence[Conversation]], int]]],
    conversations: Sequence[Conversation],
    rounds: int,
) -> dict[str, Any]:
    """Let the sides take turns; return medians, and ratios of lite to each other side."""
    wanted = sum(turn.length for turns in conversations for turn in turns)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds + 1):  # the first round warms all up
        for name, (process, run) in sides.items():
            began, cpu_began = time.perf_counter(), cpu_seconds(process)
            assert run(conversations) == wanted
            wall_s, cpu_s = time.perf_counter() - began, cpu_seconds(process) - cpu_began
            rates[name].append((wanted / wall_s, wanted / cpu_s))
    found: dict[str, Any] = {"requests": sum(map(len, conversations)), "tokens": wanted, "rounds": rounds}
    for name, pairs in rates.items():
        for unit, column in (("s", 0), ("cpu_s", 1)):
            found[f"{name}_tok_per_{unit}"] = statistics.median(pair[column] for pair in pairs[1:])
            if name != "lite":
                ratios = [ours[column] / pair[column] for ours, pair in zip(rates["lite"][1:], pairs[1:], strict=True)]
                found[f"ratio_{name}_{unit}"] = statistics.median(ratios)
                found[f"ratio_{name}_{unit}_spread"] = [min(ratios), max(ratios)]
    return found | ({"of_gemm_bound": found["ratio_gemm_s"]} if "gemm" in sides else {})


def main() -> None:
    """Measure every case and print a line for each side."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of each side")
    parser.add_argument("--case", action="append", choices=cases(), help="one of the cases; may be repeated")
    parser.add_argument("--side", action="append", choices=SIDES, help="beside the servers; all")
    for name in PEERS:
        of = f"interpreter of an environment that has {name}"
        parser.add_argument(f"--{name}", type=os.path.abspath, help=of)
    parser.add_argument("--vllm-eager", action="store_true", help="start vLLM with --enforce-eager: ready sooner")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = make_tiny_model(Path(folder) / "model", hidden=256, layers=6, heads=4, kv_heads=2, mlp=768, tie=False)
        env = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
        peer = Transformers(path)
        sides: dict[str, Any] = {name: (peer.process, getattr(peer, name)) for name in args.side or SIDES}
        command = [sys.executable, "-m", "arealite.server", "--model-path", str(path), "--threads", str(args.threads)]
        command += ["--slots", str(BATCH), "--context", str(CONTEXT)]
        process, url = stack.enter_context(started(command, env, Path(folder) / "lite.log"))
        sides["lite"] = process, Served(process, f"{url}/generate", lite_body)
        for name, (place, body, flags, variables) in PEERS.items():
            if python := getattr(args, name):
                command = [python, "-m", f"arealite.launcher.serve.{name}_server"]
                command += [flag or str(path) for flag in flags]
                command += ["--enforce-eager"] * (name == "vllm" and args.vllm_eager)
                process, url = stack.enter_context(started(command, env | variables, Path(folder) / f"{name}.log"))
                sides[name] = process, Served(process, f"{url}/{place}", body)
        for name, conversations in cases().items():
            if args.case and name not in args.case:
                continue
            result = {"case": name, "threads": args.threads, "vllm_eager": args.vllm_eager}
            report(args, result | measure(sides, conversations, args.rounds), described)


def described(result: dict[str, Any]) -> str:
    """Return a line for each side."""
    lines = []
    for side in (key.removesuffix("_tok_per_s") for key in result if key.endswith("_tok_per_s")):
        speeds = f"{result[f'{side}_tok_per_s']:7.0f} tok/s, {result[f'{side}_tok_per_cpu_s']:7.0f} tok/CPU-s"
        ratios = ""
        if side != "lite":
            ratios = f", lite / {side} {result[f'ratio_{side}_s']:.2f} by the clock, "
            ratios += f"{result[f'ratio_{side}_cpu_s']:.2f} by CPU time"
        lines.append(f"{result['case']:12} {side:10} {speeds}{ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
