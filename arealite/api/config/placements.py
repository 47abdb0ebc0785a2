"""`allocation_mode` as the original's Core writes it: a placement group for each model function call.

It loads as the string and the `workers` block that say the same, with one warning: `<role>_train` and `<role>_inf` are
the workers of a role, `actor_gen` is the servers, of the kind that `rollout.backend` names, or of its default.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

from omegaconf import OmegaConf

from arealite.api.config.launcher import Strategy
from arealite.api.config.legacy import Change
from arealite.api.config.rollout import InferenceEngineConfig
from arealite.api.errors import ConfigError
from arealite.api.servers import KINDS

logger = logging.getLogger("arealite.config")

Tree = dict[str, Any]
_KEY = "allocation_mode"
_EXAMPLE = "placement_group: {strategy: PACK, bundles: [{GPU: 8}]}"
_WHY_NOT = {"CPU": "launcher.trainer_cpus_per_gpu and inference_server_cpus_per_gpu reserve cores"}
"""Resources that a bundle may not name, and why."""


def spelled_out(sources: Mapping[str, Tree], changes: list[Change]) -> dict[str, Tree]:
    """Return what was given, by place, with a mapping of `allocation_mode` spelled as we do, noted in `changes`.
    Raises ConfigError."""
    given = {place: tree[_KEY] for place, tree in sources.items() if _KEY in tree}
    if not any(isinstance(value, dict) for value in given.values()):
        return dict(sources)
    plain = {place: {key: tree[key] for key in tree if key != _KEY} for place, tree in sources.items()}
    *_, last = given
    if isinstance(given[last], dict):
        trees = [OmegaConf.create({_KEY: value}) for value in given.values() if isinstance(value, dict)]
        merged = OmegaConf.to_container(OmegaConf.merge(*trees))
        assert isinstance(merged, dict)
        backends = [
            tree["rollout"].get("backend") for tree in sources.values() if isinstance(tree.get("rollout"), dict)
        ]
        backend = next(filter(None, reversed(backends)), InferenceEngineConfig().backend)
        mode, workers = _translated(merged[_KEY], backend)
        _check_given_once(sources, workers)
        new = {f"workers.{role}.{key}": value for role, wish in workers.items() for key, value in wish.items()}
        said = " ".join(f"{key}={value}" for key, value in new.items())
        Change(_KEY, {_KEY: mode, **new}).report(changes, as_words=f"{mode} with {said}")
        plain[last] = OmegaConf.to_container(OmegaConf.merge(plain[last], {"workers": workers}))
        plain[last][_KEY] = mode
    else:
        plain[last][_KEY] = given[last]
    return plain


def _translated(placements: Mapping[str, Any], backend: str) -> tuple[str, dict[str, Tree]]:
    """Return the string, and ranks and strategy by role."""
    servers, workers = "", dict[str, Tree]()
    for name, value in placements.items():
        key, call = f"{_KEY}.{name}", re.fullmatch(r"(\w+)_(train|inf|gen)", str(name).replace("-", "_"))
        if call is None:
            _fail(f"{_KEY} must name calls, such as actor_train, ref_inf or actor_gen", name, "Correct the name.")
        bundles, strategy = _placement_group(key, value)
        if call[2] != "gen":
            wish = {"ranks": sum(bundles), "strategy": _strategy(key, bundles, strategy or "PACK")}
            if workers.setdefault(call[1], wish) != wish:
                _fail(
                    f"{key} must be the placement of the other call of its role, which has one group of workers",
                    f"{wish} and {workers[call[1]]}",
                    f"Remove {name}.",
                )
        elif call[1] != "actor":
            _fail(f"{_KEY} must place the servers as actor_gen, as they have the actor's weights", name, "Rename it.")
        elif backend not in KINDS:
            change = f"Set rollout.backend to one of {', '.join(KINDS)}."
            _fail(
                f"{key} must be servers whose kind rollout.backend names", f"{sum(bundles)} GPUs and {backend}", change
            )
        else:
            servers = f"{backend}.d{sum(bundles)}p1t1+"
            if strategy is not None:
                logger.warning("%s.placement_group.strategy has no effect: servers fill the nodes in order.", key)
    trained = next((role for role in ("actor", "model") if role in workers), None)
    if trained is None:
        change = f"Add actor_train: {{{_EXAMPLE}}}."
        _fail(f"{_KEY} must place actor_train or model_train", ", ".join(map(str, placements)) or "nothing", change)
    return f"{servers}d{workers[trained]['ranks']}p1t1", workers


def _placement_group(key: str, value: Any) -> tuple[list[int], str | None]:
    """Return the GPUs of each bundle, and the strategy if one is given."""
    group = value.get("placement_group") if isinstance(value, dict) and [*value] == ["placement_group"] else None
    if not isinstance(group, dict) or not group.keys() <= {"strategy", "bundles"}:
        _fail(f"{key} must be a placement group of strategy and bundles", value, f"Write {_EXAMPLE}.")
    strategy, bundles = group.get("strategy"), group.get("bundles")
    if strategy is not None and strategy not in get_args(Strategy):
        _fail(f"{key}.placement_group.strategy must be one of {', '.join(get_args(Strategy))}", strategy, "Correct it.")
    if not isinstance(bundles, list) or not bundles or not all(isinstance(one, dict) for one in bundles):
        _fail(f"{key}.placement_group.bundles must be a list of resources", bundles, f"Write {_EXAMPLE}.")
    for name in dict.fromkeys(name for bundle in bundles for name in bundle if name != "GPU"):
        why = _WHY_NOT.get(name, "workers and servers reserve nothing else")
        _fail(f"{key}.placement_group.bundles must hold GPUs alone", name, f"Remove it: {why}.")
    sizes = [bundle.get("GPU") for bundle in bundles]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        _fail(f"GPU of each bundle in {key} must be a whole number from 1 on", sizes, "Correct it.")
    return sizes, strategy


def _strategy(key: str, bundles: list[int], strategy: str) -> str:
    """Return the strategy for bundles of one GPU that places them as that of larger ones, which never leave a node."""
    if len(bundles) == 1:
        return "STRICT_PACK"
    if max(bundles) > 1 and "SPREAD" in strategy:
        change = "Use PACK, which fills node after node."
        _fail(f"{key} must have bundles of 1 GPU with {strategy}, as each worker has one", bundles, change)
    return strategy


def _check_given_once(sources: Mapping[str, Tree], workers: Mapping[str, Tree]) -> None:
    for tree in sources.values():
        given = tree.get("workers") or {}
        wishes = {role: given.get(role) or {} for role in workers} if isinstance(given, dict) else {"": given}
        for role, wish in wishes.items():
            if not isinstance(wish, dict):
                change = "Write e.g. workers: {actor: {threads: 4}}."
                _fail(".".join(filter(None, ["workers", role])) + " must be a block", wish, change)
            for key in wish.keys() & {"ranks", "strategy", "share"}:
                place = f"{_KEY}.{role}_train or {role}_inf"
                _fail(f"the workers of {role} must be given once", f"workers.{role}.{key} and {place}", "Remove one.")


def _fail(rule: str, got: Any, change: str) -> NoReturn:
    raise ConfigError(f"{rule}: got {got}. {change}")
