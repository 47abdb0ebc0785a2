"""Configs of AReaLite v0.3 and of AReaL, by the loader's own tables of old keys."""

from arealite.api.config.legacy import Change, migrate
from arealite.api.config.placements import spelled_out
from arealite.api.config.schema import ConfigKey
from arealite.api.config.words import hint
from arealite.migrate.rules import New, Tree, at, has, shown

V03: Tree = {
    "actor.reward_clip": 20.0,
    "actor.adv_norm": True,
    "actor.group_reward_norm": False,
    "actor.kl_ctl": 0.1,
    "actor.optimizer.eps": 1e-5,
    "gconfig.n_samples": 1,
}
"""Defaults of v0.3 that are not ours."""
TODAY: Tree = {
    "actor.reward_clip": 20.0,
    "actor.baseline": "none",
    "actor.reward_scale": "none",
    "actor.kl_ctl": 0.1,
    "actor.gradient_checkpointing": False,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.weight_decay": 0.01,
    "actor.optimizer.beta2": 0.999,
    "gconfig.n_samples": 1,
}
"""Defaults of AReaL in 2026 that are not ours."""
_OF_TODAY = {"scheduler", "perf_tracer", "enable_offload"}
_OURS = ("lite", "reward", "perf_trace", "agent", "workers", "mode", "teacher")
_CHOICES = ("algorithm", "baseline", "reward_scale", "proximal", "correction", "aggregation", "objective", "lora")


def translated(given: Tree, keys: dict[str, ConfigKey]) -> New:
    """Return what a file of AReaL says here: its order and values stay, old keys move or go."""
    changes: list[Change] = []
    problems: list[str] = []
    kept = migrate(given, keys, problems, changes)
    (kept,) = spelled_out({"": kept}, changes).values()
    new = New(kept)
    new.problems += problems
    for change in changes:
        was = at(given, change.old)
        for key, value in change.new.items():
            new.origins[key] = change.old
            became = f"{change.old}: {shown(change.old, was)}" if was is not None else "what the backends said"
            new.comments[key] = change.old if was == value else became
        if not change.new:
            new.gone[f"{change.old}: {shown(change.old, was)}"] = change.why
    _leave_out_unknown(new, kept, "", keys)
    _add_defaults(new, given)
    return new


def _leave_out_unknown(new: New, block: Tree, prefix: str, keys: dict[str, ConfigKey]) -> None:
    """Move keys that nobody knows out of the config; the user's own class may know them."""
    for name, value in list(block.items()):
        key = f"{prefix}{name}"
        known = keys.get(key)
        if known is None:
            advice = hint(key, keys) or "Remove it, or keep it in your script's own config class."
            new.problems.append(f"{key} must be a key of ours: got {shown(key, value)}. {advice}")
            del block[name]
        elif isinstance(value, dict) and known.block is not None:
            _leave_out_unknown(new, value, f"{key}.", keys)


def _add_defaults(new: New, given: Tree) -> None:
    """Write the defaults of a file that is AReaL's where it is silent; one of ours has our defaults."""
    actor = new.tree.get("actor")
    was = given.get("actor")
    if not isinstance(actor, dict) or not isinstance(was, dict) or any(name in given for name in _OURS):
        return
    if any(name in was for name in _CHOICES):
        return
    backends = [str(block.get("backend")) for block in given.values() if isinstance(block, dict)]
    is_todays = bool(_OF_TODAY & given.keys()) or "reward_norm" in was or any(":" in one for one in backends)
    framework = "AReaL" if is_todays else "AReaLite v0.3"
    for key, value in (TODAY if is_todays else V03).items():
        leaf = key.rpartition(".")[2]
        is_known = has(new.tree, key) or (leaf in ("baseline", "reward_scale") and "group_reward_norm" in was)
        is_moot = (leaf == "kl_ctl" and not given.get("ref")) or (leaf == "group_reward_norm" and "reward_norm" in was)
        if not is_known and not is_moot and leaf not in was:
            new.put(key, value, f"{framework}'s default")
