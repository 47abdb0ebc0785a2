"""Runs the launcher as a real process on small scripts, and checks that nothing it started survives."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testing_processes import spawn

from arealite.utils.processes import kill_tree, wait_gone

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 180

PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
def note(name):
    path = pathlib.Path(os.environ["PIDS"]) / name
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
def daemon(name):
    "An orphan in its own session that ignores SIGTERM."
    code = PRELUDE + "\\nsignal.signal(15, signal.SIG_IGN)\\nnote(sys.argv[1])\\ntime.sleep(600)"
    start = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", start, sys.executable, "-c", code, name])
    wait_for(name)
def wait_for(*names):
    while not all((pathlib.Path(os.environ["PIDS"]) / name).exists() for name in names):
        time.sleep(0.02)
def servers(count):
    "Addresses of servers by name, once so many are ready."
    import asyncio
    from arealite.inference.registry import RegistryClient
    async def ready():
        registry = RegistryClient(os.environ["AREALITE_REGISTRY"], os.environ["AREALITE_SECRET"])
        view = await registry.watch()
        while True:
            ready = {one.name: one.address for one in view.servers.values()}
            if len(ready) == count: return ready
            view = await registry.watch(view.moment)
    return asyncio.run(ready())
"""
PRELUDE = f"PRELUDE = {PRELUDE!r}\n{PRELUDE}"

SERVER = """
import http.server
port = int(sys.argv[sys.argv.index("--port") + 1])
note(f"server-port-{port}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if self.path == "/exit": print("ERROR fake: told to exit", flush=True); os._exit(9)
    do_POST = do_GET
    def log_message(self, *args): print("INFO fake: request", flush=True)
exec(os.environ.get("SERVER_START", ""))
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        for name in ("model-path", "host", "base-gpu-id", "weight-version", "random-seed", "dtype", "dist-init-addr"):
            parser.add_argument("--" + name)
        for name, default in {"port": 0, "tp-size": 1, "pp-size": 1, "nnodes": 1, "node-rank": 0}.items():
            parser.add_argument("--" + name, type=int, default=default)
prepare_server_args = list
"""

HTTP_SERVER = """
class app:
    @staticmethod
    def add_middleware(middleware): pass
"""


class Run:
    """A launcher that runs in the background."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, pids: Path, logs: Path) -> None:
        self.process = process
        self.output_path = output
        self.pids_folder = pids
        self.logs = logs

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    @property
    def pids(self) -> set[int]:
        return {int(path.read_text()) for path in self.pids_folder.iterdir() if path.suffix != ".tmp"}

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not all((self.pids_folder / name).exists() for name in names):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def end(self) -> int:
        """Return the exit status, once everything that the scripts noted is gone."""
        status = self.process.wait(DEADLINE_S)
        assert wait_gone(self.pids, timeout_s=120) == set(), self.output
        return status

    def again(self, *overrides: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Launch the same script once more, with other overrides, and wait for the end."""
        folder = self.output_path.parent
        command = [*under, sys.executable, "-m", "arealite.launcher.local", "entry.py", "--config", "config.yaml"]
        env = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{folder}", "PIDS": str(self.pids_folder)}
        return subprocess.run([*command, *overrides], cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def launch_script(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that launches an entry script with fast stand-ins for SGLang's server."""
    runs: list[Run] = []
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("__version__ = '0'")
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(SERVER_ARGS)
    (tmp_path / "sglang" / "srt" / "entrypoints").mkdir()
    (tmp_path / "sglang" / "srt" / "entrypoints" / "http_server.py").write_text(HTTP_SERVER)
    (tmp_path / "sglang" / "launch_server.py").write_text(PRELUDE + SERVER)
    (tmp_path / "config.yaml").write_text(
        textwrap.dedent(f"""
        experiment_name: exp
        trial_name: trial
        cluster: {{n_gpus_per_node: 0, fileroot: {tmp_path}/runs}}
        train_dataset: {{path: gsm8k, batch_size: 4}}
        launcher: {{preflight: false}}
        """)
    )

    def launch(entry: str, *overrides: str, stdout: int | None = None, **env: str) -> Run:
        (tmp_path / "entry.py").write_text(PRELUDE + textwrap.dedent(entry))
        (tmp_path / "pids").mkdir()
        output = tmp_path / "output.txt"
        command = [sys.executable, "-m", "arealite.launcher.local", tmp_path / "entry.py"]
        command += ["--config", tmp_path / "config.yaml"]
        environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "PIDS": str(tmp_path / "pids")} | env
        with output.open("wb") as file:
            sink = file if stdout is None else stdout
            process = spawn([*command, *overrides], env=environment, cwd=tmp_path, stdout=sink, stderr=sink)
        runs.append(Run(process, output, tmp_path / "pids", tmp_path / "runs" / "exp" / "trial" / "logs"))
        return runs[-1]

    yield launch
    for run in runs:
        kill_tree(run.process.pid)
        for pid in run.pids:
            kill_tree(pid)


@pytest.fixture(autouse=True)
def without_threads_of_the_test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` sets them, and launchers pass on what their user has set."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
