"""The benchmarks run: people judge what they measure, on a quiet machine."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.netns import why_impossible

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PARTS = {"canned_server", "circumstances", "model_configs", "original_peer", "trl_peer"}
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if path.stem not in PARTS)
TEXTS = {
    "agents": "ms by thread: arealite-",
    "async_vs_sync": "times as fast (",
    "data": "warm  first_batch_s",
    "engine": "lite / generate",
    "memory": "MiB planned / measured: parameters",
    "original": " and ours ",
    "runtime_overhead": "us by thread: arealite-rollout",
    "weight_sync": " MiB",
}
"""What the text of a script's first recorded result has, or of its fourth if the first lacks what is measured now."""


def measured(out: Path, *command: str) -> list[Any]:
    """Run a benchmark, and return what it writes, which is what it prints."""
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, BENCHMARKS / command[0], *command[1:], "--json", "--out", out]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=1800, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == out.read_text()
    return [json.loads(line) for line in done.stdout.splitlines()]


def loaded(script: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a benchmark defines."""
    if script == "core.py":
        pytest.importorskip("ray")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / script))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_prints_json_and_keeps_results(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = loaded(script, monkeypatch)["main"]
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    told = " ".join(capsys.readouterr().out.split())
    assert "[--json] [--out OUT]" in told and "[--json] [--out " in told.split(f"python benchmarks/{script}", 1)[1]
    assert "print JSON instead of text" in told and "append the results to this jsonl file" in told


@pytest.mark.parametrize("name", TEXTS)
def test_what_was_measured_reads_as_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described = loaded(f"{name}.py", monkeypatch)["described"]
    lines = (BENCHMARKS / "results" / f"{name}.jsonl").read_text().splitlines()
    assert TEXTS[name] in described(json.loads(lines[3 if name == "weight_sync" else 0]))


def last(name: str, *keys: str, **where: object) -> dict[str, Any]:
    """Return the last recorded result of a script with these keys and values."""
    rows = map(json.loads, (BENCHMARKS / "results" / f"{name}.jsonl").read_text().splitlines())
    fits = lambda row: row.keys() >= {*keys} and all(row.get(key) == value for key, value in where.items())  # noqa: E731
    return [row for row in rows if fits(row)][-1]


def quoted(name: str, key: str, *cases: str, of: str = "case", digits: int = 1, **where: object) -> str:
    return "; ".join(f"{last(name, key, **{of: case} | where)[key]:.{digits}f}" for case in cases)


ENGINE = ("equal", "exponential", "turns")
MEMORY = [last("memory", case=case)["terms"]["all"]["ratio"] for case in ("plain", "copies")]
QUOTES = {
    "asynchronous over our own": quoted("async_vs_sync", "ratio", "uniform", "long-tail", "tools", digits=2),
    "embedded server over": quoted("engine", "ratio_generate_s", *ENGINE, threads=2),
    "the same over vLLM": "; and ".join(quoted("engine", f"ratio_{one}_s", *ENGINE) for one in ("vllm", "sglang")),
    "an asynchronous step of": quoted("grpo_step", "asynchronous_wall_s_ratio", "fixed", "early", "tail"),
    "pause of generation": f"{1e3 * last('weight_sync', model='quickstart')['broadcast_pause_s']:.0f} ms; "
    f"{last('weight_sync', model='large')['broadcast_pause_s']:.1f} s",
    "memory of a training step": f"{min(MEMORY):.2f} to {max(MEMORY):.2f}",
    "seconds of a step on a worker": "; ".join(
        f"{last('core', case='step')[f'{one}_ratio']:.2f}" for one in ("migrated", "graph")
    ),
}


def test_the_table_of_the_readme_quotes_the_last_results() -> None:
    table = (BENCHMARKS.parent / "README.md").read_text().partition("## Measured")[2].partition("##")[0]
    rows = [
        line.strip("| ").rsplit(" | ", 1) for line in table.splitlines() if line.startswith("| ") and line != "| | |"
    ]
    assert dict(rows) == {
        name: next((quote for beginning, quote in QUOTES.items() if name.startswith(beginning)), None)
        for name, _ in rows
    }
    assert len(rows) == len(QUOTES)


def test_the_page_quotes_what_a_larger_bound_gains() -> None:
    page = (BENCHMARKS.parent / "docs" / "staleness.md").read_text()
    bounds, prompts, gains, staleness = (
        line.strip("| ").split(" | ")[1:]
        for line in page.splitlines()
        if line.startswith(("| bound |", "| prompts at once", "| times as fast", "| mean staleness of"))
    )
    for place, bound in enumerate(bounds):
        row = last("tools_bound", bound=int(bound), concurrency=int(prompts[place]))
        assert (f"{row['ratio']:.2f}", f"{row['staleness']:.1f}") == (gains[place], staleness[place])


def test_the_plot_of_large_clusters_shows_what_was_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = loaded("scale.py", monkeypatch)
    results = [json.loads(line) for line in scale["RESULTS"].read_text().splitlines()]
    assert scale["plot_of"](results) == scale["RESULTS"].with_suffix(".svg").read_text()


@pytest.mark.slow
def test_logprobs_are_measured(tmp_path: Path) -> None:
    sizes = ["--tokens", "512", "--hidden", "8", "--vocabulary", "100000", "--rounds", "1"]
    (found,) = measured(tmp_path / "found.jsonl", "logprob_memory.py", *sizes)
    assert found["gradient_distance"] < 1e-6 and found["memory_ratio"] > 1


@pytest.mark.slow
def test_the_runtime_is_measured(tmp_path: Path) -> None:
    (found,) = measured(tmp_path / "found.jsonl", "runtime_overhead.py", "--seconds", "0.1", "--case", "throughput")
    assert found["episodes"] % 256 == 0 and found["episodes"] > 0
    assert {"arealite-rollout", "arealite-ledger", "MainThread"} <= found["cpu_us_by_thread"].keys()


@pytest.mark.slow
def test_bursts_and_herds_are_measured(tmp_path: Path) -> None:
    sizes = ["--replies", "8", "--tokens", "4096", "--seconds", "0.3", "--settle", "2"]
    burst, herd = measured(tmp_path / "found.jsonl", "reply_burst.py", *sizes)
    assert burst["digest"] == "317712e0d0236dd8" and burst["lag_max_ms"] >= burst["lag_p99_ms"]
    assert sum(herd["before"]) == 60 and max(herd["before"] + herd["first_back"] + herd["all_back"]) <= 32


def test_a_stored_token_is_measured_in_the_file_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = loaded("runtime_overhead.py", monkeypatch)["main"]
    monkeypatch.setattr(sys, "argv", ["runtime_overhead.py", "--case", "log", "--json"])
    main()
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 256 * (32 + 512)
    assert 3 < found["bytes"] < 7 < 28 < found["json_bytes"] < 42
    assert min(found["cpu_us"], found["json_cpu_us"]) > 0


@pytest.mark.slow
def test_tools_are_hidden_by_a_larger_bound(tmp_path: Path) -> None:
    found = measured(tmp_path / "found.jsonl", "tools_bound.py", "--steps", "30")
    ratios = [one["ratio"] for one in found]
    assert 1.5 < ratios[0] < ratios[1] and [one["bound"] for one in found] == [1, 2, 4, 4, 8, 8, 8, 16]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_data_is_measured(tmp_path: Path, kind: str) -> None:
    (found,) = measured(tmp_path / "found.jsonl", "data.py", "--rows", "3000", "--type", kind)
    cold, warm = (sum(rank["cpu_s"] for rank in found[side]) for side in ("cold", "warm"))
    assert len(found["cold"]) == 2 and warm < cold / 2


@pytest.mark.slow
def test_agents_are_measured(tmp_path: Path) -> None:
    sizes = ["--runs", "16", "--turns", "2", "--delay", "3"]
    plain, packaged = measured(tmp_path / "found.jsonl", "agents.py", *sizes)
    assert (plain["client"], packaged["client"]) == ("aiohttp", "openai")
    for found in (plain, packaged):
        assert found["most_running"] == 16 and {"arealite-proxy", "arealite-agents"} <= found["cpu_ms_by_thread"].keys()


@pytest.mark.slow
def test_the_embedded_engine_is_measured(tmp_path: Path) -> None:
    sizes = ["--rounds", "1", "--threads", "1", "--case", "equal", "--case", "turns"]
    sizes += ["--side", "generate", "--side", "gemm"]
    equal, turns = measured(tmp_path / "found.jsonl", "engine.py", *sizes)
    assert [(one["case"], one["tokens"]) for one in (equal, turns)] == [("equal", 64 * 64), ("turns", 32 * 4 * 32)]
    for found in (equal, turns):
        for unit in ("s", "cpu_s"):
            rates = [found[f"{side}_tok_per_{unit}"] for side in ("lite", "generate")]
            assert found[f"ratio_generate_{unit}"] == pytest.approx(rates[0] / rates[1], rel=0.01)
        assert found["of_gemm_bound"] == pytest.approx(found["lite_tok_per_s"] / found["gemm_tok_per_s"], rel=0.01)
        assert found["lite_tok_per_cpu_s"] < found["gemm_tok_per_cpu_s"], "which computes a part of what lite does"


@pytest.mark.slow
def test_asynchronous_is_compared_with_synchronous(tmp_path: Path) -> None:
    sizes = ["--case", "tools", "--rounds", "1", "--steps", "2"]
    (found,) = measured(tmp_path / "found.jsonl", "async_vs_sync.py", *sizes)
    rates = [found[mode]["steps_per_s"] for mode in ("asynchronous", "synchronous")]
    assert found["ratios"] == [found["ratio"]] == [pytest.approx(rates[0] / rates[1], rel=0.01)]
    for mode in ("asynchronous", "synchronous"):
        shares = found[mode]
        assert 0.5 < shares["rollout"] + shares["train"] + shares["weights"] <= 1.001
        assert 0 <= shares["starved"] < 1 and shares["requests"] > 0 < shares["server"]


@pytest.mark.slow
def test_weight_updates_are_measured(tmp_path: Path) -> None:
    (found,) = measured(tmp_path / "found.jsonl", "weight_sync.py", "--model", "quickstart", "--rounds", "1")
    for way in ("broadcast", "disk", "no canary", "lora", "lora disk"):
        assert 0 < found[f"{way}_pause_s"] < found[f"{way}_whole_s"]
        assert found[f"{way}_pause_of_alone"] == pytest.approx(found[f"{way}_pause_s"] / found["alone_s"])
    assert found["lora_sent_mib"] < 0.5 * found["broadcast_sent_mib"] == 0.5 * found["mib"]


@pytest.mark.slow
def test_weight_updates_from_two_senders_are_compared_with_those_from_one(tmp_path: Path) -> None:
    if reason := why_impossible():
        pytest.skip(reason)
    two = ["--senders", "2", "--mbit", "50", "--rounds", "1", "--model", "quickstart"]
    (found,) = measured(tmp_path / "found.jsonl", "weight_sync.py", *two)
    seconds = found["whole_s_by_senders"]
    assert found["one_of_all"] == pytest.approx(seconds["1"] / seconds["2"])
    assert seconds.keys() == {"1", "2"} and min(seconds.values()) > 0
    first, second = found["mib_by_sender"]
    assert first + second == found["mib"] and 0.8 < first / second < 1.25


@pytest.mark.slow
def test_a_step_is_compared_with_that_of_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    sizes = ["--case", "early", "--rounds", "1", "--steps", "2", "--peer", sys.executable, "--peer-threads", "1"]
    (found,) = measured(tmp_path / "found.jsonl", "grpo_step.py", *sizes)
    assert found["synchronous_tokens"] == found["trl_tokens"] == pytest.approx(found["asynchronous_tokens"], rel=0.3)
    per_token = found["trl_s"] / found["trl_tokens"]
    for mode in ("asynchronous", "synchronous"):
        ratio = per_token / (found[f"{mode}_s"] / found[f"{mode}_tokens"])
        assert found[f"{mode}_wall_s_ratio"] == pytest.approx(ratio, rel=0.01)
        assert found[f"{mode}_cpu_s_spread"] == [found[f"{mode}_cpu_s_ratio"]] * 2


@pytest.mark.slow
def test_parts_of_the_original_are_compared(tmp_path: Path) -> None:
    rollout, lognormal, half = measured(tmp_path / "found.jsonl", "original.py", "--rounds", "1", "--seconds", "1")
    for unit in ("us", "cpu_us"):
        assert rollout[f"{unit}_ratio"] == pytest.approx(rollout[f"original_{unit}"] / rollout[f"ours_{unit}"])
        assert rollout[f"{unit}_spread"] == [rollout[f"{unit}_ratio"]] * 2
    assert lognormal["ours_micro_batches"] <= lognormal["original_micro_batches"] < 256
    assert half["ours_micro_batches"] == half["original_micro_batches"] == 1024


@pytest.mark.slow
def test_a_busy_machine_is_measured(tmp_path: Path) -> None:
    found = measured(tmp_path / "found.jsonl", "busy.py", "--rounds", "1", "--steps", "3")
    assert len(found) == 6 and all(row["step_s"] > 0 for row in found)
    assert [row["ratio"] for row in found if row["load_of_others"] == "quiet"] == [1.0, 1.0]


def test_a_part_that_has_become_slow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    main = loaded("gate.py", monkeypatch)["main"]
    for name, ratio in {"packing": 4.9, "runtime": 10.1, "publication": 5.9}.items():
        part = lambda rounds, ratio=ratio: [ratio] * rounds  # noqa: E731
        part.__name__ = name
        monkeypatch.setitem(main.__globals__, name, part)
    monkeypatch.setattr(sys, "argv", ["gate.py"])
    with pytest.raises(SystemExit, match=r"got more in runtime\."):
        main()


@pytest.mark.slow
def test_packing_is_measured(tmp_path: Path) -> None:
    found = measured(tmp_path / "found.jsonl", "packing.py", "--rows", "256", "--rounds", "2")
    lognormal, half, *deals = found
    assert lognormal["padded_fill"] < 0.5 < 0.95 < lognormal["fill"] <= 1
    assert half["fill"] == pytest.approx(5300 / 10_240, abs=1e-3) and half["micro_batches"] == 256
    assert min(one["useful_least"] for one in deals) > 0.9


@pytest.mark.slow
def test_core_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = {}
    for case in ("overlap", "scale"):
        sizes = ["--roles", "2", "--ranks", "1", "--rounds", "1"]
        (found[case],) = measured(tmp_path / f"{case}.jsonl", "core.py", "--case", case, *sizes)
    assert found["overlap"]["overlap"] > 1 and found["overlap"]["wall_s"] >= 1.0
    scale = found["scale"]
    assert scale["wall_s"] >= scale["told_s"] == 3.0 and scale["ranks"] == 2
    assert 0 < scale["scatter_cpu_s"] < scale["master_cpu_s"]


@pytest.mark.slow
def test_memory_is_measured_against_the_plan(tmp_path: Path) -> None:
    (found,) = measured(tmp_path / "found.jsonl", "memory.py", "--size", "small", "--case", "plain")
    terms = found["terms"]
    assert {terms[name]["ratio"] for name in ("parameters", "gradients", "AdamW moments")} == {1.0}
    for name in ("layers and the rest", "step", "all"):
        assert 0.9 < terms[name]["planned"] / terms[name]["measured"] < 1.1, name
    assert 0.9 < terms["forward and output layer"]["ratio"] < 1.25, "with room for the gradient of an entropy bonus"


@pytest.mark.slow
def test_what_a_gpu_is_wanted_for_runs_on_a_cpu(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["sh", BENCHMARKS / "gpu.sh", "--tiny", tmp_path / "found.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    train, beside, decode, grpo = (
        next(one for one in found if one.get("part") == part)
        for part in ("train", "train beside transformers", "decode", "grpo")
    )
    assert train["tok_per_s"] > 0 and train["tflop_per_s"] > 0 and train["device"] == decode["device"] == "cpu"
    assert beside["ratio"] == pytest.approx(beside["tok_per_s"] / beside["peer_tok_per_s"], rel=0.01)
    assert decode["of_bound"] == pytest.approx(decode["tok_per_s"] / decode["bound_tok_per_s"], abs=1e-3)
    assert decode["ratio"] == pytest.approx(decode["tok_per_s"] / decode["peer_tok_per_s"], rel=0.01)
    assert grpo["steps"] == 2 and grpo["step_s"] > 0 and grpo["mismatch_kl"] < 1e-3
    assert [one["case"] for one in found if "terms" in one] == ["plain"]
    assert [one["recomputes"] for one in found if one.get("part") == "train"] == [True, True, False, True]
    assert found[-1]["moments"] == "bfloat16"


@pytest.mark.slow
def test_a_part_that_fails_leaves_the_others_and_one_without_time_is_named(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": "false", "BUDGET_S": "35"}
    command = ["sh", BENCHMARKS / "gpu.sh", tmp_path / "found.jsonl", "8b", "train", "decode"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 1 and "FAILED: train decode, SKIPPED: 8b" in done.stdout


@pytest.mark.slow
def test_a_step_on_paper_is_that_of_the_page(tmp_path: Path) -> None:
    page = (BENCHMARKS.parent / "docs" / "models.md").read_text()
    for size, moments in (("0.6b", []), ("8b", ["--bf16-moments"])):
        (found,) = measured(tmp_path / f"{size}.jsonl", "gpu.py", "paper", "--size", size, *moments)
        assert sum(found["ms"].values()) == pytest.approx(found["step_ms"], abs=1)
        assert (
            f"{found['step_ms']:,.0f}" in page
            and f"{found['mfu']:.0%}; {found['mfu_at_75']:.0%}".replace("%", " %") in page
        )
