import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from testing_views import write_metrics, write_run

from arealite.cli.main import main
from arealite.utils.http_server import HttpServer
from arealite.viewer.app import Viewer

TOKEN = "the token of the test"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
API = ("runs", "run", "rows", "row", "snippets", "search", "prompt", "untrained", "evaluations")
Get = Callable[..., Awaitable[tuple[int, Any, Any]]]


def served(folder: Path, test: Callable[[Get], Awaitable[None]]) -> None:
    """Serve a folder to a test that asks by `get(path, headers, body, **query)` for status, headers and answer."""

    async def run() -> None:
        server = HttpServer(Viewer(folder, TOKEN).app, TOKEN)
        port = await server.start("127.0.0.1")
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

                async def get(
                    path: str, headers: dict[str, str] = SHOWN, body: str | None = None, **query: str
                ) -> tuple[int, Any, Any]:
                    method = "GET" if body is None else "POST"
                    async with session.request(method, path, headers=headers, params=query, data=body) as response:
                        is_json = response.content_type == "application/json"
                        answer = await (response.json() if is_json else response.text())
                        return response.status, response.headers, answer

                await test(get)
        finally:
            await server.close()

    asyncio.run(run())


def test_no_data_without_the_token(tmp_path: Path) -> None:
    async def test(get: Get) -> None:
        for name in API:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"token={TOKEN}"}):
                status, _, body = await get(f"/api/{name}", headers, run="t0", token=TOKEN)
                assert (status, [*body]) == (401, ["error"]), name
        assert (await get("/api/export", {}, "0", run="t0", generation="0"))[0] == 401
        assert (await get("/api/runs"))[0] == 200

    write_run(tmp_path / "t0")
    served(tmp_path, test)


def test_what_is_open_to_all_holds_no_data_and_lets_no_other_page_in(tmp_path: Path) -> None:
    async def test(get: Get) -> None:
        status, headers, page = await get("/", {})
        assert status == 200 and "trial-of-the-test" not in page
        assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        for name in ("view.js", "view.css", "source.js", "page.css", "plotly.js"):
            status, headers, text = await get(f"/files/{name}", {})
            assert status == 200 and headers["X-Content-Type-Options"] == "nosniff" and text
        for name in ("view.html", "..%2Fapp.py", "%2Fetc%2Fpasswd", "metrics.jsonl"):
            assert (await get(f"/files/{name}", {}))[0] == 404

    write_run(tmp_path / "trial-of-the-test")
    served(tmp_path, test)


def test_a_name_that_its_owner_lets_point_here_is_refused(tmp_path: Path) -> None:
    async def test(get: Get) -> None:
        for path in ("/", "/files/view.js", "/api/runs"):
            names = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1")
            for host in (*names, "127.0.0.1.", "a:b:c", "xn--ü", ""):  # the last ones are no names
                status, _, body = await get(path, SHOWN | {"Host": host})
                assert (status, "must be asked for as 127.0.0.1" in str(body)) == (421, True), (path, host)
            for host in ("localhost", "127.0.0.1:1", "[::1]:8800"):
                assert (await get(path, SHOWN | {"Host": host}))[0] == 200

    write_run(tmp_path / "t0")
    served(tmp_path, test)


def test_one_run_from_its_list_to_a_trajectory(tmp_path: Path) -> None:
    async def test(get: Get) -> None:
        _, _, [line] = await get("/api/runs")
        assert (line["run"], line["steps"]) == ("e/t0", 2)
        _, headers, found = await get("/api/run", run="e/t0")
        assert found["title"] == "e / t0" and found["cards"][1][:2] == ["Reward", "0 → 0.1"]
        assert (await get("/api/run", SHOWN | {"If-None-Match": headers["ETag"]}, run="e/t0"))[0] == 304
        _, _, rows = await get("/api/rows", run="e/t0", generation="-1", start="0")
        assert (rows["generation"], rows["count"], rows["is_complete"], rows["problems"]) == (0, 9, True, [])
        assert rows["sample"] == [0, 0, 1, 0, 1, 0, 1, 0, 1]
        _, _, texts = await get("/api/snippets", run="e/t0", generation="0", rows="1,2")
        assert texts == ["4", "4"]
        _, _, hits = await get("/api/search", run="e/t0", generation="0", text="HELD", start="0", end="9")
        assert hits == {"rows": [0], "end": 0}
        _, _, row = await get("/api/row", run="e/t0", generation="0", row="8")
        assert (row["facts"]["prompt_id"], row["facts"]["reward"], row["texts"]) == ("0-3", 1.0, [*"2 + 2?4"])
        assert row["prompt"] == (await get("/api/prompt", run="e/t0", prompt="0-3"))[2]
        assert len((await get("/api/untrained", run="e/t0"))[2]) == 3

    write_run(tmp_path / "e/t0")
    served(tmp_path, test)


def test_an_export_has_the_rows_that_it_was_asked_for(tmp_path: Path) -> None:
    async def test(get: Get) -> None:
        await get("/api/rows", run="e/t0", generation="-1", start="0")
        status, _, page = await get("/api/export", SHOWN, "8,0,3", run="e/t0", generation="0")
        data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
        assert status == 200 and data["rows"]["names"] == [["eval_step_0", 1], ["step_0", 1], ["step_1", 1]]
        assert data["rows"]["prompt_id"] == ["0-0", "0-1", "0-3"]
        assert [row["facts"]["sample"] for row in data["row"]] == data["rows"]["sample"] == [0, 0, 1]
        assert [len(row["prompt"]) for row in data["row"]] == [0, 1, 1]
        assert data["row"][1]["prompt"] == (await get("/api/prompt", run="e/t0", prompt="0-1"))[2]
        status, _, answer = await get("/api/export", SHOWN, ",".join(["0"] * 2001), run="e/t0", generation="0")
        assert status == 400 and "at most 2000 rows: got 2001" in answer["error"]
        assert "got generation 3 of 0" in (await get("/api/export", SHOWN, "0", run="e/t0", generation="3"))[2]["stale"]

    write_run(tmp_path / "e/t0")
    served(tmp_path, test)


def test_what_can_not_be_answered_is_said(tmp_path: Path) -> None:
    async def test(get: Get) -> None:
        status, _, body = await get("/api/run", run="../e/t0")
        assert status == 400 and "a run must be below the folder: got '../e/t0'" in body["error"]
        status, _, body = await get("/api/rows", run="e/t0", generation="x", start="0")
        assert status == 400 and "generation must be a whole number: got 'x'" in body["error"]
        status, _, body = await get("/api/rows", run="e/t0")
        assert status == 400 and "the query must have generation" in body["error"]
        status, _, body = await get("/api/row", run="e/t0", generation="3", row="0")
        assert status == 200 and "got generation 3 of 0" in body["stale"]
        (tmp_path / "e/t0/config.yaml").write_text("5")
        status, _, body = await get("/api/run", run="e/t0")
        assert status == 400 and f"{tmp_path}/e/t0/config.yaml must be as its writer left it" in body["error"]

    write_run(tmp_path / "e/t0")
    served(tmp_path, test)


def test_a_folder_that_no_writer_of_ours_has_left_is_answered_in_words(tmp_path: Path) -> None:
    """None of it is an error of the server."""

    async def ask(get: Get, run: str) -> list[Any]:
        answers = [await get(f"/api/{name}", run=run) for name in ("run", "untrained", "evaluations")]
        answers.append(rows := await get("/api/rows", run=run, generation="-1", start="0"))
        everything = ",".join(map(str, range(rows[2].get("count", 0)))) or "0"
        now = {"run": run, "generation": str(rows[2].get("generation", 0))}
        answers += [await get("/api/row", **now, row=number) for number in everything.split(",")]
        answers.append(await get("/api/snippets", **now, rows=everything))
        answers.append(await get("/api/search", **now, text="4", start="0", end="99"))
        answers += [await get("/api/export", SHOWN, body, **now) for body in (everything, "99", "\xff", "")]
        return answers

    def changed(step: Path, **columns: Any) -> None:
        table = pq.read_table(step / "0.parquet", partitioning=None)
        for name, values in columns.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        pq.write_table(table, step / "0.parquet")

    def path_of_model(path: Any) -> Callable[[Path], object]:
        return lambda run: (run / "config.yaml").write_text(json.dumps({"actor": path}))

    damages: dict[str, Callable[[Path], object]] = {
        "list": path_of_model([1]),
        "long": path_of_model({"path": "a" * 5000}),
        "odd": path_of_model({"path": "a\0b"}),
        "nulls": lambda run: changed(
            run / "rollouts/step_1", prompt_id=[None] * 4, reward=[None] * 4, segments=[None] * 4
        ),
        "texts": lambda run: changed(run / "rollouts/step_1", reward=["high"] * 4),
        "lengths": lambda run: changed(run / "rollouts/step_1", logprobs=[[0.0], None, [], [0.0]]),
        "pipe": lambda run: os.mkfifo(run / "rollouts/step_1/1.parquet"),
        "half": lambda run: os.truncate(run / "rollouts/step_1/0.parquet", 2000),
        "number": lambda run: (run / "rollouts/step_1").rename(run / f"rollouts/step_{10**20}"),
    }

    async def test(get: Get) -> None:
        for name, damage in damages.items():
            damage(write_run(tmp_path / name))
            for status, _, answer in await ask(get, name):
                assert status == 200 or (status == 400 and answer["error"]), (name, status, answer)
        _, _, rows = await get("/api/rows", run="nulls", generation="0", start="5")
        assert rows["prompt_id"] == [""] * 4 and rows["reward"] == [None] * 4 and "step_1" in rows["problems"][0]
        _, _, row = await get("/api/row", run="lengths", generation="0", row="5")
        assert row["tokens"] is None and row["segments"] == [{"given": "2 + 2?"}, {"sampled": "4"}]
        _, _, hits = await get("/api/search", run="nulls", generation="0", text="4", start="0", end="9")
        assert hits == {"rows": [1, 2, 3, 4, 0], "end": 0}, "what is damaged hides no other file"
        shutil.rmtree(tmp_path / "list")
        for status, _, answer in (await ask(get, "list"))[:4]:
            assert (status, "must be below the folder: got 'list'" in answer["error"]) == (400, True)

    write_run(tmp_path / "whole")
    served(tmp_path, test)


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    write_metrics(tmp_path / "e/t0", [0])
    command = [sys.executable, "-m", "arealite.cli.main", "view", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            address, _, token = process.stdout.readline().strip().partition("#token=")
            assert address.startswith("http://127.0.0.1:") and len(token) == 32
            request = urllib.request.Request(f"{address}api/runs", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=120) as response:
                assert b'"e/t0"' in response.read()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        assert process.stderr.read() == ""


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "nothing")]) == 2
    assert "the folder to view must exist: got " in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port must be a free port: got {port}" in capsys.readouterr().err
    assert main(["view", str(tmp_path), "--port", "70000"]) == 2
    assert "--port must be a free port: got 70000" in capsys.readouterr().err


def test_names_and_texts_that_are_not_utf_8_are_shown_escaped(tmp_path: Path) -> None:
    async def test(get: Get) -> None:
        _, _, [line] = await get("/api/runs")
        assert line["run"] == r"t\udcff"
        _, _, found = await get("/api/run", run=line["run"])
        assert (
            found["title"] == f"{tmp_path.name} / t\\udcff"
            and found["charts"][0]["traces"][0]["name"] == r"workflow/\ud800"
        )

    write_metrics(folder := tmp_path / os.fsdecode(b"t\xff"), [])
    (folder / "metrics.jsonl").write_text('{"step": 0, "workflow/\\ud800": 1.0}\n')
    served(tmp_path, test)
