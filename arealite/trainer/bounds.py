"""The part of a run that bounded a step: trainer, rollout, reward, workflow or weights.

A wait for a batch is divided among what episodes did meanwhile (`rollout/activity.py`); the rest of the step is the
trainer's own.
"""

from collections.abc import Mapping

_FULL = "wait/servers_full_s"
_OF_WAITS = {"wait/reward_s": "reward", "wait/workflow_s": "workflow"}
_NAMES = ("trainer", "rollout", "reward", "workflow", "weights")


def bounds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each part in the step, as `bound/<name>`; the shares add up to 1."""
    step_s, rollout_s = metrics.get("time/step_s", 0.0), metrics.get("time/rollout_s")
    if rollout_s is None or step_s <= 0:
        return {}
    parts_s = {name: metrics.get(key, 0.0) for key, name in _OF_WAITS.items()}
    if (waited_s := sum(parts_s.values())) > rollout_s:  # it has waits of the step before
        parts_s = {name: seconds * rollout_s / waited_s for name, seconds in parts_s.items()}
    parts_s["rollout"] = max(0.0, rollout_s - waited_s)
    parts_s["weights"] = metrics.get("time/weights_s", 0.0)
    parts_s["trainer"] = max(0.0, step_s - sum(parts_s.values()))
    whole_s = sum(parts_s.values())  # longer than the step if its parts overlap
    return {f"bound/{name}": parts_s[name] / whole_s for name in _NAMES}


def verdict(metrics: Mapping[str, float]) -> str | None:
    """Return the part with the largest share, such as `trainer-bound 61 %: update`; None without rollouts."""
    shares = {name: metrics[key] for name in _NAMES if (key := f"bound/{name}") in metrics}
    if not shares:
        return None
    name = max(shares, key=lambda name: shares[name])
    detail = ""
    if name == "trainer":
        detail = f": {_longest_phase(metrics)}"
    elif name == "rollout" and metrics.get(_FULL, 0.0) > metrics.get("wait/servers_s", 0.0):
        detail = ": servers full"
    elif name == "rollout" and metrics.get("wait/servers_s", 0.0) > 0:
        detail = ": servers"
    return f"{name}-bound {shares[name]:.0%}".replace("%", " %") + detail


def _longest_phase(metrics: Mapping[str, float]) -> str:
    not_its_own = ("time/step_s", "time/rollout_s", "time/weights_s")
    own = {key: value for key, value in metrics.items() if key.startswith("time/") and key not in not_its_own}
    own["other"] = metrics["time/step_s"] - sum(metrics.get(key, 0.0) for key in (*own, *not_its_own[1:]))
    return max(own, key=lambda key: own[key]).removeprefix("time/").removesuffix("_s")
