"""What the supervisor makes of servers, with the registry of a run and real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from arealite.launcher.place.base import Job
from arealite.launcher.place.local import LocalPlace
from arealite.launcher.plan.plan import Placement
from arealite.launcher.supervise.supervisor import SERVER_FAILED, ServerPolicy, Supervisor
from arealite.utils.registry import Claim, Registry, ServerRecord
from arealite.watchdog.stall import StallPolicy


async def test_the_entry_of_a_killed_server_does_not_make_its_successor_ready(tmp_path: Path) -> None:
    """The entry that the attempt before left lasts until its lease ends, which may be after the next attempt began."""
    registry, place = Registry(None), LocalPlace()
    record = ServerRecord("127.0.0.1:9", "lite", "here", 1, "ready", "", 12.5)
    registry.claim("server-0", Claim(record, "killed", 0, 60.0, is_first=True))
    placement = Placement("server-0", "server", node=0, devices=(), index=0)
    policy = ServerPolicy(
        place=place,
        describe=lambda one, _: Job(one.name, ["sleep", "60"], {}),
        setup_timeout_s=0.5,
        restarts=0,
        progress=lambda: 0,
        registry=registry,
        publish_progress=False,
        invitation=None,
    )
    stall = StallPolicy(timeout_s=0, setup_timeout_s=60, on_stall="continue", foreign_servers={})
    async with Supervisor(log_folder=tmp_path, stall=stall, env={}) as supervisor:
        slots = await supervisor.take_slots(place, [placement])
        assert slots is not None
        supervisor.start_servers([(placement, slots[0])], policy)
        async with asyncio.timeout(10):
            assert await supervisor.wait() == SERVER_FAILED
    assert "server-0 was not ready within 0.5 s" in (tmp_path / "launcher.log").read_text()
