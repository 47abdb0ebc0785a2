"""The local launcher with real processes: how runs end, what they print, and that nothing survives."""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest

from arealite.launcher.place.local import _terminal
from arealite.utils.processes import descendants, wait_gone

REPOSITORY = Path(__file__).parents[2]
SFT = ("allocation_mode=d1", "model.path=tiny")
GRPO = ("allocation_mode=sglang.d2+d2", "actor.path=tiny")
WAIT_FOREVER = "note(f\"trainer-{os.environ['RANK']}\"); time.sleep(600)"


def test_success_stops_servers(launch_script):
    run = launch_script(
        """
        import urllib.request
        rank = os.environ["RANK"]
        note(f"trainer-{rank}")
        daemon(f"daemon-{rank}")
        addrs = servers(2).values()
        for addr in addrs: urllib.request.urlopen(f"http://{addr}/health").close()
        wait_for("daemon-0", "daemon-1")
        print("hello from", rank, "of", os.environ["WORLD_SIZE"], "with", len(addrs), "servers", sys.argv[1:])
        """,
        *GRPO,
    )
    assert run.end() == 0, run.output
    assert len(run.pids) == 6
    assert "\nhello from 0 of 2 with 2 servers ['--config'" in run.output
    assert "\ntrainer-1 | hello from 1 of 2 with 2 servers" in run.output
    assert "INFO fake" not in run.output
    names = {path.name for path in run.logs.iterdir()}
    assert names == {"launcher.log", "trainer-0.log", "trainer-1.log", "server-0.log", "server-1.log"}
    assert "hello from 1" in (run.logs / "trainer-1.log").read_text()
    assert "INFO fake" in (run.logs / "server-0.log").read_text()
    assert "is ready at 127.0.0.1:" in (run.logs / "launcher.log").read_text()


def test_a_job_is_given_the_width_of_the_terminal(monkeypatch):
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    with os.fdopen(master, "rb"), os.fdopen(slave, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert _terminal() == {"COLUMNS": "101"}


def test_failing_rank_is_named_and_gives_its_status(launch_script):
    run = launch_script(
        """
        rank = os.environ["RANK"]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        daemon(f"daemon-{rank}"); note(f"trainer-{rank}")
        wait_for("trainer-0", "trainer-1")
        if rank == "1":
            for i in range(30): print("line", i)
            raise SystemExit(7)
        time.sleep(600)
        """,
        *SFT,
        "allocation_mode=d2",
    )
    assert run.end() == 7, run.output
    assert "trainer-1 failed with exit status 7: stopping everything\n" in run.output
    assert run.output.count("line 29") == 1, "what is on the screen is not repeated"
    assert run.output.endswith(f"launcher | the whole log of trainer-1: {run.logs / 'trainer-1.log'}\n")


def test_a_rank_that_lost_its_peer_is_not_blamed_for_it(launch_script):
    """A failing rank leaves the process group before it ends, so another one may end first."""
    run = launch_script(
        """
        if os.environ["RANK"] == "0":
            from arealite.api.script import show_errors_briefly
            show_errors_briefly()
            note("trainer-0")
            raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
        wait_for("trainer-0")
        first = pathlib.Path("/proc", (pathlib.Path(os.environ["PIDS"]) / "trainer-0").read_text())
        while first.exists(): time.sleep(0.02)
        print("ValueError: the cause")
        sys.exit(7)
        """,
        *SFT,
        "allocation_mode=d2",
    )
    assert run.end() == 7, run.output
    assert "launcher | trainer-1 failed with exit status 7: stopping everything\n" in run.output


def test_nobody_has_to_read_the_output(launch_script):
    """As after Ctrl-S, or in an ssh session that lost its network: the run ends, and its log has it all."""
    reader, writer = os.pipe()
    try:
        run = launch_script("for n in range(20_000): print(n, 'x' * 90)", *SFT, stdout=writer)
        os.close(writer)
        assert run.end() == 0
    finally:
        os.close(reader)
    log = (run.logs / "trainer-0.log").read_text().splitlines()
    assert [line.partition(" ")[0] for line in log] == [str(n) for n in range(20_000)]


def test_a_rank_that_the_kernel_ends_for_its_memory_is_told_so(launch_script, tmp_path):
    group = Path("/sys/fs/cgroup/memory") / f"arealite-{tmp_path.name}-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("100000000")
    except OSError as error:
        pytest.skip(f"needs a memory cgroup (v1): {error}")
    try:
        run = launch_script(
            f"open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\nkept = bytearray(300_000_000)", *SFT
        )
        assert run.end() == 137
        assert "trainer-0 failed with exit status 137 (SIGKILL), because memory ran out (the node's, " in run.output
    finally:
        group.rmdir()


def test_server_that_dies_at_start_is_told_first(launch_script):
    run = launch_script(
        """
        wait_for("dying")
        while pathlib.Path("/proc", (pathlib.Path(os.environ["PIDS"]) / "guard").read_text()).exists(): time.sleep(0.02)
        sys.exit("trainer can not reach the servers")
        """,
        *("allocation_mode=sglang.d1+d1", "actor.path=tiny"),
        SERVER_START="""
import psutil
(pathlib.Path(os.environ["PIDS"]) / "guard").write_text(str(psutil.Process().parents()[2].pid))
note("dying"); sys.exit("CUDA is on holiday")
""",
    )
    assert run.end() == 3, run.output
    assert (
        "ended with exit status 1; its last 2 lines that are not above:\n    CUDA is on holiday\n    serve: server-"
        in run.output
    )


def test_server_that_dies_mid_run_is_started_again(launch_script):
    """While the trainer goes on, until it was enough; progress of the run gives it new chances."""
    run = launch_script(
        """
        import json, urllib.request
        note("trainer-0")
        addresses = {servers(2)["server-1"]}
        for n in range(3):
            if n == 1: pathlib.Path("runs/exp/trial/recover/step_7").mkdir(parents=True)
            try: urllib.request.urlopen(f"http://{servers(2)['server-1']}/exit")
            except OSError: pass
            while n < 2 and len(addresses) == n + 1: addresses.add(servers(2)["server-1"])
        print(len(addresses), "addresses")
        while "left out" not in pathlib.Path("runs/exp/trial/logs/launcher.log").read_text(): time.sleep(0.02)
        """,
        *("allocation_mode=sglang.d2+d1", "actor.path=tiny", "launcher.server_restarts=1"),
        *("recover.mode=auto", "recover.freq_steps=1"),
    )
    assert run.end() == 0, run.output
    assert "\n3 addresses\n" in run.output
    again = [line.split("again ")[1] for line in run.output.splitlines() if "starting it again" in line]
    assert again == ["(1 of 1)", "(1 of 1)"]
    assert run.output.count("launcher | server-0 is ready at") == 1
    assert "server-1 ended with exit status 9; it is left out, as others serve" in run.output


def test_servers_that_share_their_devices_start_first_and_once(launch_script):
    """They measure the memory that is free, and a new one would take what the one before has given to the trainer."""
    run = launch_script(
        """
        import urllib.request
        assert "server-0 is ready" in pathlib.Path("runs/exp/trial/logs/launcher.log").read_text()
        note("trainer-0")
        try: urllib.request.urlopen(f"http://{servers(1)['server-0']}/exit")
        except OSError: pass
        time.sleep(600)
        """,
        *("allocation_mode=sglang.d1|d1", "actor.path=tiny"),
    )
    assert run.end() == 3, run.output
    assert "trainer-0" in {path.name for path in run.pids_folder.iterdir()}, run.output
    assert "server-0 ended with exit status 9; its last " in run.output and "again" not in run.output
    assert "server-0 | ERROR fake: told to exit" in run.output


def test_a_server_that_joins_outlives_an_attempt_and_the_run_tells_where_its_registry_is(launch_script):
    """What the launcher started is registered anew by the second attempt; what joined stays."""
    run = launch_script(
        """
        import asyncio, json
        from arealite.inference.registry import RegistryClient, ServerEntry
        record = json.loads(pathlib.Path("runs/exp/trial/registry.json").read_text())
        assert record["address"] == os.environ["AREALITE_REGISTRY"] and record["address"].startswith("127.0.0.1:")
        registry = RegistryClient(os.environ["AREALITE_REGISTRY"], os.environ["AREALITE_SECRET"])
        joined = ServerEntry("joined", "127.0.0.1:1", "sglang", "me")
        if os.environ["AREAL_RECOVER_RUN"] == "0":
            first = servers(1)
            asyncio.run(registry.put(joined))
            pathlib.Path("first").write_text(str(first["server-0"]))
            sys.exit(7)
        addresses = servers(2)
        print("joined at", addresses["joined"], addresses["server-0"] != pathlib.Path("first").read_text())
        """,
        *("allocation_mode=sglang.d1+d1", "actor.path=tiny", "recover.mode=auto", "recover.retries=1"),
        "recover.freq_steps=1",
    )
    assert run.end() == 0, run.output
    assert "joined at 127.0.0.1:1 True" in run.output
    assert run.output.count("server-0 is ready at ") == 2 and "joined is ready" not in run.output
    assert not (run.logs.parent / "registry.json").exists()


def test_ctrl_c_lets_the_trainer_end_its_step_while_servers_serve(launch_script):
    run = launch_script(
        """
        import json, urllib.request
        folder = pathlib.Path("runs/exp/trial")
        rank, asked = os.environ["RANK"], []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        (address,) = servers(1).values()
        daemon(f"daemon-{rank}")
        note(f"trainer-{rank}")
        while not asked: time.sleep(0.02)
        if rank == "1": sys.exit(143)
        urllib.request.urlopen(f"http://{address}/health").close()
        (folder / "recover/step_4").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 4}) + "\\n")
        (folder / "report.html").touch()
        sys.exit(143)
        """,
        *("allocation_mode=sglang.d1+d2", "actor.path=tiny", "recover.mode=auto", "recover.freq_steps=100"),
    )
    run.wait_for("trainer-0", "trainer-1")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert run.output.endswith(
        "received SIGINT: stopping everything\n"
        f"launcher | stopped after step 4; report: {run.logs.parent}/report.html\n"
        "launcher | the same command continues from step 5\n"
    ), run.output


def test_a_trainer_that_does_not_stop_in_time_is_ended(launch_script):
    run = launch_script(
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT_FOREVER}", *SFT, "launcher.stop_timeout=0.1"
    )
    run.wait_for("trainer-0")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143, run.output
    assert run.output.endswith(
        "launcher | stopped before the first step was done\n"
        "launcher | nothing is kept to continue from (recover.mode=disabled): the same command starts again\n"
    ), run.output


@pytest.mark.parametrize("mode, status", [("auto", 1), ("resume", 7)])
def test_what_is_not_tried_again(launch_script, tmp_path, mode, status):
    """What ended a script before its first step would end it again, and `resume` is for the user to decide."""
    if mode == "resume":
        (tmp_path / "runs/exp/trial/recover/step_3").mkdir(parents=True)
    run = launch_script(f"print('started'); sys.exit({status})", *SFT, f"recover.mode={mode}", "recover.freq_steps=1")
    assert run.end() == status, run.output
    assert run.output.count("started") == 1 and "restart" not in run.output


def test_a_finished_run_is_not_started_again(launch_script):
    entry = """
        import json, yaml
        from arealite.api.cli_args import GRPOConfig, SFTConfig, load_expr_config, to_yaml
        config, _ = load_expr_config(sys.argv[1:], SFTConfig)
        folder = pathlib.Path("runs/exp/trial")
        (folder / "config.yaml").write_text(to_yaml(config))
        (folder / "summary.json").write_text('{"is_finished": true}')
        (folder / "recover/step_9").mkdir(parents=True, exist_ok=True)
        print("trained", config.total_train_steps)
        """
    words = (*SFT, "recover.mode=auto", "recover.freq_secs=600")
    run = launch_script(entry, *words, "total_train_steps=10")
    assert run.end() == 0, run.output
    for steps, said in ((10, "this run has finished: "), (20, "trained 20")):
        done = run.again(*words, f"total_train_steps={steps}")
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
        assert ("trial_name=... starts another" in done.stdout) == (steps == 10) == ("trained" not in done.stdout)


def test_second_ctrl_c_does_not_wait(launch_script):
    run = launch_script(f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT_FOREVER}", *SFT)
    run.wait_for("trainer-0")
    run.process.send_signal(signal.SIGINT)
    while "stopping everything" not in run.output:
        assert run.process.poll() is None
        time.sleep(0.02)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130


def test_killed_launcher_leaves_nothing(launch_script):
    run = launch_script(
        f'daemon("trainer-daemon-" + os.environ["RANK"]); {WAIT_FOREVER}',
        *GRPO,
        SERVER_START='name = os.environ["AREALITE_PROCESS_NAME"]; daemon("daemon-" + name); note(name)',
    )
    run.wait_for("trainer-0", "trainer-1", "server-0", "server-1")
    tree = descendants(run.process.pid)
    run.process.kill()
    assert run.end() == -signal.SIGKILL
    assert len(run.pids) == 8
    assert wait_gone(tree, timeout_s=120) == set()


def test_killed_guard_ends_the_run_and_leaves_nothing(launch_script):
    run = launch_script(
        WAIT_FOREVER,
        *("allocation_mode=sglang.d1+d1", "actor.path=tiny", "launcher.server_restarts=0"),
        SERVER_START='daemon("daemon"); note("up")',
    )
    run.wait_for("trainer-0", "up")
    up = int((run.pids_folder / "up").read_text())
    guard = next(pid for pid in descendants(run.process.pid) if up in descendants(pid))
    os.kill(guard, signal.SIGKILL)
    assert run.end() == 3
    assert "server-0 ended with exit status 137 (SIGKILL)" in run.output


def test_killed_launcher_and_guards_take_their_jobs_along(launch_script):
    """The second line of defence: the kernel ends what a guard has started itself."""
    run = launch_script(WAIT_FOREVER, *GRPO, SERVER_START='note(os.environ["AREALITE_PROCESS_NAME"])')
    run.wait_for("trainer-0", "trainer-1", "server-0", "server-1")
    run.process.send_signal(signal.SIGSTOP)
    tree = descendants(run.process.pid)
    guards = [pid for pid in tree if b"arealite.launcher.place.guard" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(guards) == 6, "one of each rank, and two of each server: ours, and that of the program that serves it"
    for pid in [*guards, run.process.pid]:
        os.kill(pid, signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert wait_gone(tree, timeout_s=120) == set()


def test_the_launcher_can_be_called_in_sequence(launch_script, tmp_path):
    """As a quickstart does: handlers and orphan adoption are given back each time."""
    run = launch_script("print('trained', sys.argv[-1])", *SFT, "trial_name=a")
    assert run.end() == 0
    code = (
        "import signal\n"
        "from arealite.launcher.local import main\n"
        "from arealite.utils.processes import adopt_orphans\n"
        "argv = ['--config', 'config.yaml', 'allocation_mode=d1', 'model.path=tiny']\n"
        "assert [main(['entry.py', *argv, f'trial_name={name}']) for name in 'ab'] == [0, 0]\n"
        "assert main(['missing.py', *argv]) == 2\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not adopt_orphans(False)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PIDS": str(tmp_path / "pids")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\ntrained trial_name=a\n" in done.stdout and "\ntrained trial_name=b\n" in done.stdout
    assert done.stderr.startswith("ConfigError: the entry script must be a file: got missing.py")


def test_servers_only_run_until_ctrl_c(launch_script):
    words = ("allocation_mode=sglang.d2", "actor.path=tiny", "launcher.stall_timeout=0.5")
    run = launch_script("raise SystemExit(1)", *words)
    while "until Ctrl-C: export AREALITE_SECRET=$(cat " not in run.output:
        assert run.process.poll() is None, run.output
        time.sleep(0.02)
    assert "/.secret) AREAL_LLM_SERVER_ADDRS=127.0.0.1:" in run.output and run.output.count("is ready at") == 2
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(2.5)  # they may idle
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert len(run.pids) == 2 and "stalled" not in run.output


def test_environment_of_the_trainer(launch_script):
    run = launch_script(
        """
        names = ("OMP_NUM_THREADS", "A", "B", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM")
        print([os.environ[name] for name in names])
        """,
        *SFT,
        "launcher.trainer_threads=3",
        "launcher.trainer_env_vars='A=1,B=x=y'",
    )
    assert run.end() == 0, run.output
    assert "\n['3', '1', 'x=y', '', 'true']\n" in run.output
    file = run.logs.parent / "run.json"
    assert json.loads(file.read_text())["argv"][-2:] == ["launcher.trainer_threads=3", "launcher.trainer_env_vars=***"]
    assert file.stat().st_mode & 0o777 == 0o600


RECOVER = ("recover.mode=auto", "recover.freq_steps=1", "recover.retries=2")


def test_a_failed_run_is_started_again(launch_script, tmp_path):
    (tmp_path / "tmp").mkdir()
    run = launch_script(
        """
        attempt = len(list(pathlib.Path(os.environ["PIDS"]).glob("trainer-*")))
        note(f"trainer-{attempt}")
        daemon(f"daemon-{attempt}")
        print("attempt", attempt, os.environ["AREAL_RECOVER_RUN"])
        if attempt < 2:
            os.kill(os.getpid(), signal.SIGKILL if attempt else signal.SIGABRT)
        print("others:", [path.name for path in pathlib.Path(os.environ["PIDS"]).iterdir() if "daemon" in path.name
            and pathlib.Path("/proc", path.read_text()).exists()])
        """,
        *SFT,
        *RECOVER,
        TMPDIR=str(tmp_path / "tmp"),
    )
    assert run.end() == 0, run.output
    assert [f"\nattempt {n} {int(n > 0)}\n" in run.output for n in range(3)] == [True] * 3
    assert "restart 1 of 2, because trainer-0 failed with exit status 134 (SIGABRT)\n" in run.output
    assert "restart 2 of 2, because trainer-0 failed with exit status 137 (SIGKILL)\n" in run.output
    assert "others: ['daemon-2']" in run.output, "what the first attempts started has ended"
    log = (run.logs / "trainer-0.log").read_text()
    assert "attempt 0 0" in log and "attempt 2 1" in log
    assert list((tmp_path / "tmp").iterdir()) == []


def test_progress_gives_a_run_new_chances(launch_script):
    run = launch_script(
        """
        folder = pathlib.Path("runs/exp/trial/recover")
        attempt = len(list(folder.glob("step_*")))
        print("attempt", attempt)
        if attempt < 2: (folder / f"step_{attempt}").mkdir(parents=True)
        from arealite.api.script import show_errors_briefly
        show_errors_briefly()
        (folder.parent / "metrics.jsonl").write_text("{}")
        raise ValueError("seed must be 1: got 2.")
        """,
        *SFT,
        *("recover.mode=auto", "recover.freq_steps=1", "recover.retries=1"),
    )
    assert run.end() == 1
    assert [line for line in run.output.splitlines() if line.startswith("att")] == [f"attempt {n}" for n in range(3)]
    assert run.output.count("restart 1 of 1") == 2


def test_a_refusal_after_the_first_step_is_not_tried_again(launch_script):
    """The exit status says it, although torch has an excepthook; only the log has the traceback."""
    run = launch_script(
        """
        from arealite.api.errors import CheckpointError
        from arealite.api.script import show_errors_briefly
        from arealite.utils.distributed import join_default_group
        show_errors_briefly()
        join_default_group(60)
        pathlib.Path("runs/exp/trial/metrics.jsonl").write_text("{}")
        raise CheckpointError("seed must be 1: got 2.")
        """,
        *SFT,
        *RECOVER,
    )
    assert run.end() == 2, run.output
    assert "\nCheckpointError: seed must be 1: got 2.\n" in run.output
    assert "Traceback" not in run.output and "restart " not in run.output
    log = (run.logs / "trainer-0.log").read_text()
    assert log.startswith("Traceback (most") and "\narealite.api.errors.CheckpointError: seed must be 1: got 2." in log


@pytest.mark.parametrize("mode, is_fresh", [("disabled", True), ("fault", True), ("auto", False)])
def test_a_new_start_of_a_trial_deletes_nothing(launch_script, tmp_path, mode, is_fresh):
    folder = tmp_path / "runs/exp/trial"
    names = ["checkpoints/step_3/model", "ledger.sqlite", "logs/trainer-0.log", "metrics.jsonl", "recover/step_3/state"]
    for name in (*names, ".secret"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of the earlier run, which is long enough\n")
    (folder / ".secret").chmod(0o600)
    run = launch_script(
        "print('has', sorted(os.listdir('runs/exp/trial')))", *SFT, f"recover.mode={mode}", "recover.freq_steps=1"
    )
    assert run.end() == 0, run.output
    kept = [folder] if not is_fresh else list(folder.parent.glob("trial.replaced-*"))
    assert (len(kept) == 1 and f"the run that was in {folder} is now in {kept[0]}" in run.output) or not is_fresh
    for name in names:
        assert (kept[0] / name).read_text().startswith(f"{name} of the earlier run")
    ours = [".launcher.lock", ".secret", ".trainer.lock", "logs", "run.json"]
    assert f"has {ours}" in run.output or not is_fresh, run.output
    assert (folder / ".secret").read_text().startswith(".secret of the earlier run"), "joiners know it"


def test_a_dead_server_is_a_reason_to_start_again(launch_script):
    run = launch_script(
        f"""
        note(f"trainer-{{os.environ['RANK']}}")
        if os.environ["AREAL_RECOVER_RUN"] == "0": {WAIT_FOREVER}
        """,
        *("allocation_mode=sglang.d1+d1", "actor.path=tiny"),
        *RECOVER,
        SERVER_START="""
if not (pathlib.Path(os.environ["PIDS"]) / "dead").exists() and note("dead") is None: sys.exit(5)
""",
    )
    assert run.end() == 0, run.output
    assert "restart 1 of 2, because server-" in run.output


def test_ctrl_c_is_the_last_word(launch_script):
    """Also while everything is being stopped after a failure."""
    run = launch_script(
        f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(f"trainer-{{os.environ['RANK']}}")
        wait_for("trainer-0", "trainer-1")
        if os.environ["RANK"] == "1": raise SystemExit(7)
        {WAIT_FOREVER}
        """,
        "allocation_mode=d2",
        "model.path=tiny",
        *RECOVER,
    )
    while "stopping everything" not in run.output:
        assert run.process.poll() is None
        time.sleep(0.02)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output
    assert "restart" not in run.output


def test_a_disk_that_fills_up_at_the_start(launch_script, tmp_path):
    """The lock fits into a block of 512 bytes, the command does not."""
    run = launch_script("", *SFT)
    assert run.end() == 0
    limited = ("sh", "-c", 'ulimit -f 1; exec "$@"', "sh")
    done = run.again(*SFT, f"tokenizer_path={'x' * 600}", under=limited)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"ConfigError: {tmp_path}/runs/exp/trial/run.json must be writable: got OSError: ")
    assert "File too large, with " in done.stderr and " free in " in done.stderr and "Traceback" not in done.stderr


def test_two_launchers_do_not_share_a_run(launch_script):
    run = launch_script(WAIT_FOREVER, *SFT)
    run.wait_for("trainer-0")
    second = run.again(*SFT)
    assert second.returncode == 2
    assert f"must belong to one run at a time: got process {run.process.pid}" in second.stderr
    run.process.kill()
    assert run.end() == -signal.SIGKILL
