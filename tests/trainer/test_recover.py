"""Interrupted equals uninterrupted, on one and two ranks; what is damaged is never loaded; failures surface."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import torch
from recover_program import train, train_on_ranks
from testing_disks import full_disk
from training_cases import write_model

from arealite.api.cli_args import LoRAConfig, RecoverConfig
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import FinetuneSpec
from arealite.trainer.checkpoint import find_damage, publish
from arealite.trainer.recover import Recover
from arealite.utils.files import file_entries

pytestmark = pytest.mark.xdist_group("recover")
FILES = ["actor/.metadata", "actor/__0_0.distcp", "actor/rng_0.json", "manifest.json", "state.json"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Seven steps without an interruption."""
    return train(model, tmp_path_factory.mktemp("whole"), steps=7)


@pytest.fixture(scope="module")
def cut(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that ended after step 4, with checkpoints of steps 1 and 3."""
    folder = tmp_path_factory.mktemp("cut")
    train(model, folder, steps=7, stop_after=4)
    return folder


@pytest.fixture
def folder(cut: Path, tmp_path: Path) -> Path:
    """A copy of it to damage and to go on in."""
    shutil.copytree(cut, tmp_path / "run")
    return tmp_path / "run"


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    assert {name for name, value in expected["state"].items() if not torch.equal(found["state"][name], value)} == set()
    assert found["version"] == expected["version"]


def files_of(checkpoint: Path) -> list[str]:
    return sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())


def checkpoints(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "e/t/recover"))


def test_resumed_equals_uninterrupted(model: str, whole: dict[str, Any], folder: Path) -> None:
    assert checkpoints(folder) == ["step_1", "step_3"]
    found = train(model, folder, steps=7)
    assert found["start"] == 4 and whole["start"] == 0
    for key in ("losses", "draws"):
        assert found[key] == {step: whole[key][step] for step in (4, 5, 6)}
    assert found["saved"] == [5] and whole["saved"] == [2, 5], "the saver's clock goes on"
    assert_same_state(found, whole)
    assert whole["noted"] == [(1, 12), (3, 24), (5, 36)] and found["noted"] == [(3, 24), (5, 36)]
    assert checkpoints(folder) == ["step_3", "step_5"], "the newest two are kept"


@pytest.mark.parametrize(("asked", "last"), [({"ask_in": 4}, 4), ({"interrupt_in": 5}, 4), ({"interrupt_in": 4}, 3)])
def test_a_run_that_is_asked_to_stop_leaves_a_checkpoint_of_its_last_step(
    model: str, whole: dict[str, Any], tmp_path: Path, asked: dict[str, int], last: int
) -> None:
    """At the end of a step, and while the next one waits for its batch; the one that goes on is the same run."""
    stopped = train(model, tmp_path, steps=7, **asked)
    assert stopped["status"] == 143 and checkpoints(tmp_path)[-1] == f"step_{last}"
    found = train(model, tmp_path, steps=7)
    assert found["start"] == last + 1
    for key in ("losses", "draws"):
        assert found[key] == {step: whole[key][step] for step in range(last + 1, 7)}
    assert found["saved"] == [5]
    assert_same_state(found, whole)
    assert checkpoints(tmp_path) == ["step_3", "step_5"] if last == 3 else ["step_4", "step_5"], "its clock goes on"


def test_a_critic_resumes_with_the_policy(model: str, folder: Path, tmp_path: Path) -> None:
    """Weights, moments and schedule of both, bit for bit."""
    whole = train(model, tmp_path / "whole", steps=6, has_critic=True)
    assert whole["values"][5] < whole["values"][0] and any(name.startswith("1.score") for name in whole["state"])
    train(model, tmp_path / "killed", steps=6, has_critic=True, stop_after=2)
    found = train(model, tmp_path / "killed", steps=6, has_critic=True)
    assert found["start"] == 2
    for key in ("losses", "values", "draws"):
        assert found[key] == {step: whole[key][step] for step in range(2, 6)}
    assert_same_state(found, whole)
    saved = tmp_path / "killed/e/t/checkpoints/step_5"
    assert {path.name for path in (saved / "critic").iterdir()} >= {"config.json", "model.safetensors"}
    assert {name.partition("/")[0] for name in files_of(tmp_path / "killed/e/t/recover/step_5")} == {
        *("actor", "critic", "manifest.json", "state.json"),
    }
    with pytest.raises(
        CheckpointError, match=r"step_3 must hold the state of actor and critic: got that of actor\. Use"
    ):
        train(model, folder, steps=5, has_critic=True)


def test_a_run_without_rollouts_keeps_a_model(model: str, tmp_path: Path) -> None:
    train(model, tmp_path, steps=3, has_rollout=False)
    assert files_of(tmp_path / "e/t/recover/step_1") == [
        name.replace("actor", "model") for name in [*FILES[3:4], *FILES[:3], FILES[4]]
    ]
    assert train(model, tmp_path, steps=3, has_rollout=False)["start"] == 2


def test_adapters_resume_without_the_model_in_the_checkpoint(model: str, tmp_path: Path) -> None:
    lora = LoRAConfig(rank=4, dropout=0.1)
    whole = train(model, tmp_path / "whole", steps=6, lora=lora)
    train(model, tmp_path / "killed", steps=6, lora=lora, stop_after=4)
    other = write_model(tmp_path / "other", seed=1)
    for name, others in ((other, {}), (model, {"alpha": 16}), (model, {"target_modules": ["q_proj"]})):
        with pytest.raises(CheckpointError, match="must be of the same weights in path, dtype"):
            train(name, tmp_path / "killed", steps=6, lora=lora.new(**others))
    found = train(model, tmp_path / "killed", steps=6, lora=lora)
    assert found["start"] == 4 and found["losses"] == {step: whole["losses"][step] for step in (4, 5)}
    assert_same_state(found, whole)
    assert not [name for name in found["state"] if "base_layer" in name or "norm" in name]
    saved = {path.name for path in (tmp_path / "killed/e/t/checkpoints/step_5").iterdir()}
    assert saved == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_run_without_checkpoints_stops_as_well(model: str, tmp_path: Path) -> None:
    assert train(model, tmp_path, steps=7, ask_in=1, mode="disabled")["status"] == 143
    assert not (tmp_path / "e/t/recover").exists()


def test_what_is_newer_than_the_checkpoint_is_removed(model: str, folder: Path) -> None:
    (folder / "e/t/recover/.step_4.unfinished").mkdir()
    shutil.copytree(folder / "e/t/recover/step_1", folder / "e/t/recover/step_9")
    (folder / "e/t/recover/step_9/state.json").unlink()
    models = folder / "e/t/checkpoints"
    earlier = {path.name for path in models.iterdir()}
    for name in ("step_9", ".step_9.unfinished"):
        (models / name).mkdir()
    assert train(model, folder, steps=5)["start"] == 4
    kept, damaged = checkpoints(folder)[:2], checkpoints(folder)[2:]
    assert kept == ["step_1", "step_3"] and [name.partition("-")[0] for name in damaged] == ["step_9.damaged"]
    assert {path.name for path in models.iterdir()} == earlier, "models of undone steps are gone"


@pytest.mark.parametrize("name", ["manifest.json", "actor/__0_0.distcp"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    model: str, whole: dict[str, Any], folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "e/t/recover/step_3" / name
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, logger="arealite.recover"):
        found = train(model, folder, steps=7)
    assert found["start"] == 2 and found["losses"] == {step: whole["losses"][step] for step in range(2, 7)}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "step_3" in warning and name in warning
    assert_same_state(found, whole)
    (damaged,) = (folder / "e/t/recover").glob("step_3.damaged-*")
    assert find_damage(damaged) is not None, "it is kept for a look at it, and no later run takes it for a checkpoint"


def test_an_error_of_reading_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As network disks have them: the run ends, and its launcher starts it again."""
    digest = hashlib.file_digest

    def fail(file: Any, name: str) -> Any:
        if file.name.endswith(".distcp"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), file.name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", fail)
    with pytest.raises(CheckpointError, match=r"step_3 must be readable: got \[Errno 116\] Stale .*__0_0.distcp"):
        start(folder)
    assert checkpoints(folder) == ["step_1", "step_3"]


def start(folder: Path, **config: Any) -> Recover:
    names = {"experiment_name": "e", "trial_name": "t", "fileroot": str(folder)}
    return Recover(RecoverConfig(**names, **{"mode": "auto", "freq_steps": 2} | config), FinetuneSpec(1, 40, 4))


def test_nothing_is_replaced_when_all_are_damaged(folder: Path) -> None:
    for step in (1, 3):
        (folder / f"e/t/recover/step_{step}/manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must hold a whole checkpoint: got 2 damaged ones"):
        start(folder)
    assert checkpoints(folder) == ["step_1", "step_3"]


def test_resume_requires_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must hold a checkpoint for recover\.mode=resume: got none"):
        start(tmp_path, mode="resume")


@pytest.mark.parametrize("name", ["actor", *FILES])
def test_a_checkpoint_of_somebody_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is unpickled, so that it runs their code."""
    stat, other = Path.stat, os.geteuid() + 1

    def stat_of_theirs(path: Path, **options: Any) -> os.stat_result:
        found = stat(path, **options)
        return (
            os.stat_result([*found[:4], other, *found[5:]]) if path == folder / "e/t/recover/step_3" / name else found
        )

    monkeypatch.setattr(Path, "stat", stat_of_theirs)
    with pytest.raises(
        CheckpointError, match=rf"step_3/{name} must be yours.*got one of user {other}\. Copy step_3, if"
    ):
        start(folder)
    assert checkpoints(folder) == ["step_1", "step_3"]


@pytest.mark.parametrize(
    ("name", "facts", "told"),
    [
        ("format", {"format": 0}, "must have format 3: got 0"),
        ("saver", {}, "step_3 must hold the state of dataloader, recover, saver and rollout: got none of saver. Load"),
    ],
)
def test_what_another_version_or_script_wrote_is_refused(
    model: str, folder: Path, name: str, facts: dict[str, Any], told: str
) -> None:
    path = folder / "e/t/recover/step_3"
    kept = json.loads((path / "state.json").read_text())
    del kept[name]
    (path / "state.json").write_text(json.dumps(kept | facts))
    changed = path.rename(path.with_name("changed"))
    entries = json.loads((changed / "manifest.json").read_text())["files"]
    publish(changed, path, entries | file_entries(changed, ["state.json"]))
    with pytest.raises(CheckpointError, match=told):
        train(model, folder, steps=5)


@pytest.mark.parametrize(
    ("mode", "restart", "expected"),
    [("disabled", "1", 0), ("fault", "0", 0), ("fault", "1", 4), ("auto", "0", 4), ("resume", "0", 4)],
)
def test_who_goes_on(
    model: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    restart: str,
    expected: int,
) -> None:
    monkeypatch.setenv("AREAL_RECOVER_RUN", restart)
    (folder / "e/t/metrics.jsonl").write_text('{"step": 0, "optim/grad_norm": 1.0}\n' * 3)
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "rollouts"):
        (folder / "e/t" / name).mkdir() if name == "rollouts" else (folder / "e/t" / name).touch()
    assert train(model, folder, steps=5, mode=mode)["start"] == expected
    is_fresh = expected == 0
    said = capsys.readouterr().out
    assert (f"resuming after step 3 from {folder}/e/t/recover/step_3\n" in said) != is_fresh
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "rollouts"):
        assert (folder / "e/t" / name).exists() != is_fresh
    assert (folder / "e/t/recover").exists() == (mode != "disabled")
    earlier = list((folder / "e").glob("t.replaced-*"))
    assert len(earlier) == is_fresh
    for path in earlier:
        assert f"the run that was in {folder}/e/t is now in {path}\n" in said
        assert {"ledger.sqlite", "ledger.sqlite-wal", "rollouts", "recover", "checkpoints"} <= set(os.listdir(path))
        assert (path / "metrics.jsonl").read_text().count("\n") == 3 and find_damage(path / "recover/step_3") is None


def test_a_failed_write_stops_the_run_and_names_the_file_system(model: str, tmp_path: Path) -> None:
    """What was published before stays."""
    train(model, tmp_path, steps=2)
    with full_disk(), pytest.raises(CheckpointError) as caught:
        train(model, tmp_path, steps=7)
    text = str(caught.value)
    assert f"{tmp_path}/e/t/recover/step_3 must be writable: got " in text and "free" in text, text
    assert caught.value.__cause__ is not None
    assert train(model, tmp_path, steps=3)["start"] == 2
    assert checkpoints(tmp_path) == ["step_1"]


def test_the_error_of_a_run_comes_before_that_of_its_checkpoint(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        full_disk(),
        pytest.raises(ZeroDivisionError),
        caplog.at_level(logging.ERROR, logger="arealite.recover"),
    ):
        train(model, tmp_path, steps=7, freq_steps=1, keep_last=1, stop_after=None, fail_after=0)
    (ours,) = [record.getMessage() for record in caplog.records if record.name == "arealite.recover"]
    assert "step_0 must be writable" in ours


def test_a_checkpoint_before_the_publication_is_refused(model: str, tmp_path: Path) -> None:
    """Its rollouts would be taken for those of the step after it, and removed."""
    with pytest.raises(CheckpointError, match=r"of step 0 must be taken at version 1: got 0\. Call publish_weights"):
        train(model, tmp_path, steps=1, publishes=False)


def test_two_runs_do_not_share_a_folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arealite.trainer.recover.LOCK_TIMEOUT_S", 0.1)
    with (
        start(tmp_path),
        pytest.raises(TimeoutError, match=rf"{tmp_path}/e/t must belong to one run.*process {os.getpid()} on "),
    ):
        start(tmp_path)
    with start(tmp_path):
        pass


def run_on_two_ranks(model: str, out: Path, runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Do runs one after the other on two ranks; return by run what each rank found."""
    with testing_forks.two_ranks(train_on_ranks, model, out, runs) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0]
    return [
        [torch.load(out / f"found_{index}_rank{rank}.pt", weights_only=False) for rank in range(2)]
        for index in range(len(runs))
    ]


@pytest.mark.slow
def test_two_ranks_and_a_change_of_ranks(model: str, whole: dict[str, Any], folder: Path) -> None:
    """On two ranks resumed equals uninterrupted, and a run goes on from two ranks to one and from one to two."""
    uninterrupted, _, resumed, moved, stopped, continued, broken = run_on_two_ranks(
        model,
        folder,
        [
            {"steps": 7, "trial_name": "whole"},
            {"steps": 7, "stop_after": 4, "trial_name": "cut"},
            {"steps": 7, "trial_name": "cut"},
            {"steps": 6, "trial_name": "t"},
            {"steps": 7, "ask_in": 2, "asked_rank": 1, "trial_name": "stopped"},
            {"steps": 7, "trial_name": "stopped"},
            {"steps": 4, "trial_name": "broken", "has_critic": True, "broken_rank": 1},
        ],
    )
    texts = ["RuntimeError: rank 1 failed: TypeError: Object of type object", "TypeError: Object of type object is not"]
    assert all(f"recover/step_1 must be writable: got {text}" in one["error"] for one, text in zip(broken, texts))
    assert os.listdir(folder / "e/broken/recover") == [".step_1.unfinished"], (
        "it appears only if every rank has written"
    )
    assert [found["status"] for found in stopped] == [143, 143], "every rank stops if any is asked to"
    for found, expected in zip(continued, uninterrupted):
        assert found["start"] == 3
        assert_same_state(found, expected)
    for found, expected in zip(resumed, uninterrupted):
        assert found["start"] == 4
        for key in ("losses", "draws"):
            assert found[key] == {step: expected[key][step] for step in (4, 5, 6)}
        assert_same_state(found, expected)
    assert resumed[0]["noted"] == [(3, 24), (5, 36)] and resumed[1]["noted"] == []
    assert resumed[0]["draws"] != resumed[1]["draws"], "each rank has generators of its own"

    for rank, found in enumerate(moved):
        assert found["start"] == 4
        assert list(found["losses"].values()) == pytest.approx([whole["losses"][step] for step in (4, 5)], abs=1e-5)
        assert (found["draws"][4] == whole["draws"][4]) == (rank == 0), "a new rank gets a seed of its own"

    back = train(model, folder, steps=7, trial_name="cut")
    assert back["start"] == 6
    assert back["losses"][6] == pytest.approx(whole["losses"][6], abs=1e-5)
    assert back["draws"][6] == uninterrupted[0]["draws"][6]
