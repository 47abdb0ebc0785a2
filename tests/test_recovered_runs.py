"""Whole runs that are killed, stopped, or run out of disk or memory, and started again: they end as if nothing had
happened, bit for bit."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos.experiment import ENTRY, Experiment, Launcher
from harness.processes import wait_until
from testing_quickstart import WORD_PROBLEMS
from testing_rollouts import stored_rows

from arealite.utils.files import read_jsonl
from arealite.utils.processes import descendants, is_alive, kill_tree

STEPS, BATCH, GROUP = 4, 4, 2
DEADLINE_S = 1200.0
pytestmark = pytest.mark.slow


class HeldScript:
    """The example, whose processes wait before its last block of `timer`, each until it is let go or asked to stop."""

    def __init__(self, folder: Path, timer: str, *, when: str = "True", then: str = "") -> None:
        self._folder = folder
        (folder / "hold").touch()
        before, block, after = ENTRY.read_text().rpartition(f'with stats.timer("{timer}"):')
        wait = f"""
            import os, pathlib, time
            from arealite.utils import stop
            held = pathlib.Path({str(folder)!r}) / f"held-{{os.getpid()}}"
            if {when} and held.with_name("hold").exists():
                held.touch()
                while held.exists() and held.with_name("hold").exists() and not stop.is_asked():
                    time.sleep(0.01)
                {then}
            """
        indent = before[before.rfind("\n") + 1 :]
        self.path = folder / "entry.py"
        self.path.write_text(f"{before}\n{textwrap.indent(textwrap.dedent(wait), indent)}\n{indent}{block}{after}")

    @property
    def held(self) -> list[Path]:
        """Return a file for each process that waits."""
        return list(self._folder.glob("held-*"))

    def let_go(self, *, of_all: bool = True) -> None:
        """Let processes go on; `of_all`: later ones as well."""
        if of_all:
            (self._folder / "hold").unlink()
        for file in self.held:
            file.unlink()


class Run:
    """Synchronous, deterministic GRPO. All rewards count as -0.5, so every step changes the weights."""

    def __init__(self, model: Path, folder: Path, allocation: str) -> None:
        overrides = {
            "async_training": False,
            "lite.deterministic": True,
            "launcher.trainer_threads": 1,
            "train_dataset.path": f"{WORD_PROBLEMS}?train=40&test=4",
            "evaluator.freq_steps": 3,
            "gconfig.max_new_tokens": 12,
        }
        sizes: dict[str, int] = {"steps": STEPS, "batch_size": BATCH, "group_size": GROUP}
        self._experiment = Experiment(
            folder, model, allocation, **sizes, retries=3, checkpoint_steps=2, overrides=overrides
        )
        self.folder = self._experiment.run_folder
        self.launchers: list[Launcher] = []

    def start(self, *overrides: str, entry: Path = ENTRY) -> Launcher:
        """Start the launcher."""
        self.launchers.append(replace(self._experiment, entry=entry).launch(len(self.launchers), *overrides))
        return self.launchers[-1]

    def finish(self, launcher: Launcher) -> None:
        assert launcher.process.wait(DEADLINE_S) == 0, self.output

    def kill_in_update(self, folder: Path) -> None:
        """Start the run, and kill its launcher before the update of step 3."""
        launcher = self.start(entry=(held := HeldScript(folder, "update", when="step == 3")).path)
        self.wait_until_held(held, launcher)
        launcher.process.kill()
        launcher.process.wait(120)
        held.let_go()

    @property
    def output(self) -> str:
        return "".join(launcher.text() for launcher in self.launchers)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / "metrics.jsonl")

    def wait_until_held(self, held: HeldScript, launcher: Launcher, *, is_published: bool = True) -> None:
        """Wait until the trainer is held and its checkpoint of step 1, which a thread writes, is published."""
        published = self.folder / "recover" / "step_1"
        is_so = lambda: held.held and (not is_published or published.exists())  # noqa: E731
        wait_until("a trainer that waits", is_so, DEADLINE_S, launcher)

    @property
    def trainer(self) -> int:
        """The process of rank 0."""
        return int((self.folder / ".trainer.lock").read_text().split()[0])

    def prompts(self, step: int) -> list[str]:
        return [row["prompt_id"] for row in stored_rows(self.folder / "rollouts" / f"step_{step}")]


@pytest.fixture
def make_run(model: Path, tmp_path: Path) -> Iterator[Callable[[str, str], Run]]:
    """Return a function that makes a run in a folder of its own; nothing of it survives the test."""
    runs: list[Run] = []

    def make(name: str, allocation: str) -> Run:
        runs.append(Run(model, tmp_path / name, allocation))
        return runs[-1]

    yield make
    for run in runs:
        for launcher in run.launchers:
            kill_tree(launcher.process.pid)


def assert_same_run(found: Run, expected: Run) -> None:
    """Weights, optimizer, generators, prompts and every metric that measures neither time nor bytes sent."""
    assert [row["step"] for row in found.rows] == list(range(STEPS + 1))
    for row, other in zip(found.rows, expected.rows):
        clocks = ("time/", "perf/", "wait/", "bound/", "weights/pause_s", "weights/sent_mib")
        keys = {key for key in row.keys() | other.keys() if not key.startswith(clocks)}
        assert {key: row.get(key) for key in keys} == {key: other.get(key) for key in keys}
    for step in range(STEPS):
        assert found.prompts(step) == expected.prompts(step)
    files = [f"checkpoints/step_{STEPS - 1}/model.safetensors"]
    for step in {1, STEPS - 1} if (found.folder / "recover" / "step_1").exists() else {STEPS - 1}:
        checkpoint = expected.folder / "recover" / f"step_{step}"
        of_ranks = (*checkpoint.glob("actor/__*"), *checkpoint.glob("actor/rng_*"))
        files += [f"recover/step_{step}/actor/{path.name}" for path in of_ranks]
    assert len(files) >= 3
    for name in files:
        assert (found.folder / name).read_bytes() == (expected.folder / name).read_bytes(), name
    assert all(row["optim/grad_norm"] > 0 for row in expected.rows[:STEPS]), "there must be something to get wrong"


@pytest.mark.long
def test_a_server_in_the_trainers_process_changes_no_bit(make_run: Callable[[str, str], Run], tmp_path: Path) -> None:
    """Nor does a kill -9 of that process, and the resumed run."""
    apart, together = make_run("apart", "lite.d1p1t1+d1p1t1"), make_run("together", "lite.d1|d1")
    apart.finish(apart.start())
    launcher = together.start(entry=(held := HeldScript(tmp_path, "update", when="step == 3")).path)
    together.wait_until_held(held, launcher)
    os.kill(together.trainer, signal.SIGKILL)
    held.let_go()
    together.finish(launcher)
    assert "restart 1 of " in together.output and "resuming after step 1 from " in together.output
    assert_same_run(together, apart)


def test_a_killed_launcher_and_then_two_ranks(make_run: Callable[[str, str], Run], tmp_path: Path) -> None:
    """The user starts the same command again; later the run goes on with more ranks."""
    whole, cut = (make_run(name, "lite.d1p1t1+d1p1t1") for name in ("whole", "cut"))
    whole.finish(whole.start())
    cut.kill_in_update(tmp_path)
    cut.finish(cut.start())
    assert "resuming after step 1 from " in cut.output and "restart" not in cut.output
    assert_same_run(cut, whole)

    cut.finish(cut.start("allocation_mode=lite.d1p1t1+d2p1t1", f"total_train_steps={STEPS + 2}"))
    assert f"resuming after step {STEPS - 1} from " in cut.output
    assert [row["step"] for row in cut.rows] == list(range(STEPS + 3))
    prompts = [prompt for step in range(STEPS + 2) for prompt in cut.prompts(step)]
    assert len(prompts) == GROUP * len(set(prompts)) == GROUP * BATCH * (STEPS + 2), "none lost, none repeated"
    assert [row["rollout/accepted"] for row in cut.rows[: STEPS + 2]] == [BATCH * (n + 1) for n in range(STEPS + 2)]


@pytest.mark.long
def test_a_killed_rank_of_two(make_run: Callable[[str, str], Run], tmp_path: Path) -> None:
    """The launcher starts the run again."""
    whole, cut = (make_run(name, "lite.d1p1t1+d2p1t1") for name in ("whole", "cut"))
    whole.finish(whole.start())
    launcher = cut.start(entry=(held := HeldScript(tmp_path, "update", when="step == 3")).path)
    cut.wait_until_held(held, launcher)
    os.kill(cut.trainer, signal.SIGKILL)
    held.let_go()
    cut.finish(launcher)
    assert "restart 1 of 3, because trainer-0 failed with exit status 137 (SIGKILL)" in cut.output
    assert_same_run(cut, whole)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing happened to."""
    run = Run(model, tmp_path_factory.mktemp("whole"), "lite.d1p1t1+d1p1t1")
    run.finish(run.start())
    return run


def test_ctrl_c_while_it_trains(make_run: Callable[[str, str], Run], whole: Run, tmp_path: Path) -> None:
    """The clocks go on too: the next checkpoint is of the step that it would have been of."""
    cut = make_run("cut", "lite.d1p1t1+d1p1t1")
    launcher = cut.start(entry=(held := HeldScript(tmp_path, "update", when="step == 2")).path)
    cut.wait_until_held(held, launcher, is_published=False)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(DEADLINE_S) == 130
    held.let_go()
    assert [row["step"] for row in cut.rows] == [0, 1, 2]
    assert f"launcher | stopped after step 2; report: {cut.folder}/report.html\n" in cut.output
    assert "launcher | the same command continues from step 3\n" in cut.output
    assert (cut.folder / "report.html").exists()
    assert not json.loads((cut.folder / "summary.json").read_text())["is_finished"]
    cut.finish(cut.start())
    assert "resuming after step 2 from " in cut.output
    assert_same_run(cut, whole)
    cut.finish(cut.start())
    assert "this run has finished: " in cut.output


@pytest.mark.long
def test_ctrl_c_in_the_last_evaluation(make_run: Callable[[str, str], Run], whole: Run, tmp_path: Path) -> None:
    """The trained model is there already, and only the evaluation is done again."""
    cut = make_run("cut", "lite.d1p1t1+d1p1t1")
    entry = (held := HeldScript(tmp_path, "eval")).path
    launcher = cut.start(entry=entry)
    cut.wait_until_held(held, launcher)
    launcher.process.terminate()
    assert launcher.process.wait(DEADLINE_S) == 143
    held.let_go()
    assert (cut.folder / "checkpoints" / f"step_{STEPS - 1}" / "model.safetensors").exists()
    assert f"the same command continues from step {STEPS}\n" in cut.output
    cut.finish(cut.start(entry=entry))
    assert f"resuming after step {STEPS - 1} from " in cut.output
    assert_same_run(cut, whole)


@pytest.mark.long
def test_a_killed_rank_and_then_a_full_disk_in_the_last_evaluation(
    make_run: Callable[[str, str], Run], whole: Run, tmp_path: Path
) -> None:
    """The launcher starts the run again, twice."""
    cut = make_run("cut", "lite.d1p1t1+d1p1t1")
    launcher = cut.start(entry=(held := HeldScript(tmp_path, "eval")).path)
    for harm in ("process", "disk", ""):
        cut.wait_until_held(held, launcher)
        if harm == "process":
            os.kill(cut.trainer, signal.SIGKILL)
        elif harm == "disk":
            resource.prlimit(cut.trainer, resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        held.let_go(of_all=False)
    cut.finish(launcher)
    assert cut.output.count("resuming after step ") == 2, (
        "the first time maybe after an older one: step 3's was being written"
    )
    assert "restart 1 of 3, because trainer-0 failed with exit status 137 (SIGKILL)" in cut.output
    assert "must be writable: got " in cut.output and "restart 2 of 3, " in cut.output
    assert "Traceback" not in cut.output, "each of them is told in a few lines"
    assert_same_run(cut, whole)


@pytest.mark.long
def test_a_full_disk_while_it_saves(make_run: Callable[[str, str], Run], whole: Run, tmp_path: Path) -> None:
    """A limit on the size of a file stands in for it."""
    cut = make_run("cut", "lite.d1p1t1+d1p1t1")
    launcher = cut.start(entry=(held := HeldScript(tmp_path, "update", when="step == 3")).path)
    cut.wait_until_held(held, launcher)
    resource.prlimit(cut.trainer, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    held.let_go()
    if launcher.process.wait(DEADLINE_S) != 0:  # else the launcher started it again
        cut.finish(cut.start())
    assert "must be writable: got " in cut.output and "resuming after step 1 from " in cut.output
    assert_same_run(cut, whole)


@pytest.mark.long
def test_the_end_of_memory_while_it_trains(make_run: Callable[[str, str], Run], whole: Run, tmp_path: Path) -> None:
    """A limit on the trainer's memory that is too low for a tensor of the script: the launcher starts the run again."""
    cut = make_run("cut", "lite.d1p1t1+d1p1t1")
    allocate = 'if held.with_name("tensor").exists(): import torch; torch.empty(1 << 28)'
    launcher = cut.start(entry=(held := HeldScript(tmp_path, "update", when="step == 2", then=allocate)).path)
    screens, processes = [], []
    for is_limited in (True, False):
        cut.wait_until_held(held, launcher)
        screens.append(cut.output)
        assert not any(map(is_alive, processes)), "the attempt before left nothing"
        processes = descendants(launcher.process.pid)
        assert cut.trainer in processes
        if is_limited:
            pages = int(Path(f"/proc/{cut.trainer}/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (1 << 28)  # the tensor has 2^30 bytes
            resource.prlimit(cut.trainer, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            (tmp_path / "tensor").touch()
        else:
            (tmp_path / "tensor").unlink()
        held.let_go(of_all=False)
    cut.finish(launcher)
    assert not any(map(is_alive, processes))
    text = screens[1].removeprefix(screens[0])
    until = "launcher | restart 1 of 3, because trainer-0 failed with exit status 1\n"
    assert until in text, text
    lines = [line for line in text.partition(until)[0].splitlines() if not line.startswith("step ")]
    assert len(lines) <= 12 and "memory ran out: " in "\n".join(lines) and "can't allocate memory" in text, text
    assert "Traceback" not in text and not re.search(r"arealite/\S+\.py:\d", text), "no frames of ours"
    assert "resuming after step 1 from " in text
    assert_same_run(cut, whole)
