import asyncio
import ctypes
import importlib
import math
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from arealite.api.errors import RewardError
from arealite.reward.runner import RewardRunner
from arealite.utils.processes import is_alive, wait_gone


def length(prompt: str, completions: str, **kwargs) -> float:
    return len(completions) + kwargs.get("bonus", 0)


def where(**kwargs) -> float:
    return float(os.getpid())


def raises(**kwargs) -> float:
    print("a reward may print")
    raise KeyError("missing column")


def exits(**kwargs) -> float:
    raise SystemExit(3)


def hangs_in_c(completions: str, **kwargs) -> float:
    if completions == "hang":
        ctypes.PyDLL(None).pause()  # PyDLL keeps the GIL: no Python thread or signal handler can run any more
    return 1.0


def starts_a_program_and_hangs(completions: str, **kwargs) -> float:
    program = subprocess.Popen(["sleep", "600"])
    Path(completions).write_text(str(program.pid))
    return float(program.wait())


def dies(completions: str, **kwargs) -> float:
    if completions == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


hoard: list[bytes] = []


def hoards(completions: str, **kwargs) -> float:
    hoard.append(b"x" * int(completions))
    return float(os.getpid())


def swells(completions: str, **kwargs) -> float:
    """Take memory step by step until somebody intervenes."""
    while completions == "swell":
        hoard.append(b"x" * 2**20)
        time.sleep(0.001)
    return 1.0


def starts_a_program_and_dies(completions: str, **kwargs) -> float:
    program = os.fork()
    if program == 0:
        time.sleep(600)
    Path(completions).write_text(str(program))
    os._exit(7)


def forks_and_returns_twice(completions: str, **kwargs) -> float:
    """Let a child, which inherits the socket, return from the same call."""
    if completions == "fork" and os.fork() == 0:
        return 1000.0
    return float(len(completions))


def reads_the_environment(completions: str, **kwargs) -> float:
    return float(completions in os.environ)


def returns(value, **kwargs):
    return {
        "none": None,
        "text": "1.0",
        "nan": math.nan,
        "inf": -math.inf,
        "list": [1.0],
        "huge": 10**400,
    }[value]


async def slow(completions: str, **kwargs) -> float:
    await asyncio.sleep(0.01 if completions == "quick" else 30)
    return 0.5


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, completions: str, **kwargs) -> float:
        return self.weight * len(completions)


class Waiting:
    async def __call__(self, **kwargs) -> float:
        return 0.25


@pytest.fixture
def runner_of():
    runners = []

    def make(reward_fn, **options) -> RewardRunner:
        runners.append(RewardRunner(reward_fn, **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


async def failure(runner: RewardRunner, **call) -> RewardError:
    with pytest.raises(RewardError) as caught:
        await runner(**call)
    return caught.value


async def test_the_number_and_the_keywords_arrive(runner_of) -> None:
    runner = runner_of(length)
    assert await runner(prompt="p", completions="four") == 4.0
    assert await runner(prompt="p", completions="four", bonus=0.5) == 4.5
    assert await runner_of(Weighted(0.5))(completions="four") == 2.0


async def test_calls_run_in_other_processes_at_most_num_workers(runner_of) -> None:
    runner = runner_of(where, num_workers=2)
    pids = set(await asyncio.gather(*(runner() for _ in range(50))))
    assert len(pids) <= 2 and os.getpid() not in pids


async def test_an_exception_comes_with_its_traceback_and_the_worker_goes_on(runner_of, capfd) -> None:
    runner = runner_of(raises)
    error = await failure(runner)
    assert error.kind == "exception"
    assert "KeyError: 'missing column'" in str(error) and "test_reward_runner.py" in str(error)
    assert "worker.py" not in str(error)
    assert "a reward may print" in capfd.readouterr().err
    assert (await failure(runner_of(exits))).kind == "exception"


@pytest.mark.parametrize("value", ["none", "text", "nan", "inf", "list", "huge"])
async def test_what_is_no_finite_number_breaks_the_contract(runner_of, value: str) -> None:
    error = await failure(runner_of(returns), value=value)
    assert error.kind == "contract" and "reward must be" in str(error)


async def test_a_call_that_never_returns_is_killed_and_delays_nobody(runner_of) -> None:
    runner = runner_of(hangs_in_c, timeout=8.0, num_workers=2)
    await asyncio.gather(runner(completions="a"), runner(completions="b"))
    hanging = asyncio.create_task(failure(runner, completions="hang"))
    await asyncio.sleep(0.05)
    assert await asyncio.gather(*(runner(completions="fine") for _ in range(20))) == [1.0] * 20
    assert not hanging.done()
    error = await hanging
    assert error.kind == "timeout" and "8 s" in str(error)
    assert await asyncio.gather(*(runner(completions="fine") for _ in range(4))) == [1.0] * 4


async def test_a_worker_that_leaks_is_replaced_between_calls(runner_of, monkeypatch) -> None:
    monkeypatch.setattr("arealite.utils.worker_process._CHECK_S", 60.0)  # else a slow call is checked, and fails
    runner = runner_of(hoards, num_workers=1, max_growth_gib=0.05)
    pids = [await runner(completions=str(14 * 2**20)) for _ in range(12)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [4, 4, 4], "four calls of 14 MiB are above 51 MiB"
    assert not any(is_alive(int(pid)) for pid in set(pids))


async def test_a_call_that_takes_too_much_memory_is_a_crash_with_that_reason(runner_of) -> None:
    runner = runner_of(swells, num_workers=1, timeout=30, max_growth_gib=0.1)
    error = await failure(runner, completions="swell")
    assert error.kind == "crash" and "GiB taken in one call, more than 0.1" in str(error)
    assert await runner(completions="fine") == 1.0


async def test_a_crash_is_seen_at_once_even_if_a_child_holds_the_socket(runner_of, tmp_path) -> None:
    note = tmp_path / "pid"
    error = await failure(runner_of(starts_a_program_and_dies, timeout=120), completions=str(note))
    assert error.kind == "crash" and "exit status 7" in str(error)
    assert not wait_gone([int(note.read_text())], timeout_s=60), "the child ends with the process"


async def test_a_fork_that_returns_too_shifts_no_reward(runner_of) -> None:
    runner = runner_of(forks_and_returns_twice, num_workers=1)
    for _ in range(3):
        assert await runner(completions="fork") == 4.0
        for length in (1, 2, 3):
            assert await runner(completions="x" * length) == length


async def test_workers_do_not_have_the_secret_of_the_run(runner_of, monkeypatch) -> None:
    monkeypatch.setenv("AREALITE_SECRET", "0123456789abcdef")
    monkeypatch.setenv("USERS_OWN", "kept")
    runner = runner_of(reads_the_environment)
    assert await runner(completions="USERS_OWN") == 1.0
    assert await runner(completions="AREALITE_SECRET") == 0.0


async def test_what_a_hanging_reward_has_started_ends_with_it(runner_of, tmp_path) -> None:
    note = tmp_path / "pid"
    assert (await failure(runner_of(starts_a_program_and_hangs, timeout=8.0), completions=str(note))).kind == "timeout"
    assert not is_alive(int(note.read_text()))


async def test_coroutine_functions_run_on_the_loop_with_a_deadline(runner_of) -> None:
    runner = runner_of(slow, timeout=1.0)
    assert await runner(completions="quick") == 0.5
    assert (await failure(runner, completions="slow")).kind == "timeout"
    assert await runner_of(Waiting())() == 0.25

    async def local(**kwargs) -> float:
        raise TimeoutError("the tool's own deadline")

    error = await failure(runner_of(local))
    assert error.kind == "exception" and "the tool's own deadline" in str(error)


@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError])
async def test_whatever_a_coroutine_function_raises_is_its_failure(runner_of, error: type[BaseException]) -> None:
    async def raises(**kwargs) -> float:
        raise error("of the reward")

    assert f"{error.__name__}: of the reward" in str(await failure(runner_of(raises)))


async def test_cancelling_a_call_is_not_a_failure(runner_of) -> None:
    call = asyncio.create_task(runner_of(slow)(completions="slow"))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_reward_whose_module_can_not_be_imported_says_why(runner_of, tmp_path, monkeypatch) -> None:
    (tmp_path / "fragile_reward.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise ImportError('no such library')\n"
        "def score(**kwargs): return 1.0"
    )
    monkeypatch.syspath_prepend(tmp_path)
    error = await failure(runner_of(importlib.import_module("fragile_reward").score))
    assert error.kind == "exception" and "no such library" in str(error)


async def test_files_of_the_user_do_not_stand_in_for_the_standard_library(runner_of, tmp_path, monkeypatch) -> None:
    for name in ("json", "logging", "types"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert await runner_of(length)(prompt="", completions="abc") == 3.0
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as if the script lay there, too
    assert await runner_of(length)(prompt="", completions="abc") == 3.0


def test_functions_that_no_worker_can_import_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="module level"):
        RewardRunner(lambda **kwargs: 1.0)


async def test_close_ends_workers_in_the_middle_of_a_call(runner_of) -> None:
    runner = runner_of(hangs_in_c, timeout=60)
    call = asyncio.create_task(failure(runner, completions="hang"))
    while not (workers := list(runner._pool._all)) or not workers[0].is_ready:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(runner.close)
    assert (await call).kind == "crash"
    assert not any(is_alive(worker.process.pid) for worker in workers)
    with pytest.raises(RuntimeError, match="close"):
        await runner(completions="a")


def run_script(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    script = tmp_path / "entry.py"
    script.write_text(textwrap.dedent(body))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )


def test_a_reward_of_the_entry_script_works(tmp_path: Path) -> None:
    process = run_script(
        tmp_path,
        """
        import asyncio
        from arealite.reward.runner import RewardRunner

        def score(completions, **kwargs):
            return 2.0 * len(completions)

        if __name__ == "__main__":
            runner = RewardRunner(score)
            print(asyncio.run(runner(completions="abc")))
            runner.close()
        """,
    )
    assert process.communicate(timeout=120)[0].strip() == "6.0"


TYPED = """
import asyncio, re
from arealite.reward.runner import RewardRunner
WEIGHT, NUMBER, rest = 0.5, re.compile(r"[0-9]+"), (n for n in [1.0])
def last(text, found=()):
    numbers = NUMBER.findall(text)
    return last("", numbers) if numbers else [*found][-1]

def score(completions, answer, **others):
    return WEIGHT * (last(completions) == answer)

class Scaled:
    def __init__(self, by):
        self.by = by
    def __call__(self, **call):
        return self.by * score(**call)

def next_one(completions, **others):
    return next(rest)

for function in (score, Scaled(6), lambda **call: 1 - score(**call)):
    runner = RewardRunner(function, num_workers=1)
    print([asyncio.run(runner(completions=text, answer="12")) for text in ("3 or 12", "12 or 3")])
    runner.close()

try:
    RewardRunner(next_one)
except ValueError as error:
    print(str(error)[:24], str(error)[-62:])

"""


def test_functions_that_were_typed_are_sent_with_what_they_use() -> None:
    """As notebooks have them: `__main__` is no file. What can't be sent is refused at once."""
    done = subprocess.run([sys.executable, "-iq"], input=TYPED, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [
        *("[0.5, 0.0]", "[3.0, 0.0]", "[0.5, 1.0]"),
        "reward_fn must be import Let it use data and functions only, or make it an `async def`.",
    ], done.stderr


def test_the_entry_script_is_imported_only_for_its_own_rewards(tmp_path: Path) -> None:
    process = run_script(
        tmp_path,
        """
        import asyncio, pathlib
        from arealite.reward import gsm8k_reward_fn
        from arealite.reward.runner import RewardRunner

        with pathlib.Path("imports").open("a") as file:
            file.write(__name__ + " ")

        if __name__ == "__main__":
            call = dict(prompt="", completions="#### 3", prompt_ids=[], completion_ids=[], answer="3")
            print(asyncio.run(RewardRunner(gsm8k_reward_fn)(**call)))  # not closed: must not keep the script alive
        """,
    )
    assert process.communicate(timeout=120)[0].strip() == "1.0"
    assert (tmp_path / "imports").read_text().split() == ["__main__"]


def test_no_worker_survives_a_killed_parent_even_in_the_middle_of_a_call(tmp_path: Path) -> None:
    process = run_script(
        tmp_path,
        """
        import asyncio, ctypes, os
        from arealite.reward.runner import RewardRunner

        def hang(**kwargs):
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            os.rename("pid", "ready")
            ctypes.PyDLL(None).pause()

        if __name__ == "__main__":
            asyncio.run(RewardRunner(hang, timeout=60)())
        """,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker = os.pidfd_open(int((tmp_path / "ready").read_text()))
    process.kill()
    process.communicate()
    assert select.select([worker], [], [], 120)[0]
    os.close(worker)
