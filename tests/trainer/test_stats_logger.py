import itertools
import json
import logging
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from testing_trace import read_spans

from arealite.api.cli_args import ClusterSpecConfig, GRPOConfig, SFTConfig, StatsLoggerConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.api.run_folder import RunFolder
from arealite.trainer.checkpoint import config_of_step
from arealite.trainer.stats_logger import StatsLogger, write_config
from arealite.utils import trace
from arealite.utils.files import FileError

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=40, train_batch_size=4)


def stats_config(folder: Path) -> StatsLoggerConfig:
    return StatsLoggerConfig(experiment_name="exp", trial_name="t0", fileroot=str(folder))


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "exp/t0/metrics.jsonl").read_text().splitlines()]


def test_a_row_per_step_flushed_when_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC)
    for step in range(3):
        with stats.timer("rollout"):
            stats.add({"reward/mean": 0.25 * step, "staleness/max": step, "perf/processed_tokens": 500.0})
        returned = stats.commit(step)
        assert returned["perf/tokens_per_s"] == pytest.approx(500 / returned["time/step_s"])
        assert read(tmp_path)[-1] == {"step": step, **returned}
    assert [row["reward/mean"] for row in read(tmp_path)] == [0.0, 0.25, 0.5]
    lines = capsys.readouterr().out.splitlines()
    assert [re.search(r"step +(\d+)/10 \| reward +([0-9.]+)", line)[2] for line in lines] == ["0", "0.250", "0.500"]
    stats.close()


def test_not_finite_is_null_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC)
    with caplog.at_level(logging.WARNING, logger="arealite.stats"):
        for step, norm in enumerate((1.0, math.inf, math.nan, 2.0)):
            stats.add({"optim/grad_norm": norm})
            stats.commit(step)
    assert [row["optim/grad_norm"] for row in read(tmp_path)] == [1.0, None, None, 2.0]
    assert [record.getMessage() for record in caplog.records] == ["step 1: optim/grad_norm not finite: stored as null"]
    stats.close()


def test_what_may_be_secret_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of environment variables, however they came into the config: the stored one is for its owner alone."""
    monkeypatch.setenv("MY_KEY", "sk-1234")
    monkeypatch.setenv("MY_FOLDER", "/my/models")
    (tmp_path / "config.yaml").write_text(
        "{experiment_name: exp, trial_name: t0, actor: {path: '${oc.env:MY_FOLDER}/a'},"
        "tokenizer_path: '${actor.path}', train_dataset: {path: gsm8k, batch_size: 4},"
        "launcher: {trainer_env_vars: 'A=sk-1234,B=sk-1234=x'},"
        f"cluster: {{fileroot: {tmp_path}}}, seed: '${{oc.decode:${{oc.env:MY_SEED,3}}}}',"
        "stats_logger: {wandb: {mode: offline, settings: {api_key: '${oc.env:MY_KEY}'},"
        " tags: [a, 'b-${oc.env:MY_KEY}']}}}"
    )
    config, _ = load_expr_config(["--config", str(tmp_path / "config.yaml")], GRPOConfig)
    assert config.stats_logger.wandb["settings"] == {"api_key": "sk-1234"} and config.seed == 3
    assert config.launcher.trainer_env_vars == "A=sk-1234,B=sk-1234=x"
    sent: list[dict] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: sent.append(options), finish=list))
    StatsLogger(config.stats_logger, FT_SPEC, experiment=config).close()
    file = tmp_path / "exp/t0/config.yaml"
    text = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600 and "trainer_env_vars: A=sk-1234,B=sk-1234=x" in text
    shown = sent[0]["config"]
    assert "sk-1234" not in str(shown) and sent[0]["settings"] == {"api_key": "sk-1234"}
    assert shown["launcher"]["trainer_env_vars"] == "A=***,B=***" and shown["seed"] == 3
    assert shown["actor"]["path"] == shown["tokenizer_path"] == "***" and shown["train_dataset"]["path"] == "gsm8k"
    assert shown["stats_logger"]["wandb"]["tags"] == ["a", "***"]
    report = (tmp_path / "exp/t0/report.html").read_text()
    assert "sk-1234" not in report and "A=***,B=***" in report
    for name in ("MY_KEY", "MY_FOLDER"):  # as on a node from which a server joins
        monkeypatch.delenv(name)
    again, _ = load_expr_config(["--config", str(file)], GRPOConfig)
    assert again.model_dump() == config.model_dump()


def test_config_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = GRPOConfig(experiment_name="exp", trial_name="t0", cluster=ClusterSpecConfig(fileroot=str(tmp_path)))
    config.rollout.max_head_offpolicyness = 3
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC, experiment=config)
    assert "max_head_offpolicyness: 3" in (tmp_path / "exp/t0/config.yaml").read_text()
    stats.add({"eval/version": 0, "eval/accuracy": 0.25})
    for step in range(2):
        stats.add({"optim/grad_norm": 1.0, "perf/trained_tokens": 10, "staleness/mean": 0.5, "staleness/max": step})
        stats.commit(step)
    stats.add({"eval/version": 2, "eval/accuracy": 0.75})
    stats.commit(2)
    stats.close({"seed": 5})
    summary = json.loads((tmp_path / "exp/t0/summary.json").read_text())
    assert summary.pop("wall_s") == pytest.approx(sum(row["time/step_s"] for row in read(tmp_path)))
    assert summary == {"is_finished": True,
        "steps": 2, "trained_tokens": 20, "staleness_max": 1, "max_head_offpolicyness": 3,
        "accuracy_before": 0.25, "accuracy_after": 0.75, "seed": 5,
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "step  0/10 " in out and "staleness 0.5/3" in out


def test_every_nth_step_and_every_evaluation_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = stats_config(tmp_path)
    config.line_freq_steps = 3
    stats = StatsLogger(config, FT_SPEC)
    for step in range(6):
        stats.add({"sft/loss": 1.0} | ({"eval/loss": 2.0} if step == 4 else {}))
        stats.commit(step)
    stats.close()
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("done: ") and last.endswith("report.html")
    assert [line.split("/")[0].split()[-1] for line in lines] == ["0", "3", "4"]
    assert [row["step"] for row in read(tmp_path)] == list(range(6))


def test_a_run_that_goes_wrong_is_told_once_below_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config := stats_config(tmp_path)).line_freq_steps = 100
    stats = StatsLogger(config, FT_SPEC)
    for step in range(6):
        stats.add({"reward/mean": 0.5, "policy/mismatch_kl": 1e-3 if step < 2 else 2600.0})
        stats.commit(step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0].split()[1] for line in lines] == ["0", "3", "3"]
    assert lines[2].startswith(
        "step 3 WARNING: the policy has left what samples it (mismatch_kl 2.6e+03). Lower actor."
    )


def test_slow_steps_have_a_line_each_half_minute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1000.0, 5.0)  # a step looks at it three times
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    config = stats_config(tmp_path)
    config.line_freq_steps = 100
    stats = StatsLogger(config, FT_SPEC)
    for step in range(8):
        with stats.timer("train"):
            pass
        stats.commit(step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0].split()[-1] for line in lines] == ["0", "2", "4", "6"]


def test_an_sft_run_has_no_staleness(tmp_path: Path) -> None:
    config = SFTConfig(experiment_name="exp", trial_name="t0", cluster=ClusterSpecConfig(fileroot=str(tmp_path)))
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC, experiment=config)
    stats.add({"sft/loss": 1.0, "optim/grad_norm": 1.0})
    stats.commit(0)
    stats.close()
    assert json.loads((tmp_path / "exp/t0/summary.json").read_text()).keys() == {"steps", "wall_s", "is_finished"}


def test_two_evaluations_are_not_averaged(tmp_path: Path) -> None:
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC)
    stats.add(None)
    stats.add({"eval/version": 0, "eval/accuracy": 0.2})
    with pytest.raises(ValueError, match="one evaluation: got versions 0 and 1"):
        stats.add({"eval/version": 1, "eval/accuracy": 0.4})
    assert stats.commit(0)["eval/accuracy"] == 0.2
    stats.add({"eval/version": 1, "eval/accuracy": 0.4})
    assert stats.commit(1)["eval/accuracy"] == 0.4
    stats.close()


def test_a_run_that_goes_on_keeps_the_rows_before(tmp_path: Path) -> None:
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC)
    for step in range(4):
        stats.add({"optim/grad_norm": 0.1 * step, "perf/trained_tokens": 10.0, "eval/accuracy": step})
        stats.commit(step)
    stats.close()
    folder, rows = tmp_path / "exp/t0", read(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "optim/gr')  # a crash
    resumed = StatsLogger(stats_config(tmp_path), FT_SPEC, start_step=2)
    assert read(tmp_path) == rows[:2]
    assert not (folder / "summary.json").exists() and not (folder / "report.html").exists()
    resumed.add({"optim/grad_norm": 7.0, "perf/trained_tokens": 5.0, "eval/accuracy": 9.0})
    resumed.commit(2)
    resumed.close()
    assert [row["optim/grad_norm"] for row in read(tmp_path)] == [0.0, 0.1, 7.0]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["trained_tokens"], summary["accuracy_after"]) == (3, 25, 9.0)


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC)
    stats.add({"reward/mean": 1.0})
    assert stats.commit(0)["reward/mean"] == 1.0
    stats.close()
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_joined_after_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = SFTConfig(experiment_name="exp", trial_name="t0", cluster=ClusterSpecConfig(fileroot=str(tmp_path)))
    assert (config.num_traced_steps, config.new(perf_trace=True).num_traced_steps) == (0, 20)
    config.perf_trace = 2
    StatsLogger(stats_config(tmp_path), FT_SPEC, experiment=config).close()
    assert "perf_trace has no effect" in caplog.text, "no launcher has named a folder"
    monkeypatch.setenv(trace.FOLDER_VARIABLE, str(tmp_path / "parts"))
    monkeypatch.setattr(trace, "_writer", None)
    trace.start("trainer-0")
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC, experiment=config, start_step=3)
    path = tmp_path / "exp/t0/trace.json.gz"
    for step in range(3, 8):
        with stats.timer("update"):
            assert path.exists() == (step > 5)
        row = stats.commit(step)
        if step == 3:
            first = row
    stats.close()
    spans = {one.name: one for one in read_spans(path)}
    assert [name for name in spans if "step" in name] == ["step 3", "step 4", "step 5"]
    assert spans["step 3"].length_s == pytest.approx(first["time/step_s"], abs=1e-5)


def test_a_reward_that_is_not_0_or_1_takes_the_accuracies_of_its_run(tmp_path: Path) -> None:
    """From the step on in which it was sampled, and after a resume."""
    held_out = {"eval/reward": 0.0, "eval/accuracy": 0.0, "eval/accuracy_low": 0.0, "eval/accuracy_high": 0.3}
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC)
    found = list[bool]()
    for other in (0.0, 1.0, 0.0):
        stats.add(held_out | {"reward/other_max": other})
        found.append("eval/accuracy" in stats.commit(len(found)))
    assert found == [True, False, False]
    for start_step, is_accuracy in ((2, False), (1, True)):
        resumed = StatsLogger(stats_config(tmp_path), FT_SPEC, start_step=start_step)
        resumed.add(held_out)
        row = resumed.commit(start_step)
        assert ("eval/accuracy_high" in row) == is_accuracy and row["eval/reward"] == 0.0
    resumed.close()
    assert "accuracy_after" in json.loads((tmp_path / "exp/t0/summary.json").read_text())


def test_a_report_that_cannot_be_written_is_logged_and_fails_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = StatsLogger(stats_config(tmp_path), FT_SPEC)
    stats.add({"reward/mean": 1.0})
    stats.commit(0)
    folder = tmp_path / "exp/t0"
    (folder / "report.html").mkdir()
    stats.close()
    assert "report.html was not written: " in caplog.text and f"arealite report {folder}" in caplog.text
    assert capsys.readouterr().out.splitlines()[-1] == f"done: {folder}"
    assert (folder / "summary.json").exists()


def configs(folder: Path, steps: int) -> str:
    return "".join(config_of_step(RunFolder(folder), step).read_text() for step in range(steps))


def test_every_step_has_the_config_it_was_trained_under(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_config(run, "a", start_step=0)
    write_config(run, "a", start_step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "nothing has changed"
    write_config(run, "b", start_step=3)
    assert configs(tmp_path, 6) == "aaabbb"
    write_config(run, "c", start_step=5)
    assert configs(tmp_path, 7) == "aaabbcc"
    write_config(run, "d", start_step=4)
    assert configs(tmp_path, 7) == "aaabddd", "step 4 is done again"
    write_config(run, "d", start_step=2)
    assert configs(tmp_path, 7) == "aaddddd", "the run went back behind the first change"
    write_config(run, "e", start_step=0)
    assert configs(tmp_path, 3) == "eee" and len(list(tmp_path.iterdir())) == 1


def test_a_config_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.config.write_bytes(b"trial_name: caf\xe9\n")
    with pytest.raises(FileError, match=r"config\.yaml must be as its writer left it"):
        write_config(run, "a", start_step=1)
