"""What the supervisor makes of servers, with the registry of a run and real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from arealite.api.config.run import load_run_config
from arealite.api.errors import SERVER_FAILED, ConfigError
from arealite.inference.registry import Registry, ServerEntry
from arealite.launcher.place.base import Job
from arealite.launcher.place.local import LocalPlace, LocalSlot
from arealite.launcher.plan.plan import Placement, Run, make_plan
from arealite.launcher.supervise.supervisor import Supervisor

CONFIG = Path(__file__).parents[3] / "examples" / "arealite" / "configs" / "gsm8k_grpo.yaml"


class SilentSlot(LocalSlot):
    """Its jobs never register."""

    async def run(self, job: Job, output: Callable[[bytes], None]) -> int:
        return await super().run(Job(job.name, ["sleep", "60"], {}), output)


class SilentPlace(LocalPlace):
    async def take(self, placements: Sequence[Placement]) -> Sequence[SilentSlot]:
        return [SilentSlot([]) for _ in placements]


async def test_the_entry_of_a_killed_server_does_not_make_its_successor_ready(tmp_path: Path) -> None:
    """The entry that the attempt before left is still there when the next attempt begins."""
    overrides = [f"cluster.fileroot={tmp_path}", "cluster.n_gpus_per_node=0", "allocation_mode=lite.d1"]
    config = load_run_config(["--config", str(CONFIG), *overrides, "rollout.setup_timeout=0.5"])
    run = Run(config, make_plan(config), Path("entry.py"), [])
    run.folder.logs.mkdir(parents=True)
    registry = Registry(None)
    await registry.put(ServerEntry("server-0", "127.0.0.1:9", "lite", "killed"))
    async with asyncio.timeout(120):
        end = await Supervisor(run, SilentPlace(), registry, "secret").supervise(None, 0.0)
    assert end.status == SERVER_FAILED
    assert "server-0 was not ready within 0.5 s" in (run.folder.logs / "launcher.log").read_text()


class ReadyOnceSlot(LocalSlot):
    """Its job registers, until the supervisor has noted it, if it `is_first`; else it never does."""

    def __init__(self, registry: Registry, log: Path, *, is_first: bool) -> None:
        super().__init__([])
        self._registry, self._log, self._is_first = registry, log, is_first
        self.is_closed = False

    async def run(self, job: Job, output: Callable[[bytes], None]) -> int:
        command = "sleep 60"
        if self._is_first:
            await self._registry.put(ServerEntry(job.name, "127.0.0.1:9", "lite", "first"))
            command = f"until grep -q 'is ready at' '{self._log}'; do sleep 0.02; done"
        return await super().run(Job(job.name, ["sh", "-c", command], {}), output)

    async def close(self) -> None:
        await super().close()
        self.is_closed = True


class OneSlotPlace(LocalPlace):
    """Has room for one job."""

    def __init__(self, registry: Registry, log: Path) -> None:
        self._registry, self._log = registry, log
        self.slots: list[ReadyOnceSlot] = []

    async def take(self, placements: Sequence[Placement]) -> Sequence[ReadyOnceSlot]:
        if not all(slot.is_closed for slot in self.slots):
            raise ConfigError("the place is taken")
        self.slots.append(ReadyOnceSlot(self._registry, self._log, is_first=not self.slots))
        return self.slots[-1:]


async def test_a_server_that_hangs_when_it_is_started_again_gives_its_slot_back(tmp_path: Path) -> None:
    """On Ray the next one would wait for the GPUs of the last one."""
    overrides = [f"cluster.fileroot={tmp_path}", "cluster.n_gpus_per_node=0", "allocation_mode=lite.d1"]
    overrides += ["rollout.setup_timeout=0.5", "launcher.server_restarts=2"]
    config = load_run_config(["--config", str(CONFIG), *overrides])
    run = Run(config, make_plan(config), Path("entry.py"), [])
    run.folder.logs.mkdir(parents=True)
    registry, log = Registry(None), run.folder.logs / "launcher.log"
    place = OneSlotPlace(registry, log)
    async with asyncio.timeout(60):
        end = await Supervisor(run, place, registry, "secret").supervise(None, 0.0)
    assert end.status == SERVER_FAILED and end.reason == "server-0 was not ready within 0.5 s"
    assert [slot.is_closed for slot in place.slots] == [True] * 3
