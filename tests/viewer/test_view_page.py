"""The page in a real Chromium, which `make test-view` brings playwright for."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testing_rollouts import write_rows
from testing_views import byte_tokenizer, row, write_metrics, write_run

from arealite.rollout.account.store import Update, write_update

pytestmark = pytest.mark.slow

Viewing = Callable[[Path], str]
NewPage = Callable[..., Any]
NASTY = "</script><img src=x onerror=alert(1)> {{title}}"
NUM_STEPS, NUM_ROWS = 100, 1000
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    assert executable is not None, "Chromium must be installed: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=[*ARGUMENTS])
        yield browser
        browser.close()


@pytest.fixture
def viewing() -> Iterator[Callable[[Path], str]]:
    """Runs `arealite view` and returns its address."""
    processes = list[subprocess.Popen[str]]()

    def view(folder: Path) -> str:
        command = [sys.executable, "-m", "arealite.cli.main", "view", str(folder)]
        processes.append(process := subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert process.stdout is not None
        return process.stdout.readline().strip()

    yield view
    for process in processes:
        process.send_signal(signal.SIGINT)
        with process:
            assert process.wait(120) == 0


@pytest.fixture
def new_page(browser: Any, viewing: object) -> Iterator[Callable[..., Any]]:
    """Makes pages whose consoles must stay empty, and which are closed before their server ends."""
    pages, said = list[Any](), list[str]()

    def new(**options: Any) -> Any:
        pages.append(page := browser.new_page(**options))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.set_default_timeout(120_000)
        return page

    yield new
    for page in pages:
        page.close()
    assert said == []


def counted(page: Any, text: str) -> None:
    """Wait until the list says how many trajectories it has."""
    page.wait_for_selector(f"#counts:text-is('{text}')")


def opened(page: Any, address: str, view: str = "rows") -> Any:
    page.goto(address.replace("#", f"#view={view}&"))
    return page


def test_from_the_list_of_runs_to_a_token(tmp_path: Path, viewing: Viewing, new_page: NewPage) -> None:
    write_run(tmp_path / "e/t0")
    write_rows(tmp_path / "e/t0/rollouts/step_1", [row("0-9", step=1, given=NASTY, sampled="Äh 4", sample=1)])
    write_run(tmp_path / "e/t1", num_steps=4)
    address = viewing(tmp_path)
    (page := new_page(viewport={"width": 1400, "height": 900})).goto(address)
    page.click("text=e/t0")
    page.wait_for_selector(".plot .main-svg")
    assert "token" not in page.url, "nobody shall read it over a shoulder"
    rewards = page.locator(".chart:has(h3:text-is('Reward'))")
    rewards.locator(".nsewdrag").hover(position={"x": 8, "y": 60})  # near step 0
    rewards.locator(".hoverlayer > *").first.wait_for(state="attached")  # Plotly's click is of the point it has shown
    rewards.locator(".nsewdrag").click(position={"x": 8, "y": 60})
    counted(page, "5 of 13")
    page.click("button[type=reset]")
    page.click("#tab-charts")
    page.focus("#tab-charts")
    page.keyboard.press("ArrowRight")
    counted(page, "13 of 13")
    page.keyboard.press("/")
    page.keyboard.type("onerror")
    counted(page, "1 of 13")
    page.focus("#rows .scroll")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#row .turn.given")
    assert page.inner_text("#row .turn.given pre") == NASTY and page.query_selector("#row img") is None
    page.click("#row .modes >> text=Tokens")
    page.focus(".tokens")
    for _ in range(len(NASTY) + 2):
        page.keyboard.press("ArrowRight")
    told = page.inner_text("#row .inspector")
    assert told == 'token 48 · "Ä" · id 226 · sampled true · logprob -0.5 · version 0 · probability 0.6065'
    page.select_option("#row .legend select", "versions")
    assert [*map(str.strip, page.locator("#row .legend span").all_inner_texts())] == ["version 0", "version 1"]
    page.reload()
    counted(page, "13 of 13")
    page.wait_for_selector("#row h2:text-is('Prompt 0-9, sample 1')")
    page.select_option("[name=outcome]", "failed: reward_timeout")
    counted(page, "1 of 13")
    page.focus("#rows .scroll")
    page.keyboard.press("Home")
    page.wait_for_selector("#row >> text=No update has trained on this prompt")
    assert "reward_timeout" in page.inner_text("#row .ledger")
    page.select_option("[name=outcome]", "issued")
    counted(page, "1 of 13")
    page.focus("#rows .scroll")
    page.keyboard.press("Home")
    page.wait_for_selector("#row >> text=The run is over and did not need it")
    page.keyboard.press("Escape")
    assert page.is_hidden("#row")
    page.click("#tab-runs")
    line = page.locator("#runs tbody tr", has_text="e/t1").locator("td")
    assert line.all_inner_texts()[2:6] == ["4", "0.3", "accuracy 75.0%", "finished"]
    page.check("[aria-label='Draw e/t1 beside']")
    page.click("#tab-charts")
    page.wait_for_selector("#charts .lead:has-text('beside it, dotted: e / t1')")
    page.wait_for_selector(".chart h3:has-text('Time per step seconds, of e / t0 only')")


def test_prompts_of_two_evaluations_and_of_two_runs(tmp_path: Path, viewing: Viewing, new_page: NewPage) -> None:
    """Rewards of each prompt in both, averaged over samples, sorted by the difference; a line opens both."""
    rewards = {"t0": {0: (0.0, 1.0, 0.5), 4: (1.0, 0.0, 0.5)}, "t1": {4: (0.25, 0.25, 1.0)}}
    for name, of_steps in rewards.items():
        write_metrics(tmp_path / name, range(4))
        for step, of_prompts in of_steps.items():
            rows = [row(f"{step}-{i}", step=step, reward=reward, sampled=f"{name} {step} {i}")
                    for i, reward in enumerate(of_prompts)]  # fmt: skip
            second = row(f"{step}-2", step=step, reward=1.0, sample=1)
            write_rows(
                tmp_path / name / f"rollouts/eval_step_{step}", [*rows, second, row(f"{step}-9{step}", step=step)]
            )
        write_rows(tmp_path / name / "rollouts/step_1", [row("0-1", step=1)])
    page = new_page(viewport={"width": 1400, "height": 900})
    page.goto(viewing(tmp_path).replace("#", "#view=rows&run=t0&"))
    counted(page, "11 of 11")
    page.click("#pairs summary")
    page.wait_for_selector("#pairs tbody tr")
    told = "3 prompts are in both: mean reward 0.583, then 0.583; 1 higher, 1 equal, 1 lower."
    assert page.inner_text("#pairs .note") == told

    def lines() -> list[list[str]]:
        return [line.split() for line in page.locator("#pairs tbody tr").all_inner_texts()]

    assert lines() == [["0", "0", "1", "+1"], ["2", "0.75", "0.75", "0"], ["1", "1", "0", "-1"]]
    page.click("#pairs .order")
    assert [line[0] for line in lines()] == ["1", "2", "0"]
    page.click("#pairs tbody button >> nth=0")
    page.wait_for_selector(".sides .turn.sampled >> nth=1")
    assert page.locator(".sides .turn.sampled pre").all_inner_texts() == ["t0 0 1", "t0 4 1"]
    page.click("#tab-runs")
    page.check("[aria-label='Draw t1 beside']")
    page.click("#tab-rows")
    page.select_option("#pairs select >> nth=0", label="evaluation at step 4")
    page.wait_for_selector("#pairs optgroup[label=t1]", state="attached")
    page.select_option("#pairs select >> nth=1", value='["t1","eval_step_4"]')
    page.wait_for_selector("#pairs .note:has-text('4 prompts are in both')")
    page.click("#pairs tbody button:text-is('0')")
    page.wait_for_selector(".sides .turn.sampled:has-text('t1 4 0')")


def test_what_the_update_made_of_a_token_and_the_branches_of_an_agent(
    tmp_path: Path, viewing: Viewing, new_page: NewPage
) -> None:
    write_metrics(tmp_path, [0])
    texts = [("2 + 2?", "4"), ("2 + 2?4Sure?", "yes"), ("2 + 9?", "11")]
    of_sample = {"sample": 3, "num_rows": 3}
    rows = [row("0-1", step=0, given=one, sampled=two, row=i, **of_sample) for i, (one, two) in enumerate(texts)]
    write_rows(tmp_path / "rollouts/step_0", [*rows, row("0-2", step=0)])
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.yaml").write_text(f"actor: {{path: {tmp_path}}}\n")
    lengths = [7, 15, 8, 7]
    numbers = {key: np.full(37, value, np.float32) for key, value in
               (("advantages", -0.5), ("logprob_gap", 0.25), ("log_ratio", 0.0))}  # fmt: skip
    numbers["log_ratio"][:7] = [np.nan] * 6 + [0.5]
    write_update(tmp_path / "rollouts/step_0/0.parquet", [Update([0, 0, 0, 1], lengths, numbers)], [True, True])
    page = opened(new_page(viewport={"width": 1400, "height": 900}), viewing(tmp_path))
    counted(page, "4 of 4")
    for branch, count in (("later", 2), ("first", 2)):
        page.select_option("[name=branch]", branch)
        counted(page, f"{count} of 4")
    page.select_option("[name=branch]", "")
    page.select_option("[name=order]", "step-up")
    page.focus("#rows .scroll")
    page.keyboard.press("Home")
    page.wait_for_selector(".branches")
    assert [" ".join(text.split()) for text in page.locator(".branches li").all_inner_texts()] == [
        "3.0 7 tokens 2 + 2?4 3.1 8 tokens after 7 of 3.0 Sure?yes 3.2 4 tokens after 4 of 3.0 9?11",
        "3.1 8 tokens after 7 of 3.0 Sure?yes",
        "3.2 4 tokens after 4 of 3.0 9?11",
    ]
    own = {kind: page.locator(f".branches .snippet .{kind}").all_inner_texts() for kind in ("given", "sampled")}
    assert own == {"given": ["2 + 2?", "Sure?", "9?"], "sampled": ["4", "yes", "11"]}
    page.click("#row .modes >> text=Tokens")
    colours = page.locator("#row .legend select option").all_text_contents()
    assert colours == [
        "sampled",
        "logprob",
        "version",
        "advantage",
        "ratio",
        "rollout importance weight",
        "logprob gap",
    ]
    page.select_option("#row .legend select", label="ratio")
    assert page.locator("#row .legend > span").all_inner_texts() == ["below 1, to 0.6065", "above 1, to 1.649"]
    page.hover(".tokens [data-token='6']")
    assert page.inner_text("#row .inspector") == (
        'token 6 · "4" · id 19 · sampled true · logprob -0.5 · version 0 · advantage -0.5 · logprob gap 0.25 · '
        "probability 0.6065 · ratio 1.649 · rollout importance weight 1.284"
    )
    page.hover(".tokens [data-token='5']")
    assert "advantage -0.5" in page.inner_text("#row .inspector")
    page.click(".branches button:text-is('3.2')")
    page.wait_for_selector("#row h2:text-is('Prompt 0-1, sample 3.2')")
    page.wait_for_selector(".branches button[aria-pressed=true]:text-is('3.2')")


def test_names_of_runs_are_no_markup_and_equal_ones_are_told_apart(
    tmp_path: Path, viewing: Viewing, new_page: NewPage
) -> None:
    for folder in ("a", "b"):
        write_metrics(tmp_path / folder, [0, 1])
        (tmp_path / folder / "config.yaml").write_text("experiment_name: <b>e</b>\ntrial_name: <img src=x>\n")
    page = new_page(viewport={"width": 1400, "height": 900})
    page.goto(viewing(tmp_path).replace("#", "#view=charts&run=a&beside=b&"))
    page.wait_for_selector("#charts .lead:has-text('beside it, dotted: b')")
    page.wait_for_selector(".legendtext:text-is('b: reward/mean')")
    assert page.inner_text("#charts .title") == "<b>e</b> / <img src=x>" and page.query_selector("main img") is None


def test_a_run_that_trains_and_resumes(tmp_path: Path, viewing: Viewing, new_page: NewPage) -> None:
    run = write_run(tmp_path / "t0", is_finished=False)
    address = viewing(run)
    page = opened(new_page(), address)
    counted(page, "12 of 12")
    write_metrics(run, [2, 3])
    write_rows(run / "rollouts/step_2", [row("0-9", step=2, sampled="more")])
    counted(page, "13 of 13")
    page.wait_for_selector(".snippet:text-is('more')")
    page.click("#tab-charts")
    page.wait_for_selector("#charts .card:has-text('0 → 0.3')")
    page.click("#tab-rows")
    page.fill("[name=text]", "more")
    counted(page, "1 of 13")
    shutil.rmtree(run / "rollouts/step_2")
    counted(page, "0 of 12")


def test_odd_names_missing_rewards_and_megabytes_of_text(tmp_path: Path, viewing: Viewing, new_page: NewPage) -> None:
    run, long = write_run(tmp_path / "t0"), "long " * 100_000
    for step in (0, 6):
        rows = [row(name, step=step, reward=reward) for name, reward in ((NASTY, None), ("x", 0.5), ("", float("nan")))]
        write_rows(run / f"rollouts/eval_step_{step}", rows)
    write_rows(run / "rollouts/step_2", [row("0-9", step=2) | {"segments": [{"given": long}, {"sampled": NASTY}]}])
    address = viewing(tmp_path)
    page = opened(new_page(), address)
    counted(page, "19 of 19")
    page.select_option("[name=order]", "prompt")
    page.fill("[name=text]", "onerror")
    counted(page, "1 of 19")
    page.focus("#rows .scroll")
    page.keyboard.press("ArrowDown")
    page.click("#row button:has-text('Show all 500,000 characters')")
    assert page.locator("#row .turn.given pre").evaluate("node => node.textContent") == long
    page.click("#tab-charts")
    page.wait_for_selector("#before-after .answer b:text-is('reward unknown')")
    assert page.locator("#before-after .pair").count() == 3 and page.query_selector("main img") is None


def test_without_the_token_the_page_says_what_to_do(tmp_path: Path, viewing: Viewing, browser: Any) -> None:
    write_run(tmp_path / "t0")
    address = viewing(tmp_path)
    page = browser.new_page()
    page.goto(address.partition("#")[0])
    page.wait_for_selector("#error:has-text('Open the address that `arealite view` printed')")
    page.close()


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_is_wider_than_the_window(tmp_path: Path, viewing: Viewing, new_page: NewPage, width: int) -> None:
    for name in ("t0", "t1"):
        write_run(tmp_path / name)
    address = viewing(tmp_path).replace("#", "#run=t0&beside=t1&")
    page = opened(new_page(viewport={"width": width, "height": 800}), address, "charts")

    def is_within(width: int) -> bool:
        return bool(page.evaluate("document.documentElement.scrollWidth") <= width)

    page.wait_for_selector(".plot .main-svg")
    page.click("#tab-rows")
    counted(page, "12 of 12")
    page.focus("#rows .scroll")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".compare")
    page.select_option(".compare select", index=1)
    page.wait_for_selector(".sides .turn")
    for tab in ("rows", "charts", "runs"):
        page.click(f"#tab-{tab}")
        assert is_within(width)
    page.set_viewport_size({"width": (narrow := width * 3 // 4), "height": 800})  # while the charts are hidden
    page.wait_for_timeout(500)  # so that Plotly has heard of it, in vain
    page.click("#tab-charts")

    def is_fitted() -> bool:
        plot, svg = (page.locator(f"#charts {name}").first.bounding_box() for name in (".plot", ".plot .main-svg"))
        assert plot is not None and svg is not None
        return abs(plot["width"] - svg["width"]) < 2

    deadline = time.monotonic() + 120  # Plotly waits a moment before it draws
    while not (is_within(narrow) and is_fitted()):
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)


def test_a_saved_page_needs_no_server(tmp_path: Path, viewing: Viewing, new_page: NewPage) -> None:
    run = write_run(tmp_path / "t0")
    address = viewing(run)
    page = opened(new_page(), address)
    counted(page, "12 of 12")
    page.select_option("[name=outcome]", "trained")
    counted(page, "8 of 12")
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(saved := tmp_path / "saved.html")
    page.close()
    shutil.rmtree(run)
    page = new_page()
    page.goto(f"{saved.as_uri()}#view=rows")
    counted(page, "8 of 8")
    page.fill("[name=text]", "2 + 2")
    page.fill("[name=reward-from]", "1")
    counted(page, "4 of 8")
    page.focus("#rows .scroll")
    page.keyboard.press("ArrowDown")
    page.click("#row .modes >> text=Tokens")
    assert page.inner_text("#row .tokens") == "2 + 2?4"
    assert "trained" in page.inner_text("#row .ledger") and page.is_hidden("#export")


def write_large_run(run: Path) -> None:
    """Write 100,000 trajectories: a step of 1,000, and copies."""
    write_metrics(run, range(NUM_STEPS))
    first = run / "rollouts/step_0"
    write_rows(first, [row(f"0-{i // 8}", step=0, sample=i % 8, given=f"question {i}") for i in range(NUM_ROWS)])
    for step in range(1, NUM_STEPS):
        shutil.copytree(first, run / f"rollouts/step_{step}")


def test_a_hundred_thousand_trajectories(tmp_path: Path, viewing: Viewing, new_page: NewPage) -> None:
    write_large_run(tmp_path)
    counted(page := opened(new_page(viewport={"width": 1400, "height": 900}), viewing(tmp_path)), "100,000 of 100,000")
    page.fill("[name=text]", "question 123")
    counted(page, "100 of 100,000")
