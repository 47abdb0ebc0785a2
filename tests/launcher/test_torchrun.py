"""What to type on each node, printed from the plan of the other launchers."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.launcher import torchrun
from arealite.utils.secret import SECRET_FILE

EXAMPLES = Path(__file__).parents[2] / "examples" / "arealite"
CONFIG = str(EXAMPLES / "configs" / "gsm8k_grpo_cpu.yaml")
ENTRY = str(EXAMPLES / "gsm8k_grpo.py")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert torchrun.main([ENTRY, "--config", CONFIG, *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_node_gets_its_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "gsm8k-grpo-cpu" / "trial0"
    words = [f"actor.path={tmp_path}", f"cluster.fileroot={tmp_path}", "launcher.trainer_threads=2"]
    words += ["launcher.preflight=false"]
    words += ["allocation_mode=lite.d3+d3", "cluster.n_nodes=3", "launcher.trainer_env_vars=A=b c"]
    lines = printed(capsys, *words)
    arguments = f"--config {CONFIG} {' '.join(words[:-1])} 'launcher.trainer_env_vars=A=b c'"
    serve = f"CUDA_VISIBLE_DEVICES='' arealite serve --join gsm8k-grpo-cpu/trial0 --host $HOST%d {arguments} &"
    variables = "CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=2 A='b c' "
    meeting = "--max-restarts 3 --local-addr $HOST%d --rdzv-backend c10d --rdzv-endpoint $HOST1:29400"
    trainer = f"{variables}torchrun --nnodes 2 --nproc-per-node %d {meeting} --rdzv-conf is_host=%d {ENTRY} {arguments}"
    assert lines[1:] == [
        "export HOST0=ADDRESS HOST1=ADDRESS HOST2=ADDRESS",
        f"export AREALITE_SECRET=$(cat {run / SECRET_FILE})",
        "# node 0",
        *[serve % 0] * 2,
        "# node 1",
        serve % 1,
        trainer % (1, 1, 1),
        "# node 2",
        trainer % (2, 2, 0),
    ]
    assert (run / SECRET_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("allocation", "message"),
    [("lite.d1+d1p2", "ConfigError"), ("sglang.d1|d1", "got arealite.launcher.torchrun, whose jobs")],
)
def test_a_config_that_can_not_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], allocation: str, message: str
) -> None:
    words = [f"actor.path={tmp_path}", f"cluster.fileroot={tmp_path}", f"allocation_mode={allocation}"]
    assert torchrun.main([ENTRY, "--config", CONFIG, *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
