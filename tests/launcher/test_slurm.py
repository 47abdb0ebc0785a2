"""What Slurm is asked for, as text, and what its answers mean. On a real Slurm: `tests/cluster/on_slurm`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arealite.api.config.run import RunConfig, load_run_config
from arealite.launcher import slurm
from arealite.launcher.place import relay
from arealite.launcher.place import slurm as place_slurm
from arealite.launcher.place.slurm import step_command
from arealite.launcher.plan.plan import Placement, Run, make_plan

REPOSITORY = Path(__file__).parents[2]
ENTRY = REPOSITORY / "examples" / "arealite" / "gsm8k_grpo.py"
CONFIG = REPOSITORY / "examples" / "arealite" / "configs" / "gsm8k_grpo.yaml"
GOLDEN = Path(__file__).parent / "plan" / "golden" / "slurm_16x8.txt"
DEADLINE_S = 60
SERVER = Placement("server-3", "server", 1, (2, 3), 3)
RANK = Placement("trainer-0", "trainer", 0, (), 0)


def config_of(*overrides: str) -> RunConfig:
    return load_run_config(["--config", str(CONFIG), *overrides])


def options_of(*overrides: str) -> list[str]:
    config = config_of(*overrides)
    lines = slurm.batch_script(Run(config, make_plan(config), ENTRY, [])).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_the_plan_of_16_nodes_with_8_gpus(capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    argv = ["--config", str(CONFIG.relative_to(REPOSITORY)), "allocation_mode=sglang.d96p1t1+d32p1t1"]
    argv += ["cluster.n_nodes=16", "cluster.n_gpus_per_node=8", "cluster.fileroot=/shared/runs"]
    argv += ["actor.path=Qwen/Qwen3-8B", "launcher.slurm.sbatch_additional_args=--partition=gpu --time=1-0"]
    assert slurm.main([str(ENTRY), *argv, "--dry-run"]) == 0
    message = capsys.readouterr().out.replace(sys.executable, "python").replace(str(REPOSITORY), "/here")
    assert message == GOLDEN.read_text()
    assert not Path("/shared").exists()


def test_a_cpu_cluster_asks_for_cores_and_memory_of_the_fullest_node():
    options = options_of(
        "allocation_mode=lite.d3p1t1+d1p1t1",
        "cluster.n_nodes=2",
        "cluster.n_gpus_per_node=0",
        "launcher.inference_server_cpus_per_gpu=2",
        "launcher.inference_server_mem_per_gpu=1000",
        "launcher.trainer_mem_per_gpu=3000",
    )  # two servers, and a server with a rank that has four cores
    assert "--cpus-per-task=6" in options
    assert "--mem=4000M" in options
    assert not [option for option in options if "gres" in option]


def test_only_a_run_that_may_start_again_goes_back_into_the_queue():
    assert "--no-requeue" in options_of("recover.mode=disabled")
    assert "--requeue" in options_of("recover.mode=auto", "recover.freq_steps=1")


def test_the_users_arguments_come_last_as_they_are():
    arguments = '--gres=gpu:h100:8 -A lab --comment="two words"'
    assert options_of(f"launcher.slurm.sbatch_additional_args='{arguments}'")[-1] == arguments


def test_each_line_of_the_users_arguments_is_one_for_sbatch(tmp_path):
    """Not a command of the script: the job would run with another account and time limit."""
    (tmp_path / "config.yaml").write_text(
        CONFIG.read_text() + "\nlauncher:\n  slurm:\n    sbatch_additional_args: |\n"
        "      --partition=gpu\n      --account=lab\n\n      --time=1-0\n"
    )
    config = load_run_config(["--config", str(tmp_path / "config.yaml")])
    lines = slurm.batch_script(Run(config, make_plan(config), ENTRY, [])).splitlines()
    assert lines[-4:-1] == ["#SBATCH --partition=gpu", "#SBATCH --account=lab", "#SBATCH --time=1-0"]
    assert [line for line in lines if not line.startswith("#")] == [lines[-1]] and lines[-1].startswith("exec ")


def test_a_step_gets_its_gpus_by_number():
    command = step_command(
        config_of("launcher.slurm.srun_additional_args=--mpi=none").launcher, SERVER, node="n7", toward="n8"
    )
    assert command == [
        *["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n7", "--cpu-bind=none", "--quiet", "--mpi=none"],
        *[
            sys.executable,
            "-m",
            "arealite.launcher.place.relay",
            "--toward",
            "n8",
            "--watchdog",
            "30",
            "--devices",
            "2,3",
        ],
    ]


def test_each_role_has_its_image():
    launcher = config_of(
        "launcher.slurm.container_type=apptainer",
        "launcher.slurm.mount=/data:/data,/models:/models",
        "launcher.slurm.inference_server_image=/images/sglang.sif",
    ).launcher
    server = step_command(launcher, SERVER, node="n7", toward="n8")
    assert server[server.index("apptainer") :][:6] == [
        *["apptainer", "exec", "--nv", "--bind", "/data:/data,/models:/models", "/images/sglang.sif"]
    ]
    assert "apptainer" not in step_command(launcher, RANK, node="n7", toward="n8")


@pytest.mark.parametrize(("devices", "gpus"), [("0,2", ["3", "7"]), ("", []), (None, ["3", "5", "7"])])
def test_the_gpus_of_a_step_have_the_names_that_slurm_gave_them(monkeypatch, devices, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert relay._gpus(devices) == gpus


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Return a function that sets the answer of `scontrol`."""

    def answer(text: str, status: int = 0) -> None:
        stream = 2 if status else 1
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat >&{stream} <<'END'\n{text}\nEND\nexit {status}\n")
        (tmp_path / "scontrol").chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return answer


def test_a_job_is_read_from_one_line(scontrol):
    scontrol(
        "JobId=7 JobName=a:b UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Restarts=1 ExitCode=0:0 "
        "TimeLimit=365-00:00:00 NodeList=node[1-2,4] ReqB:S:C:T=0:0:*:* Command=/runs/a b/job.sbatch"
    )
    state = slurm.job_state("7")
    assert state is not None
    assert [state[key] for key in ("JobState", "Restarts", "NodeList")] == ["RUNNING", "1", "node[1-2,4]"]


def test_a_forgotten_job_is_no_silence(scontrol):
    scontrol("slurm_load_jobs error: Invalid job id specified", 1)
    assert slurm.job_state("7") == {}
    scontrol("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1)
    assert slurm.job_state("7") is None


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("JobState=COMPLETED ExitCode=0:0", 0),
        ("JobState=FAILED ExitCode=3:0", 3),
        ("JobState=FAILED ExitCode=0:9", 137),
        ("JobState=CANCELLED ExitCode=0:15", 143),
        ("JobState=NODE_FAIL ExitCode=1:0", 5),
        ("JobState=TIMEOUT ExitCode=0:0", 1),
    ],
)
def test_the_exit_status_is_that_of_the_run(scontrol, tmp_path, capfd, state, status):
    scontrol(f"JobId=7 {state} Restarts=0 NodeList=node1")
    output = tmp_path / "slurm-7.log"
    output.write_text("launcher | done\n")
    assert slurm.follow("7", output) == status
    assert "launcher | done\n" in capfd.readouterr().out


def test_the_program_of_the_batch_script_shows_its_plan_and_starts_nothing(capsys):
    assert place_slurm.main([str(ENTRY), "--config", str(CONFIG), "allocation_mode=sglang.d1+d1", "--dry-run"]) == 0
    assert "Slurm" in capsys.readouterr().out


def test_without_slurm_nothing_is_submitted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = [str(ENTRY), "--config", str(CONFIG), f"cluster.fileroot={tmp_path}", "actor.path=Qwen/Qwen3-8B"]
    assert slurm.main(argv) == 2
    assert "sbatch must be in PATH" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_written_is_told(scontrol, tmp_path, capsys):
    scontrol("")
    (tmp_path / "scontrol").rename(tmp_path / "sbatch")
    (tmp_path / "file").write_text("no folder")
    argv = [str(ENTRY), "--config", str(CONFIG), f"cluster.fileroot={tmp_path}/file", "actor.path=Qwen/Qwen3-8B"]
    assert slurm.main([*argv, "launcher.preflight=false"]) == 2
    assert (
        f"ConfigError: {tmp_path}/file/" in (message := capsys.readouterr().err) and "must be writable: got" in message
    )


def test_a_signal_that_slurm_does_not_pass_on_is_told(scontrol, tmp_path):
    """Else Ctrl-C would promise a checkpoint and an end, and the job would run on."""
    scontrol("JobId=7 JobState=RUNNING ExitCode=0:0")
    (tmp_path / "scancel").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "scancel").chmod(0o755)
    code = "import pathlib, sys; from arealite.launcher import slurm; slurm.follow('7', pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "slurm-7.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None and "submitted" in follower.stdout.readline()
            assert "running on" in follower.stdout.readline()
            for advice in ("cancels the job", "leaves it alone"):
                follower.send_signal(signal.SIGINT)
                message = follower.stdout.readline()
                assert "received SIGINT: the job was not reached (Command" in message
                assert message.endswith(f"returned non-zero exit status 1.); once more {advice}\n")
        finally:
            follower.kill()


def test_a_reader_that_leaves_ends_what_is_shown_of_a_job(scontrol, tmp_path):
    """As in `... | head`: without a traceback, and the job goes on."""
    cancelled = tmp_path / "cancelled"
    scontrol("7")
    (tmp_path / "scontrol").rename(tmp_path / "sbatch")
    scontrol("JobId=7 JobState=RUNNING ExitCode=0:0")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" > {cancelled}\n')
    (tmp_path / "scancel").chmod(0o755)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "arealite.launcher.slurm", str(ENTRY), "--config", str(CONFIG)]
    command += [f"cluster.fileroot={tmp_path}/runs", "actor.path=Qwen/Qwen3-8B", "launcher.preflight=false"]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=DEADLINE_S, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
    assert list(tmp_path.glob("runs/*/*/job.sbatch")) and not cancelled.exists()


def test_a_signal_reaches_the_job_also_while_nobody_reads_the_output(scontrol, tmp_path):
    """As after Ctrl-S, or in a pager."""
    cancelled, output = tmp_path / "cancelled", tmp_path / "slurm-7.log"
    scontrol("JobId=7 JobState=RUNNING ExitCode=0:0")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" > {cancelled}\n')
    (tmp_path / "scancel").chmod(0o755)
    output.write_bytes(b"line\n" * 100_000)
    code = "import pathlib, sys; from arealite.launcher import slurm; slurm.follow('7', pathlib.Path(sys.argv[1]))"
    follower = subprocess.Popen([sys.executable, "-c", code, str(output)], stdout=subprocess.PIPE)
    try:
        waits = Path(f"/proc/{follower.pid}/syscall")
        deadline = time.monotonic() + DEADLINE_S
        while not waits.read_text().startswith("1 0x1 "):  # write(1, ..), which the full pipe keeps
            assert follower.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        follower.send_signal(signal.SIGTERM)
        while not cancelled.exists() or not cancelled.read_text():
            assert follower.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert cancelled.read_text() == "7 --batch --signal=TERM\n"
    finally:
        follower.kill()
        follower.communicate()
