"""The three server programs as our launchers start them, on loopback, each owned by a guard that ends it with us; and
the embedded one in the process of the trainer, which is this one.

A program has been *installed* into an environment of its own; its interpreter is all that is needed here.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness.processes import environment, guarded
from harness.wire import wait_ready

from arealite import __version__
from arealite.api.config.rollout import ColocatedConfig
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.engine.vllm_remote import RemoteVLLMEngine
from arealite.inference.colocated import ColocatedServer
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.network import LOOPBACK, hold_port, port_of

Name = Literal["lite", "colocated", "sglang", "vllm"]
COLOCATED: dict[str, ColocatedServer] = {}
"""Servers in this process, by their addresses."""
CONTEXT = 512
"""Longest sequence of every server, in tokens."""
_READY_S = 600.0
_CHECK_S = 600.0


@dataclass(frozen=True)
class Program:
    """How to start one of the servers, and what it can do."""

    name: Name
    python: str
    module: str
    model_flag: str
    flags: dict[str, Any]
    in_place_flags: dict[str, Any]
    """Further ones that the pause mode in_place takes: nothing cached may outlive the weights it was computed with."""
    env: dict[str, str]
    client: type[RemoteInferenceEngine]
    pause_modes: tuple[str, ...]
    verifies_fingerprints: bool = True
    honours_seeds: bool = True

    @property
    def backend(self) -> str:
        """Return what the client calls servers of this kind."""
        return "lite" if self.name == "colocated" else self.name

    @property
    def for_in_place(self) -> Program:
        """Return the same program as it serves clients whose pause mode is in_place."""
        return replace(self, flags=self.flags | self.in_place_flags)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of its processes."""
        return environment() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self.env}

    def command(self, *arguments: str) -> list[str]:
        """Return the command that serves with `arguments`, or only checks them if one is `--check`."""
        spelled = [
            [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
            for name, value in self.flags.items()
        ]
        return [self.python, "-m", self.module, *(word for words in spelled for word in words), *arguments]

    def about(self, model: Path) -> dict[str, Any]:
        """Return what the wrapper says of the installed program: name, version and more."""
        if self.backend == "lite":
            return {"program": self.name, "version": __version__}
        command = self.command(self.model_flag, str(model), "--check")
        checked = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=_CHECK_S, check=False, cwd="/"
        )
        if checked.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} must succeed: got {checked.returncode}: {checked.stderr[-2000:]}")
        about: dict[str, Any] = json.loads(checked.stdout.splitlines()[-1])
        return about


def program(name: Name, python: str) -> Program:
    """Describe a server program that is installed for an interpreter."""
    if name in ("lite", "colocated"):
        return Program(
            name,
            python,
            "arealite.server",
            "--model-path",
            {"context": CONTEXT, "slots": 64},
            {"allow_stale_kv": True},
            {},
            RemoteSGLangEngine,
            ("abort", "retract", "in_place"),
            verifies_fingerprints=name == "lite",  # in the trainer's process nothing is sent
        )
    if name == "vllm":
        return Program(
            name,
            python,
            "arealite.launcher.serve.vllm_server",
            "--model",
            {
                "dtype": "float32",
                "max_model_len": CONTEXT,
                "max_num_seqs": 64,
                "enforce_eager": True,
            },
            {"no_enable_prefix_caching": True},
            {"VLLM_CPU_KVCACHE_SPACE": "1"},
            RemoteVLLMEngine,
            ("abort", "retract", "in_place", "wait"),
        )
    flags = {
        "device": "cpu",
        "dtype": "float32",
        "context_length": CONTEXT,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "max_total_tokens": 32768,
        "max_running_requests": 64,
        "sleep_on_idle": True,
    }
    return Program(
        name,
        python,
        "arealite.launcher.serve.sglang_server",
        "--model-path",
        flags,
        {"disable_radix_cache": True},
        {"SGLANG_USE_CPU_ENGINE": "0"},
        RemoteSGLangEngine,
        ("abort", "retract", "in_place"),
        verifies_fingerprints=False,
        honours_seeds=False,  # it needs attention kernels of GPUs for that
    )


@contextlib.contextmanager
def served(program: Program, model: Path, log: Path) -> Iterator[str]:
    """Start a server, wait until it is ready, give its address, and end it with all its processes."""
    with contextlib.ExitStack() as stack:
        if program.name == "colocated":
            flags = {"allow_stale_kv": False, **program.flags}
            allow_stale_kv = flags.pop("allow_stale_kv")
            colocated = ColocatedConfig(path=str(model), **flags)
            server = ColocatedServer(colocated, allow_stale_kv=allow_stale_kv, seed=0, secret=None)
            stack.callback(server.close)
            COLOCATED[server.address] = server
            yield server.address
            return
        holder = stack.enter_context(hold_port())
        address = f"{LOOPBACK}:{port_of(holder)}"
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="arealite-server-"))  # short, for sockets
        arguments = [program.model_flag, str(model), "--host", LOOPBACK, "--port", str(port_of(holder))]
        env = program.environment | {"TMPDIR": temporary}
        server = stack.enter_context(guarded(program.command(*arguments), log, env=env))
        wait_ready(address, _READY_S, server)
        yield address
