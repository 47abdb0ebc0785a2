"""`arealite check-loss` on functions that hold every property, and on functions with a bug that peers have shipped."""

import re
from pathlib import Path

import pytest

from arealite.algorithms.properties import LOSS_PROPERTIES
from arealite.cli.main import main

REPOSITORY = Path(__file__).parents[2]
FORM, SPLIT, MASKED, FINITE, SIGN = LOSS_PROPERTIES

LOSS = """
import math
import numpy as np
import torch
CALLS = []

def loss(logprobs, micro_batch):
    mask, rows = micro_batch["loss_mask"], micro_batch["segment_ids"]
    A = torch.where(mask, micro_batch["advantages"], 0.0)
    x = torch.where(mask, logprobs - micro_batch["proximal_logprobs"], 0.0).clamp(-20, 20)
    def sums(values, counted=mask):
        kept = torch.where(counted, values, 0.0)
        return torch.zeros(int(rows.max()) + 1, dtype=values.dtype).index_add(0, rows, kept)[rows]
    counts = sums(torch.ones_like(x)).clamp(min=1)
    r = x.exp()
    statistics = {"ratio": r.detach()}
    losses = -torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    BUG
    return losses, statistics
"""
FINE = {
    "ppo": "",
    "gspo": "losses = -A * (sums(x) / counts).exp().clamp(0.5, 1.5)",
    "straight_through": "losses = -A * (r / r.detach())",
    "clipped_almost_always": "losses = -torch.minimum(r * A, r.clamp(0.9999, 1.0001) * A)",
    "weighs": "losses = losses / 2",
    "counts_by_item": "losses = losses * mask.sum().item() / mask.sum()",
    "no_grad": "with torch.no_grad(): w = r.clamp(max=1.1) * (r < 3)\n    losses = -w * A * logprobs.where(mask, 0)",
    "float32": "losses = (-A * r).float()",
    "sloppy_where_the_actor_looks_not": "losses = torch.where(mask, losses, math.nan)",
}
BUGS = {
    "mean_inside": ("losses = losses.mean()", FORM),
    "python_float": ("statistics['ratio'] = 1.0", FORM),
    "statistics_with_gradient": ("statistics['ratio'] = r", FORM),
    "all_detached": ("losses = losses.detach()", SIGN),
    "in_place": ("micro_batch['advantages'].mul_(2)", FORM),
    "in_place_logprobs": ("logprobs.clamp_(max=-1.0)", FORM),
    "has_a_memory": ("CALLS.append(1); losses = losses * len(CALLS)", FORM),
    "raises": ("losses = micro_batch['old_logp']", FORM),
    "mean_over_the_micro_batch": ("losses = losses / mask.sum()", SPLIT),
    "whitens_over_the_micro_batch": ("losses = -r * (A - A.mean())", SPLIT),
    "sums_across_rows": ("losses = -A * x.cumsum(0).exp().clamp(0.5, 2)", SPLIT),
    "number_of_rows": ("losses = losses / (len(micro_batch['cu_seqlens']) - 1)", SPLIT),
    "no_mask": ("losses = -A * (logprobs - micro_batch['proximal_logprobs']).exp().clamp(max=9)", MASKED),
    "mask_after_exp": (
        "losses = torch.where(mask, -(logprobs - micro_batch['rollout_logprobs']).exp() * A, 0)",
        MASKED,
    ),
    "mask_by_product": ("losses = -logprobs * micro_batch['advantages'] * mask", MASKED),
    "shifted_mask": (
        "losses = -A * (sums(logprobs - micro_batch['proximal_logprobs'], mask.roll(1)) / 9).exp()",
        MASKED,
    ),
    "counts_all_tokens": ("losses = losses / sums(torch.ones_like(x), mask | True)", MASKED),
    "gspo_over_all_tokens": ("losses = -A * (sums(x) / sums(torch.ones_like(x), mask | True)).exp()", MASKED),
    "no_clamp": ("losses = -torch.where(mask, logprobs - micro_batch['proximal_logprobs'], 0.0).exp() * A", FINITE),
    "no_clamp_of_weights": (
        "losses = losses * torch.where(mask, x.detach() - micro_batch['rollout_logprobs'], 0.0).exp()",
        FINITE,
    ),
    "log_of_what_is_left": ("losses = losses - 0.1 * (-torch.where(mask, logprobs, -1.0).exp()).log1p()", FINITE),
    "unclamped_statistic": (
        "statistics['k'] = torch.where(mask, logprobs - micro_batch['rollout_logprobs'], 0.0).detach().square()",
        FINITE,
    ),
    "numpy": ("losses = -A * torch.from_numpy(np.exp(x.detach().numpy()))", SIGN),
    "sign": ("losses = -losses", SIGN),
}


def run(tmp_path: Path, source: str, name: str = "") -> int:
    (tmp_path / "mine.py").write_text(source)
    return main(["check-loss", f"{tmp_path / 'mine.py'}{name}"])


def failed(text: str) -> list[str]:
    return re.findall(r"^  FAILED +(.*):$", text, re.M)


@pytest.mark.parametrize("case", FINE)
def test_right_losses_hold_every_property(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(tmp_path, LOSS.replace("BUG", FINE[case]))
    text = capsys.readouterr().out
    assert (status, failed(text)) == (0, []), text


@pytest.mark.parametrize("case", BUGS)
def test_each_bug_is_found(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bug, title = BUGS[case]
    status = run(tmp_path, LOSS.replace("BUG", bug))
    text = capsys.readouterr().out
    assert status == 1 and title in failed(text), text
    assert len(text.splitlines()) <= 50, "one screen"


def test_a_failure_shows_by_how_much_and_on_which_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, LOSS.replace("BUG", "losses = losses / mask.sum()")) == 1
    lines = capsys.readouterr().out.splitlines()
    place = lines.index(f"  FAILED   {SPLIT}:")
    told = re.search(
        r"losses must be the same in micro-batches of rows \[\[0\], \[1\], \[2\]\] instead of one: "
        r"got losses (\S+), expected (\S+) for token \d of row 0$",
        lines[place + 1],
    )
    assert told and float(told[1]) == pytest.approx(float(told[2]) * 3 / 2, rel=1e-4), "3 tokens together, 2 in row 0"


SEVERAL = """
from functools import partial
from arealite.algorithms.objectives import ppo, reinforce
def other(one, two): return two["advantages"] * -one, {}
mine, number = partial(ppo, eps_clip=0.2, eps_clip_higher=0.2), 3
"""


@pytest.mark.parametrize(
    ("source", "name", "told"),
    [
        (None, "", "must run as far as its functions: got FileNotFoundError"),
        ("def f(:", "", "got SyntaxError: invalid syntax (mine.py, line 1). Correct it."),
        ("import torch\nimport nothing_such", "", "mine.py:2 in <module>. Correct it."),
        ("raise SystemExit(3)", "", "must run as far as its functions: got SystemExit: 3, at "),
        (
            SEVERAL,
            "",
            "a function whose first argument is logprobs: got ppo, reinforce, other. Name one",
        ),
        (
            SEVERAL,
            ":absent",
            "mine.py must have a function absent whose first argument is logprobs: got ppo",
        ),
        (SEVERAL, ":number", "mine.py must have a function number whose"),
        (SEVERAL, ":other", "mine.py must have a function other whose"),
    ],
)
def test_files_that_cannot_be_used(
    source: str | None,
    name: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if source is None:
        assert main(["check-loss", str(tmp_path / "absent.py")]) == 2
    else:
        assert run(tmp_path, source, name) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ") and told in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["mine", "reinforce", "ppo"])
def test_functions_by_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(tmp_path, SEVERAL, f":{name}")
    text = capsys.readouterr().out
    assert text.startswith(f"{name}(logprobs: ")
    assert (status, failed(text)) == ((1, [FORM]) if name == "ppo" else (0, [])), text
    assert ("missing 2 required keyword-only arguments" in text) == (name == "ppo")


def test_an_error_of_the_function_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "def loss(logprobs, micro_batch):\n    return micro_batch['old_logp'], {}\n") == 1
    assert re.search(r"must not raise: got KeyError: .*old_logp.*, at \S*mine.py:2 in loss", capsys.readouterr().out)


def test_the_page_s_own_functions_hold_every_property_by_its_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "algorithms.md").read_text()
    source = re.search(r"```python\n# my_loss.py\n(.*?)```", page, re.DOTALL)
    assert source
    (tmp_path / "my_loss.py").write_text(source[1])
    command = re.search(r"```sh\narealite (check-loss .*)\n```", page)
    assert command
    monkeypatch.chdir(tmp_path)
    assert main(command[1].split()) == 0
    told = capsys.readouterr().out
    assert told.count("  ok  ") == len(LOSS_PROPERTIES) and "FAILED" not in told
