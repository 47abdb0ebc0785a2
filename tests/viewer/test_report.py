import json
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing_rollouts import write_rows

from arealite.api.errors import ConfigError
from arealite.cli.main import main
from arealite.viewer.report import write_report
from arealite.viewer.samples import before_after, examples, spread_steps

NASTY = "</script><script>alert(1)</script><!-- {{plotly}} & \u2028 <img src=x onerror=alert(2)>"


def sample(index: int, *, step: int, reward: float, completion: str = "#### 4", sample: int = 0) -> dict[str, Any]:
    return {
        "prompt_id": f"{step}-{index}", "row": sample, "num_rows": 1, "sample": sample, "attempt": 0,
        "segments": [{"given": f"question {index}"}, {"sampled": completion}], "input_ids": [5, 6, 7, 8, 9],
        "logprobs": [0, 0, -1.0, -0.5, -0.3],
        "versions": [-1, -1, step - 1, step - 1, step], "loss_mask": [0, 0, 1, 1, 1], "reward": reward,
        "server": "127.0.0.1:1", "trained_step": step,
    }  # fmt: skip


def write_jsonl(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(folder: Path) -> Path:
    rows = [
        {"step": step, "reward/mean": 0.1 * step, "staleness/mean": 0.5, "staleness/max": 1.0, "optim/grad_norm": 1.0,
         "time/rollout_s": 2.0, "time/update_s": 1.0, "time/step_s": 3.5, "perf/trained_tokens": 100.0,
         "perf/processed_tokens": 150.0}
        for step in range(4)
    ]  # fmt: skip
    rows[0] |= {"eval/version": 0.0, "eval/accuracy": 0.25}
    last = {"eval/version": 4.0, "eval/accuracy": 0.75, "eval/accuracy_low": 0.7, "eval/accuracy_high": 0.8}
    rows.append({"step": 4, **last, "time/step_s": 1.0})
    write_jsonl(folder / "metrics.jsonl", rows)
    (folder / "config.yaml").write_text(f"experiment_name: e\nrollout:\n  max_head_offpolicyness: 2\nnote: '{NASTY}'\n")
    (folder / "summary.json").write_text('{"seed": 1}')
    for step in range(4):
        write_rows(folder / f"rollouts/step_{step}", [sample(i, step=step, reward=i % 2) for i in range(6)])
    write_rows(folder / "rollouts/eval_step_0", [sample(i, step=0, reward=i > 2) for i in range(4)])
    write_rows(
        folder / "rollouts/eval_step_4",
        [sample(i, step=4, reward=i in (0, 3), completion=NASTY) for i in (3, 2, 1, 0)],
    )
    return folder


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = [("", {})]
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attrs = self.tags[-1]
        name = f"{tag}#{attrs['id']}" if "id" in attrs else tag
        self.texts[name] = self.texts.get(name, "") + data


def parse(path: Path) -> tuple[Page, dict[str, Any]]:
    page = Page(path.read_text())
    return page, json.loads(page.texts["script#data"])


def cards_of(path: Path) -> dict[str, str]:
    return {label: value for label, value, _ in parse(path)[1]["run"]["cards"]}


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path))
    assert path == tmp_path / "report.html"
    page, data = parse(path)
    assert [tag for tag, _ in page.tags].count("script") == 12
    assert [attrs["src"] for _, attrs in page.tags if "src" in attrs] == []
    assert [attrs["href"] for _, attrs in page.tags if "href" in attrs] == ["data:,"]
    assert "default-src 'none'" in path.read_text()
    assert len(data["row"]) == len(data["snippets"]) == data["rows"]["count"] == 24
    assert [chart["title"] for chart in data["run"]["charts"]] == [
        "Held-out accuracy", "Reward", "Staleness", "Time per step", "Gradient norm",
    ]  # fmt: skip


def test_texts_stay_texts(tmp_path: Path) -> None:
    page, data = parse(write_report(make_run(tmp_path)))
    assert data["evaluations"]["pairs"][0]["after"] == [{"sampled": NASTY}]
    assert NASTY in data["run"]["config"]
    assert "img" not in {tag for tag, _ in page.tags}
    assert ["Held-out accuracy", "25.0% → 75.0%", "+50.0 points; 95 % interval 70.0% to 80.0%"] in data["run"]["cards"]
    (tmp_path / "config.yaml").write_text("experiment_name: '</title><img src=x>'\ntrial_name: t\n")
    page, data = parse(write_report(tmp_path))
    assert page.texts["title"].strip() == data["run"]["title"] == "</title><img src=x> / t"
    assert "img" not in {tag for tag, _ in page.tags}


def test_headline_numbers(tmp_path: Path) -> None:
    assert cards_of(write_report(make_run(tmp_path))) == {
        "Held-out accuracy": "25.0% → 75.0%", "Reward": "0 → 0.3", "Steps": "4", "Wall time": "15.0 s",
        "Trained tokens": "400", "Largest staleness": "1",
    }  # fmt: skip


def test_before_and_after_pairs_by_prompt(tmp_path: Path) -> None:
    found = before_after(make_run(tmp_path) / "rollouts")
    assert found is not None
    assert (found["first"], found["last"]) == (0, 4)
    assert [pair["change"] for pair in found["pairs"]] == ["learned", "never", "never", "kept"]
    assert found["counts"] == {"learned": 1, "kept": 1, "lost": 0, "never": 2}


def test_a_reward_that_is_not_0_or_1_is_never_called_accuracy(tmp_path: Path) -> None:
    """Not even if the first evaluation happened to see only such ones."""
    rows = [
        {"step": 0, "eval/version": 0, "eval/accuracy": 0.0, "eval/accuracy_low": 0.0, "eval/accuracy_high": 0.3},
        {"step": 4, "eval/version": 4, "eval/reward": -0.75, "eval/reward_low": -1.0, "eval/reward_high": -0.5},
    ]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    for step, rewards in ((0, (0, 0, 0)), (4, (-0.75, 0, 2.5))):
        lines = [sample(i, step=step, reward=reward) for i, reward in enumerate(rewards)]
        write_rows(tmp_path / f"rollouts/eval_step_{step}", lines)
    path = write_report(tmp_path)
    _, data = parse(path)
    (card,) = [card for card in data["run"]["cards"] if card[0].startswith("Held")]
    assert card == ["Held-out reward", "0 → -0.75", "-0.75; 95 % interval -1 to -0.5"]
    (chart,) = data["run"]["charts"]
    assert chart["title"] == "Held-out reward" and chart["layout"]["yaxis"]["tickformat"] == ""
    (trace,) = chart["traces"]
    assert (trace["x"], trace["y"]) == ([0, 4], [0.0, -0.75])
    assert trace["error_y"]["array"] == [0.3, 0.25] and trace["error_y"]["arrayminus"] == [0.0, 0.25]
    assert [pair["change"] for pair in data["evaluations"]["pairs"]] == ["worse", "equal", "better"]
    assert data["evaluations"]["counts"] == {"better": 1, "equal": 1, "worse": 1}
    assert not data["evaluations"]["is_binary"]


def test_a_reward_of_training_that_is_not_0_or_1_makes_no_held_out_answer_right_or_wrong(tmp_path: Path) -> None:
    make_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/other_max": 1.0, "eval/reward": 0.5, "eval/version": 5}\n')
    (_, data), cards = parse(path := write_report(tmp_path)), cards_of(path)
    assert cards["Held-out reward"] == "0.25 → 0.5" and "Held-out accuracy" not in cards
    assert data["run"]["charts"][0]["title"] == "Held-out reward"
    found = data["evaluations"]
    assert (found["is_binary"], found["counts"]) == (False, {"better": 1, "equal": 3, "worse": 0})


TURNS = [{"given": "6 * 7?"}, {"sampled": "41"}, {"given": "That is wrong."}, {"sampled": "42"}]


def test_what_was_given_between_turns_is_told_from_what_was_sampled(tmp_path: Path) -> None:
    for step, turns in ((0, TURNS), (4, [TURNS[0], {"sampled": "42" * 5000}])):
        write_rows(tmp_path / f"rollouts/eval_step_{step}", [sample(0, step=step, reward=0) | {"segments": turns}])
    (pair,) = (before_after(tmp_path / "rollouts") or {})["pairs"]
    assert (pair["prompt"], pair["before"]) == ("6 * 7?", TURNS[1:])
    assert pair["after"] == [{"sampled": "42" * 3000 + "\n... 4000 more characters"}]
    both = [sample(1, step=0, reward=n, sample=n) | {"segments": turns} for n, turns in enumerate((TURNS[1:], TURNS))]
    write_rows(tmp_path / "rollouts/sampled", both)
    (pair,) = (examples(tmp_path / "rollouts") or {})["pairs"]
    assert (pair["prompt"], pair["before"], pair["after"]) == ("", TURNS[1:], TURNS[1:]), "nothing was given first"


def test_prompts_of_an_evaluation_may_have_any_name_and_no_reward(tmp_path: Path) -> None:
    """Those that say where they stand in the data set come in its order, whatever their epoch; then the others."""
    names = ("b-x", "7-10", "", "-1-9", "no index", "0-" + "9" * 5000)
    for step in (0, 4):
        lines = [sample(0, step=step, reward=float(step)) | {"prompt_id": name} for name in names]
        lines[1] |= {"prompt_id": f"{step}-10", "reward": None, "segments": [{"given": None}]}
        lines[-1] |= {"segments": [{"given": "long"}]}
        write_rows(tmp_path / f"rollouts/eval_step_{step}", lines)
    found = before_after(tmp_path / "rollouts")
    assert found is not None and found["counts"] == {"better": 5, "equal": 1, "worse": 0}
    assert [pair["change"] for pair in found["pairs"]] == ["better", "equal", "better", "better", "better", "better"]
    assert [pair["prompt"] for pair in found["pairs"]] == ["question 0", "", "question 0", "long", *["question 0"] * 2]
    for name in ("sampled", "greedy"):
        write_rows(tmp_path / f"rollouts/{name}", [sample(0, step=0, reward=1.0) | {"prompt_id": one} for one in names])
    shown = examples(tmp_path / "rollouts")
    assert shown is not None and shown["counts"] == {"always": 6, "sometimes": 0, "unsolved": 0}


@given(st.integers(1, 40))
def test_samples_are_spread_over_the_run(num_steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        for step in range(num_steps):
            (Path(name) / f"step_{step}").mkdir()
        found = spread_steps(Path(name))
    steps = [int(one.removeprefix("step_")) for one in found]
    assert (steps[0], steps[-1], len(steps)) == (0, num_steps - 1, min(num_steps, 12))
    assert set(found.values()) == {300 // len(steps)}


def test_the_first_rows_of_a_step_that_are_stored_are_shown(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 0}])
    not_stored = dict.fromkeys(("segments", "input_ids", "loss_mask", "logprobs", "versions"))
    for step in range(12):
        lines = [sample(i, step=step, reward=0) for i in range(40)]
        write_rows(tmp_path / f"rollouts/step_{step}", [lines[0] | not_stored, *lines[1:]])
    _, data = parse(write_report(tmp_path))
    assert data["rows"]["prompt_id"] == [f"{step}-{i}" for step in range(12) for i in range(1, 26)]


@pytest.mark.parametrize("missing", ["metrics.jsonl", "config.yaml", "summary.json", "rollouts"])
def test_what_is_missing_is_left_out(tmp_path: Path, missing: str) -> None:
    run = make_run(tmp_path / "run")
    for path in list(run.iterdir()):
        if path.name == missing:
            path.rename(tmp_path / path.name)
    _, data = parse(write_report(run))
    assert bool(data["run"]["charts"]) == (missing != "metrics.jsonl")
    assert bool(data["row"]) == (missing != "rollouts")


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "summary.json").unlink()
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: len(text) - 20])
    (last := run / "rollouts/step_3/0.parquet").rename(last.with_name(".0.parquet.unfinished"))
    _, data = parse(write_report(run))
    assert len(data["row"]) == 18
    assert "ended early: 4 steps so far" in data["run"]["lead"]


@pytest.mark.parametrize(
    ("config", "lead"),
    [
        ("model: {path: tiny}\ntrain_dataset: {path: gsm8k}", "Supervised fine-tuning of tiny on gsm8k"),
        ("model: {path: tiny}\ntrain_dataset: {path: rows, type: dpo}", "Preference optimization of tiny on rows"),
        ("model: {path: tiny}\ntrain_dataset: {path: rows, type: rw}", "Reward modelling of tiny on rows"),
        ("actor: {path: tiny, algorithm: rloo}", "rloo of tiny"),
        ("actor: {path: tiny}\nteacher: {path: big}", "Distillation of tiny"),
    ],
)
def test_the_page_says_what_was_run(tmp_path: Path, config: str, lead: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": i, "sft/loss": 2.0 - i, "time/step_s": 1.0} for i in range(2)])
    assert lead in parse(path := write_report(tmp_path))[1]["run"]["lead"]
    assert cards_of(path)["Loss"] == "2 → 1"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", "[1]\n"),
        ("metrics.jsonl", '{"step": 0, "optim/grad_norm": 1.0, "time/step_s": "long"}\n'),
        ("config.yaml", "5"),
        ("config.yaml", "rollout: [1]"),
        ("config.yaml", "x: *y"),
        ("summary.json", "{"),
        ("summary.json", "5"),
        ("rollouts/step_1/0.parquet", "{}\n"),
        ("rollouts/eval_step_0/0.parquet", "PAR1"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str) -> None:
    path = make_run(tmp_path) / name
    path.write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"FileError: {path} must be as its writer left it: got ")


def test_folders_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold metrics\.jsonl or .* run\.json: got none in .*nothing"):
        write_report(tmp_path / "nothing")
    make_run(tmp_path / "experiment" / "trial")
    with pytest.raises(ConfigError, match=r"must hold metrics\.jsonl or .* run\.json: got none in .*experiment"):
        write_report(tmp_path / "experiment")
    assert not (tmp_path / "experiment" / "report.html").exists()
