"""When weights were published and how they were checked, and who served."""

from arealite.viewer.timeline import timeline

ROWS = [
    {"step": 0, "time/step_s": 5.0, "time/weights_s": 0.5, "servers/live": 1.0, "servers/joined": 1.0,
     "servers/left": 0.0, "weights/sent_mib": 3.0, "policy/canary_gap": 2e-7},
    {"step": 1, "time/step_s": 7.0, "time/weights_s": 0.25, "time/save_s": 2.0, "servers/live": 2.0,
     "servers/joined": 3.0, "servers/left": 1.0, "weights/sent_mib": 0.0},
    {"step": 2, "eval/reward": 1.0, "time/step_s": 1.0},
]  # fmt: skip


def test_updates_and_servers_stand_at_the_second_at_which_they_were() -> None:
    (chart,) = timeline(ROWS, {1: "74032ccf", 2: "<b>"}, "broadcast")
    updates, servers = chart["traces"]
    assert (updates["x"], updates["y"]) == ([5.0, 10.0], [0.5, 0.25])
    assert updates["text"] == [
        "version 1 by broadcast; asked of every server: canary gap 2.0e-07; the trainer's fingerprint 74032ccf",
        "version 2 within the trainer's process; no canary",
    ]
    assert (servers["y"], servers["text"]) == ([1.0, 2.0], ["1 joined", "2 joined, 1 left"])
    assert timeline(ROWS[2:], {}, "None") == []


def test_the_words_of_a_long_timeline_stay_with_their_points() -> None:
    rows = [{"step": i, "time/step_s": 1.0, "time/weights_s": float(i % 7)} for i in range(5000)]
    (chart,) = timeline(rows, {}, "disk")
    (trace,) = chart["traces"]
    assert len(trace["x"]) == len(trace["text"]) < 2100 and "yaxis2" not in chart["layout"]
    assert trace["text"] == [f"version {int(x)} through the disk; no canary" for x in trace["x"]]
