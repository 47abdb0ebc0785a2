"""How programs run and how they are judged. What needs bubblewrap is slow: `make test-sandbox`, which installs it."""

import asyncio
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from arealite.api.errors import ConfigError, EnvError
from arealite.reward import sandbox as module
from arealite.reward.code import Verdict, all_tests_reward, code_reward, judge, read_program, read_tests
from arealite.reward.runner import RewardRunner
from arealite.reward.sandbox import Limits, Sandbox, python_tool

LIMITED = Sandbox(Limits(time_s=30, cpu_s=20), isolation="process")
ISOLATED = pytest.param(Sandbox(LIMITED.limits), marks=pytest.mark.slow, id="bubblewrap")
both = pytest.mark.parametrize("sandbox", [ISOLATED, pytest.param(LIMITED, id="process")])
ADD = "def add(a, b):\n    return a + b\n"
ADDS = "print(sum(map(int, input().split())))"
CALL = {"prompt": "", "prompt_ids": [], "completion_ids": []}


@both
def test_a_program_gets_its_files_and_input_and_tells_how_it_ended(sandbox: Sandbox) -> None:
    program = (
        "import os, sys\nfrom data.helper import double\nprint(double(int(input())), open('raw').read())\n"
        "open('new', 'w').write('x')\nprint(sorted(os.listdir('.')), file=open('/dev/stderr', 'w'))\nsys.exit(7)"
    )
    files = {"data/helper.py": "def double(n): return 2 * n", "raw": b"\x41"}
    result = sandbox.run_here(program, files=files, stdin="21\n")
    assert (result.exit_status, result.stdout, result.reason) == (7, "42 A\n", None)
    assert result.stderr == "['data', 'main.py', 'new', 'raw']\n"
    half = sandbox.run_here("print('\ud800')")  # of a character, as JSON may hold it
    assert half.exit_status == 1 and "Non-UTF-8 code" in half.stderr
    again = sandbox.run_here(["/bin/sh", "-c", "ls; kill -SEGV $$"])
    assert (again.exit_status, again.stdout) == (139, ""), "an empty folder, and a signal"


@both
def test_what_is_written_is_kept_when_a_limit_ends_it(sandbox: Sandbox) -> None:
    program = "import os, time\nprint('so far', flush=True)\nos.write(1, b'\\xff')\ntime.sleep(600)"
    result = sandbox.run_here(program, limits=Limits(time_s=1.5))
    assert result.reason == "time" and result.stdout == "so far\n�"
    result = sandbox.run_here("while True: print('x' * 1000)", limits=Limits(output_kib=2))
    assert (result.reason, len(result.stdout)) == ("output", 2048)
    result = sandbox.run_here("import sys; sys.stdout.write('x' * 3000)", limits=Limits(output_kib=2))
    assert (result.reason, len(result.stdout)) == ("output", 2048), "also if it has ended before we look"


@pytest.mark.parametrize(
    ("program", "limits", "reason", "told"),
    [
        ("while True: pass", Limits(cpu_s=0.2, time_s=60), "cpu", ""),
        ("import os\nfor _ in range(2): os.fork()\nwhile True: pass", Limits(cpu_s=1, time_s=120), "cpu", ""),
        ("import time; time.sleep(600)", Limits(time_s=0.5), "time", ""),
        ("x = b'x' * (64 << 20)", Limits(memory_mib=50), None, "MemoryError"),
        ("open('x', 'wb').write(bytes(3 << 20))", Limits(disk_mib=2), None, "File too large"),
    ],
)
def test_limits_hold_without_isolation(program: str, limits: Limits, reason: str | None, told: str) -> None:
    result = Sandbox(limits, isolation="process").run_here(program)
    assert result.reason == reason and told in result.stderr


async def test_at_most_so_many_programs_run_at_once(tmp_path: Path) -> None:
    program = f"""
import os, time
os.chdir({str(tmp_path)!r})
open(str(os.getpid()), "w").close()
time.sleep(0.3)
print(len(os.listdir()))
os.unlink(str(os.getpid()))
"""
    sandbox = Sandbox(isolation="process", max_concurrent=2)
    results = await asyncio.gather(*(sandbox.run(program) for _ in range(6)))
    assert {result.stdout for result in results} <= {"1\n", "2\n"}


def test_what_was_never_isolated_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a ValueError, of which a workflow with tools tells the model."""
    monkeypatch.setenv("PATH", str(tmp_path))
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(EnvError, match=r"must be installed for a sandbox: got no bwrap.*Install bubblewrap"):
            Sandbox().run_here("print(1)")
    assert len(os.listdir("/proc/self/fd")) < num_open + 20, "no try leaves a file open"
    (tmp_path / "bwrap").write_text('#!/bin/sh\necho "Unknown option --disable-userns" >&2; exit 1\n')
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(EnvError, match=r"a sandbox must start: got '.*'. Install bubblewrap 0.8 .*sysctl"):
        Sandbox().run_here("print(1)")


def test_missing_isolation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    module._warn_that_nothing_is_isolated.cache_clear()
    for _ in range(2):
        LIMITED.run_here(["true"])
    (told,) = [record.message for record in caplog.records if record.name == "arealite.sandbox"]
    assert "may read, write and send whatever you may" in told


def test_mistakes_are_told() -> None:
    for name in ("/etc/x", "../x", "a/../../x", "", "a//b", "."):
        with pytest.raises(ValueError, match="must have a relative name"):
            LIMITED.run_here("", files={name: ""})
    with pytest.raises(ConfigError, match="time_s of a sandbox must be positive: got 0"):
        Limits(time_s=0)


async def test_the_tool_shows_what_was_printed_and_how_it_ended() -> None:
    tool = Sandbox(Limits(time_s=20, output_kib=1), isolation="process").python_tool
    assert await tool("print(6 * 7)") == "42\n"
    assert (await tool("print(1)\n1 / 0")).endswith("ZeroDivisionError: division by zero\n\n[exit status 1]")
    assert (await tool("while True: print(1)")).endswith("1\n\n[ended: too much output]")
    schema = get_json_schema(python_tool)["function"]
    assert schema["name"] == "python_tool" and schema["parameters"]["required"] == ["code"]


TESTS = [{"input": "1 2\n", "output": "3"}, {"input": "4 5", "output": "9\n\n"}, {"input": "0 1", "output": "7"}]


@both
def test_programs_are_judged_test_by_test(sandbox: Sandbox) -> None:
    passed, failed = Verdict(True, ""), Verdict(False, "output")
    assert judge(ADDS, TESTS, sandbox=sandbox) == [passed, passed, failed]
    asserted = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "x = add(2, 2)\nassert x == 4"]
    assert judge(ADD, asserted, sandbox=sandbox) == [passed, Verdict(False, "exit status 1"), passed]


def test_what_ends_early_has_not_passed() -> None:
    """Whatever stops the process before the assertion, with a status of success."""
    for trick in ("raise SystemExit(0)", "import os; os._exit(0)", "def add(a, b): exit()", "print('0' * 32); quit()"):
        assert judge(trick, ["assert add(1, 2) == 4"], sandbox=LIMITED) == [Verdict(False, "output")], trick
    assert judge("x = (", TESTS[:1], sandbox=LIMITED) == [Verdict(False, "exit status 1")]


def test_tests_after_the_last_that_matters_do_not_run() -> None:
    hanging = judge("import time; time.sleep(600)", TESTS, sandbox=Sandbox(Limits(time_s=0.5), isolation="process"))
    assert [one.why for one in hanging] == ["time", "not run", "not run"]
    assert [one.why for one in judge(ADDS, TESTS[::-1], sandbox=LIMITED, should_stop=True)] == [
        "output",
        *["not run"] * 2,
    ]
    assert [one.why for one in judge(ADDS, TESTS, sandbox=LIMITED, total_s=0)] == ["not run"] * 3


def test_programs_and_tests_are_found() -> None:
    assert read_program("Think.\n```python\na = 1\n```\nor\n```\nb = 2\n```\nDone.") == "b = 2\n"
    assert read_program("c = 3") == "c = 3" and read_program("```py\nopen") == "```py\nopen"
    assert read_tests('["assert f()"]') == ["assert f()"] and read_tests(TESTS) == TESTS
    wrong_types = ("3", "null", "true", [{"input": "1", "output": 2}], [{"input": None, "output": "2"}])
    for column in (None, "no JSON", [], "{}", [{"input": "1"}], '{"input": "1", "output": "2"}', [3], *wrong_types):
        with pytest.raises(ValueError, match="tests must be a list, or one in JSON"):
            read_tests(column)


@pytest.mark.slow
async def test_rewards_for_code_run_in_the_workers_of_rewards() -> None:
    assert pickle.loads(pickle.dumps(code_reward)) is code_reward
    for reward, expected in ((code_reward, 2 / 3), (all_tests_reward, 0.0)):
        runner = RewardRunner(reward, timeout=60)
        try:
            assert await runner(completions=f"```python\n{ADDS}\n```", answer=TESTS, **CALL) == pytest.approx(expected)
            assert await runner(completions=ADDS, answer=TESTS[:2], **CALL) == 1.0
        finally:
            runner.close()


@pytest.mark.slow
def test_a_python_of_root_is_shown_to_nobody_else() -> None:
    """A sandbox of root runs as nobody, and mounts nothing that this process sees."""
    before = Path("/proc/self/mounts").read_text()
    result = Sandbox().run_here("import os, sys; print(os.getuid(), sys.prefix)")
    assert result.stdout == f"1000 {os.path.realpath(sys.prefix)}\n" and Path("/proc/self/mounts").read_text() == before
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    assert os.geteuid() != 0 or "Uid:\t0" in status
