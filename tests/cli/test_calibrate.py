"""What `arealite calibrate` measures, and the profile that it makes of it."""

import json
from pathlib import Path

import pytest
from testing_models import QWEN3_1_7B
from testing_quickstart import WORD_PROBLEMS, make_tiny_model

from arealite.api.cli_args import GRPOConfig
from arealite.cli.calibrate import fitted
from arealite.cli.calibrating import POINTS
from arealite.cli.main import main
from arealite.planner.cost import load_gpu, server_profile, training_s

CONFIG = Path(__file__).parents[2] / "examples" / "arealite" / "configs" / "gsm8k_grpo_cpu.yaml"


def test_the_profile_gives_what_was_measured() -> None:
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        tokenizer_path="m",
        allocation_mode="sglang.d1+d1",
        train_dataset={"path": "d", "batch_size": 8},
        actor={"path": "m", "dtype": "bfloat16"},
    )
    config.derive()
    true = load_gpu("h100") | {"decode_bandwidth": 0.6, "mfu": 0.3, "step_s": 1e-3, "sequence_s": 2e-5, "swap_s": 0.0}
    true |= {"prefill_flops": 0.4, "request_s": 2e-3, "train_s": 0.5, "publish_s": 0.25}
    server = server_profile(QWEN3_1_7B, true, num_gpus=1, slots=64)

    def decode_s(number: int, context: float) -> float:
        return server.step_s + number * (server.sequence_s + context * server.context_s)

    def train_s(tokens: int) -> float:
        return training_s(config, QWEN3_1_7B, true, num_tokens=tokens, context=72.0)

    points = {
        "decode": [(number, prompt + 32.0, decode_s(number, prompt + 32.0)) for number, prompt in POINTS],
        "prefill_s": server.prefill_s,
        "request_s": 2e-3,
        "train": [(576, train_s(576)), (2304, train_s(2304))],
        "publish_s": 0.25 + QWEN3_1_7B.num_parameters * 2 / server.bytes_per_s,
        "context": 72.0,
    }
    found = fitted(points, config, QWEN3_1_7B, load_gpu("h100"))
    assert found == pytest.approx(true, rel=0.01)


@pytest.mark.slow
def test_on_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, profile = make_tiny_model(tmp_path / "model"), tmp_path / "here.yaml"
    keys = [
        f"actor.path={model}",
        f"train_dataset.path={WORD_PROBLEMS}?train=16&test=4",
        f"cluster.fileroot={tmp_path}",
    ]
    assert main(["calibrate", str(CONFIG), "--out", str(profile), *keys]) == 0
    shown = capfd.readouterr().out
    assert shown.count("a step of decoding takes") == len(POINTS) and f"wrote {profile}" in shown
    found, (written,) = load_gpu(str(profile)), tmp_path.glob("calibrate/*/calibration.json")
    points = json.loads(written.read_text())
    assert [(number, context) for number, context, _ in points["decode"]] == [
        (n, prompt + 32.0) for n, prompt in POINTS
    ]
    assert all(seconds > 0 for *_, seconds in points["decode"]) and points["publish_s"] > 0
    assert points["train"][1][0] > 3 * points["train"][0][0] and found["mfu"] > 0
    assert main(["plan", str(CONFIG), "--gpu", str(profile), *keys]) == 0
