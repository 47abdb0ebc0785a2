"""`arealite simulate` on a run whose constants are known, and on a config for a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from testing_simulated import CONFIG, KEYS, write_simulated
from tiny_models import save_qwen3

from arealite.cli.main import main

BOUND, NUMBER = "rollout.max_head_offpolicyness", "allocation_mode"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_simulated(tmp_path_factory.mktemp("runs"))[0].path)


def lines(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines()]


def test_variants_come_in_the_order_of_their_values_after_what_was_measured(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--vary", f"{BOUND}=2,0", "--vary", f"{NUMBER}=lite.d1+d1,lite.d4+d1", "--steps", "6", "--json"]
    assert main(["simulate", run, *options]) == 0
    rows = lines(capsys.readouterr().out)
    names = [f"{BOUND}={bound} {NUMBER}=lite.d{number}+d1" for bound in (2, 0) for number in (1, 4)]
    assert [row["run"] for row in rows] == ["measured", "as is", *names]
    by_name = {row["run"]: row for row in rows}
    assert by_name[names[0]]["step_s"] > by_name["as is"]["step_s"] > by_name[names[1]]["step_s"]
    assert by_name[names[2]]["max_staleness"] == 0 < by_name[names[0]]["max_staleness"] <= 2
    assert main(["simulate", run, *options]) == 0
    assert lines(capsys.readouterr().out) == rows


def test_the_table_stands_beside_what_was_measured_and_says_what_decides(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", run, "--vary", f"{BOUND}=0"]) == 0
    output = capsys.readouterr().out
    cells = [re.split(r"\s{2,}", line) for line in output.splitlines()]
    table = {row[0]: row[1:] for row in cells if len(row) > 5}
    assert float(table["as is"][0]) == pytest.approx(float(table["measured"][0]), rel=0.08)
    assert table[f"{BOUND}=0"][5] == "0.00 (0)"
    assert re.fullmatch(r"stragglers, servers \d\d% used", table[f"{BOUND}=0"][6])
    assert "\nstragglers: it waits for the longest completions." in output
    assert re.search(r"^Assumed: what .* took, on machines as busy as then\.", output, re.MULTILINE)


def test_the_default_concurrency_is_judged_as_what_it_is(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Three batches of 4 at a bound of 2."""
    assert main(["simulate", run, "--vary", "rollout.max_concurrent_rollouts=12,null", "--steps", "8", "--json"]) == 0
    *_, given, default = lines(capsys.readouterr().out)
    assert default["used"] == pytest.approx(given["used"], rel=0.1)


def test_failures_and_a_page(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    options = ["--fail", "crash=20", "--fail", "slow=0.5", "--vary", f"{NUMBER}=lite.d6+d1", "--page", str(page)]
    assert main(["simulate", run, *options, "--json", "rollout.weight_update_timeout=20"]) == 0
    measured, as_is, six = lines(capsys.readouterr().out)
    assert as_is["decides"] in ("servers", "stragglers", "trainer", "publication") and six["deaths"] > 0
    text = page.read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    drawn = json.loads(data)["drawn"][six["run"]]
    assert len(drawn["moments"]) == len(drawn["servers"]) == 20 and len(drawn["deaths"]) == six["deaths"]
    assert all(len(servers) == 6 for servers in drawn["servers"])
    assert all(busy <= 1.001 for servers in drawn["servers"] for busy, running in servers)
    assert sum(drawn["staleness"].values()) > 0
    assert json.loads(data)["rows"] == [measured, as_is, six]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_a_run_that_fails_has_its_failure_for_a_verdict(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every completion exceeds its deadline."""
    assert main(["simulate", run, "rollout.episode_timeout=0.01", "rollout.episode_retries=0"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("as is"))
    assert re.fullmatch(r"as is\s+\w+Error: .*", line)


def test_a_config_is_simulated_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_qwen3(tmp_path / "model", seed=1)
    options = ["--gpu", "h100", "--lengths", "32,0.5,8", "--steps", "4", "--json", "--vary", f"{BOUND}=0"]
    assert main(["simulate", str(CONFIG), *options, *KEYS[1:], f"actor.path={model}"]) == 0
    as_is, synchronous = lines(capsys.readouterr().out)
    assert as_is["train"] > 0.5 and as_is["decides"] == "trainer"  # a second each, for a model of no size
    assert synchronous["rollout"] > as_is["rollout"] and synchronous["max_staleness"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([str(CONFIG), "actor.path=/m"], "--gpu must be given for a config without a run: got none."),
        (["RUN", "--vary", "rollout.seed"], "--vary must be key=a,b: got 'rollout.seed'."),
        (["RUN", "--vary", "rollout.no_key=1"], "rollout.no_key must be a key of GRPOConfig"),
        (["RUN", "--fail", "melt=1"], "--fail must be crash=S, hang=S or slow=SHARE: got 'melt=1'."),
        (["RUN", "--steps", "0"], "--steps must be above 0: got 0."),
        (["RUN", "allocation_mode=lite.d1|d1"], "allocation_mode must be servers + trainers to simulate it"),
        (["/nowhere", "--gpu", "h100"], "--config must name a YAML file: got '/nowhere'"),
    ],
)
def test_mistakes(run: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *(run if word == "RUN" else word for word in words)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
