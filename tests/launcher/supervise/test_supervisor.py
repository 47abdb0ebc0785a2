"""What the supervisor makes of servers, with the registry of a run and real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from arealite.api.config.run import load_run_config
from arealite.launcher.place.base import Job
from arealite.launcher.place.local import LocalPlace, LocalSlot
from arealite.launcher.plan.plan import Placement, Run, make_plan
from arealite.launcher.supervise.supervisor import SERVER_FAILED, Supervisor
from arealite.utils.registry import Claim, Registry, ServerRecord

CONFIG = Path(__file__).parents[3] / "examples" / "arealite" / "configs" / "gsm8k_grpo.yaml"


class SilentSlot(LocalSlot):
    """Its jobs never register."""

    async def run(self, job: Job, output: Callable[[bytes], None]) -> int:
        return await super().run(Job(job.name, ["sleep", "60"], {}), output)


class SilentPlace(LocalPlace):
    async def take(self, placements: Sequence[Placement]) -> Sequence[SilentSlot]:
        return [SilentSlot([]) for _ in placements]


async def test_the_entry_of_a_killed_server_does_not_make_its_successor_ready(tmp_path: Path) -> None:
    """The entry that the attempt before left lasts until its lease ends, which may be after the next attempt began."""
    overrides = [f"cluster.fileroot={tmp_path}", "cluster.n_gpus_per_node=0", "allocation_mode=lite.d1"]
    config = load_run_config(["--config", str(CONFIG), *overrides, "rollout.setup_timeout=0.5"])
    run = Run(config, make_plan(config), Path("entry.py"), [])
    run.folder.logs.mkdir(parents=True)
    registry = Registry(None)
    record = ServerRecord("127.0.0.1:9", "lite", "here", 1, "ready", "", 12.5)
    registry.claim("server-0", Claim(record, "killed", 0, 60.0, is_first=True))
    async with asyncio.timeout(30):
        end = await Supervisor(run, SilentPlace(), registry, "secret").supervise(None, 0.0)
    assert end.status == SERVER_FAILED
    assert "server-0 was not ready within 0.5 s" in (run.folder.logs / "launcher.log").read_text()
