"""What a script that ends with an error shows, and that it trains only when it is started."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from arealite.api.script import brief

REPOSITORY = Path(__file__).parents[2]


def run(folder: Path, body: str, *, mode: str | None = None) -> tuple[list[str], int]:
    """Run a script that loads a config, and return what it has written and its exit status."""
    script = folder / "train.py"
    script.write_text("from arealite.api.cli_args import SFTConfig, load_expr_config\n" + textwrap.dedent(body))
    (folder / "c.yaml").write_text("experiment_name: e\ntrial_name: t\ntrain_dataset: {path: d, batch_size: 1}\n")
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)} | ({} if mode is None else {"AREALITE_TRACEBACK": mode})
    command = [sys.executable, script, "--config", "c.yaml"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=120)
    return (done.stdout + done.stderr).split("\n")[:-1], done.returncode


def test_a_sentence_of_ours_is_one_line(tmp_path: Path) -> None:
    lines, status = run(tmp_path, "load_expr_config(['--config', 'absent.yaml'], SFTConfig)")
    assert status == 2
    assert lines == [
        "ConfigError: --config must name a YAML file: got 'absent.yaml', which does not exist. Correct the path.",
        "(AREALITE_TRACEBACK=1 shows the whole traceback)",
    ]


def test_a_sentence_is_one_line_also_of_a_script_that_imports_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    lines, status = run(tmp_path, "import ray\nload_expr_config(['--config', 'absent.yaml'], SFTConfig)")
    assert (len(lines), lines[0].partition(":")[0], status) == (2, "ConfigError", 2)


def test_another_error_shows_the_users_lines_alone_and_innermost_first(tmp_path: Path) -> None:
    body = """
    import json
    def read(text):
        return json.loads(text)
    def main():
        try:
            undefined
        finally:
            read("{")
    try:
        load_expr_config([], SFTConfig)
    except ValueError:
        pass
    main()
    """
    lines, status = run(tmp_path, body)
    assert status == 1
    assert lines == [
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        f"  {tmp_path}/train.py:5 in read: return json.loads(text)",
        f'  {tmp_path}/train.py:10 in main: read("{{")',
        f"  {tmp_path}/train.py:15 in <module>: main()",
        "  after NameError: name 'undefined' is not defined",
        "(AREALITE_TRACEBACK=1 shows the whole traceback)",
    ]
    lines, _ = run(tmp_path, body, mode="1")
    assert lines[0] == "Traceback (most recent call last):" and any("json/decoder.py" in line for line in lines)


@pytest.mark.parametrize(
    ("raised", "first"),
    [
        ("error", "KeyError: 'x'"),
        ("GroupLostError('workers must stay: got none') from error", "GroupLostError: workers must stay: got none"),
    ],
)
def test_notes_show_where_a_worker_failed(tmp_path: Path, raised: str, first: str) -> None:
    body = f"""
    from arealite.api.errors import GroupLostError
    try:
        load_expr_config([], SFTConfig)
    except ValueError:
        pass
    error = KeyError("x")
    error.add_note("in mine on a worker:\\n  a.py:1 in mine: batch['x']")
    raise {raised}
    """
    lines, _ = run(tmp_path, body)
    assert lines[:3] == [first, "in mine on a worker:", "  a.py:1 in mine: batch['x']"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=["Python", "threads", "CPU", "CUDA"],
)
def test_the_end_of_memory_says_what_needs_less(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    _, _, advice = brief(raised.value)
    assert advice == (
        "  memory ran out: lower max_tokens_per_mb in mb_spec, use more ranks, or raise the limit of the process; "
        "`arealite plan` estimates the need"
    )


def test_the_launcher_gets_the_whole_traceback_for_the_log(tmp_path: Path) -> None:
    lines, _ = run(tmp_path, "load_expr_config([], SFTConfig)", mode="log")
    marked = [line[1:] for line in lines if line.startswith("\x1e")]
    assert marked[0] == "Traceback (most recent call last):"
    assert marked[-1].startswith("arealite.api.errors.ConfigError: --config must be given")
    assert [line for line in lines if not line.startswith("\x1e")] == [
        marked[-1].removeprefix("arealite.api.errors."),
    ]


@pytest.mark.parametrize("guard", [False, True])
def test_a_process_that_imports_the_script_must_not_train(tmp_path: Path, guard: bool) -> None:
    body = """
    import multiprocessing, sys
    def work(): print("worked")
    def main():
        load_expr_config(sys.argv[1:] + ["allocation_mode=d1", "model.path=m"], SFTConfig)
        if multiprocessing.current_process().name == "MainProcess":
            child = multiprocessing.get_context("spawn").Process(target=work)
            child.start()
            child.join()
    """
    lines, _ = run(tmp_path, body + ("if __name__ == '__main__': main()" if guard else "main()"))
    if guard:
        assert lines == ["worked"]
    else:
        line = next(line for line in reversed(lines) if "ConfigError: " in line)
        assert f"must train only when it is started: got {tmp_path}/train.py:11" in line
        assert 'under `if __name__ == "__main__":`' in line and "worked" not in lines
