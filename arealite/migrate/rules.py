"""How keys of another framework become ours: the parts of the tables in trl.py, verl.py and prime_rl.py.

A table has a rule for each key that matters. A key that the file does not give has the framework's default, which is
written where ours is another value, so that the run stays the same. docs/migration.md shows the tables.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from arealite.api.config.types import MISSING

Tree = dict[str, Any]

ABSENT = object()
"""No default: nothing is written where the file is silent."""
_UNUSABLE = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError)
"""What conversions raise for values of other types."""
NOTHING = object()
"""What a rule makes of a value that needs no key here."""


class Because(NamedTuple):
    """A value of ours, and how it was found."""

    value: Any
    why: str


class WithoutCounterpart(Exception):
    """A value that nothing here stands for, and why."""


class MustDecide(WithoutCounterpart):
    """One without which another algorithm would be trained."""


@dataclass(frozen=True)
class Rule:
    """What a key becomes: its value, or what `make(value, old)` returns, for the first of `ours` or for several by key.

    Without `ours` it has no counterpart, for the reason `why`; its `default` needs none.
    """

    ours: str
    default: Any = ABSENT
    make: Callable[[Any, "Old"], Any] | None = None
    why: str = ""


class Old:
    """What a file gives by dotted key, in its order, over the defaults of its framework."""

    def __init__(
        self,
        given: Tree,
        rules: Mapping[str, Rule],
        *,
        framework: str,
        devices: int,
        stem: str,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.rules = rules
        aliases = aliases or {}
        flat = dict(_flat(given, "", {*rules, *aliases}))
        self.given = {aliases.get(key, key): value for key, value in flat.items()}
        self.written = {aliases.get(key, key): key for key in flat}
        """What the file calls each of its keys."""
        self.framework = framework
        self.devices = devices
        self.stem = stem

    def __contains__(self, key: str) -> bool:
        return key in self.given

    def __getitem__(self, key: str) -> Any:
        """Return what is given, else the default; None if there is none."""
        default = self.rules[key].default
        return self.given.get(key, None if default is ABSENT else default)


@dataclass
class New:
    """A config of ours in the making: values, a comment by dotted key, and what has no place in it."""

    tree: Tree = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """The old key of each key of ours."""
    gone: dict[str, str] = field(default_factory=dict)
    """By old key and value, or pattern of keys, why it has no counterpart."""
    matched: dict[str, list[str]] = field(default_factory=dict)
    """The keys of each pattern that say something."""
    problems: list[str] = field(default_factory=list)
    """What someone must decide: unknown keys, values that could not be converted."""

    def put(self, key: str, value: Any, comment: str, old: str = "") -> None:
        """Set a key that is not there yet; a second, different value is a problem."""
        *parents, leaf = key.split(".")
        block: Any = self.tree
        for parent in parents:
            block = block.setdefault(parent, {}) if isinstance(block, dict) else block
        if not isinstance(block, dict):
            if old:
                self.problems.append(f"{key} must stand in a block: got {shown(key, block)}. Correct what {old} says.")
        elif leaf not in block or block[leaf] == {}:
            block[leaf] = value
            self.comments[key] = comment
            self.origins[key] = old
        elif value not in (block[leaf], {}):
            got = f"{shown(key, value)} and {shown(key, block[leaf])}"
            self.problems.append(f"{old} must agree with {self.origins[key]}: got {got}. Remove one.")


def translate(old: Old, ignored: Mapping[str, str], defaults: Mapping[str, Any]) -> New:
    """Apply the rules to what is given, then to the defaults that are not ours; `ignored` are patterns and reasons."""
    new = New()
    for key, value in old.given.items():
        rule = old.rules.get(key)
        pattern = next((one for one in ignored if fnmatchcase(key, one)), None)
        if rule is not None:
            _apply(new, old, old.written[key], value, rule)
        elif pattern is not None:
            new.gone[pattern] = ignored[pattern]
            new.matched.setdefault(pattern, []).extend([key] if value not in (None, False, "", []) else [])
        else:
            told = (
                f"{key} must be a key of {old.framework} that is known: got {shown(key, value)}. Is there one like it?"
            )
            new.problems.append(told)
    for key, rule in old.rules.items():
        if key not in old and rule.default is not ABSENT:
            _add_default(new, old, key, rule, defaults)
    return new


def _add_default(new: New, old: Old, key: str, rule: Rule, defaults: Mapping[str, Any]) -> None:
    """Put what a key becomes that is not given, where that is not our default."""
    try:
        for ours, value, why in _made(old, rule.default, rule, is_silent=True):
            is_ours = value != MISSING and defaults.get(ours, ABSENT) == value
            if not is_ours and not has(new.tree, ours):
                new.put(ours, value, why or f"{old.framework}'s default of {key}")
    except _UNUSABLE as error:
        told = (
            f"{rule.ours.partition(',')[0]} must follow from values that {old.framework} takes: got others ({error})."
        )
        new.problems.append(f"{told} Correct what belongs to {key}.")


def _apply(new: New, old: Old, key: str, value: Any, rule: Rule) -> None:
    """Put what a given key becomes, or note why it becomes nothing."""
    if isinstance(value, str) and "${" in value:
        new.problems.append(f"{key} must be a plain value to be converted: got {value}. Write what it refers to.")
        return
    try:
        for ours, made, why in _made(old, value, rule):
            was = key if made == value and type(made) is type(value) else f"{key}: {shown(key, value)}"
            new.put(ours, made, f"{was}; {why}" if why else was, key)
    except MustDecide as reason:
        new.problems.append(f"{key} must have a counterpart here: got {shown(key, value)}, but {reason}. Choose one.")
    except WithoutCounterpart as reason:
        new.gone[f"{key}: {shown(key, value)}"] = str(reason)
    except _UNUSABLE as error:
        told = f"{key} must be a value that {old.framework} takes: got {shown(key, value)} ({error}). Correct it."
        new.problems.append(told)


def _made(old: Old, value: Any, rule: Rule, *, is_silent: bool = False) -> Iterator[tuple[str, Any, str]]:
    """Yield our keys with their values and how they were found. Raises WithoutCounterpart."""
    why = rule.why if rule.ours and not is_silent else ""
    try:
        made = value if rule.make is None else rule.make(value, old)
    except WithoutCounterpart:
        if is_silent:
            return
        raise
    if isinstance(made, Because):
        made, why = made
    if not rule.ours and rule.make is None:
        is_off = value is None or (value is False and rule.default is not True)
        if not is_silent and value != rule.default and not is_off:
            raise WithoutCounterpart(rule.why)
    elif isinstance(made, dict) and made is not value:
        for ours, one in made.items():
            found, how = one if isinstance(one, Because) else (one, why)
            yield ours, found, how
    elif made is not NOTHING:
        yield rule.ours.partition(",")[0], made, why


def shown(key: str, value: Any) -> str:
    """Return a value as a file has it, for a comment: on one line, not too long, and no secret."""
    shown = _without_secrets(key, value)
    text = " ".join((json.dumps(shown, default=str) if not isinstance(shown, str) else shown).split())
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _without_secrets(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(str(name), one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_secrets(key, one) for one in value]
    return "***" if re.search(r"(api_key|token|password|secret)$", key, re.IGNORECASE) else value


def to_fill_in(tree: Tree, prefix: str = "") -> Iterator[str]:
    """Yield the keys that someone must give."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from to_fill_in(value, f"{prefix}{name}.")
        elif value == MISSING:
            yield f"{prefix}{name}"


def at(tree: Any, key: str, *, otherwise: Any = None) -> Any:
    """Return what stands at a dotted key, or something else if nothing does."""
    for part in key.split("."):
        tree = tree.get(part, ABSENT) if isinstance(tree, dict) else ABSENT
    return otherwise if tree is ABSENT else tree


def has(tree: Tree, key: str) -> bool:
    """Tell whether a dotted key is given."""
    return at(tree, key, otherwise=ABSENT) is not ABSENT


def _flat(block: Tree, prefix: str, known: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield values by dotted key; a block that has a rule of its own is one value."""
    for name, value in block.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in known:
            yield from _flat(value, f"{key}.", known)
        else:
            yield key, value


# What tables share.


def part_of(ours: str, default: Any) -> Rule:
    """Return the rule of a key that another key's rule reads."""
    return Rule(ours, default, lambda *_: NOTHING)


def unless(off: Any, why: str) -> Rule:
    """Return the rule of a key that has no counterpart unless its value switches it off."""
    return Rule("", off, why=why)


def patterns(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons by pattern of keys, of the patterns by reason; the first pattern that matches counts."""
    return {pattern: why for why, words in reasons.items() for pattern in words.split()}


def or_missing(value: Any, _old: Old) -> Any:
    """Leave it to be filled in where nothing is given."""
    return value if value not in (None, "") else MISSING


def if_given(value: Any, _old: Old) -> Any:
    """Keep a value, unless nothing is given."""
    return NOTHING if value is None else value


def if_positive(value: Any, _old: Old) -> Any:
    """Keep a number above 0; others switch something off."""
    return value if value is not None and value > 0 else NOTHING


def if_true(value: Any, _old: Old) -> Any:
    """Keep a value that is not empty, false or 0."""
    return value or NOTHING


def one_of(*words: str, otherwise: str) -> Callable[[Any, Old], Any]:
    """Keep these words; any other must be decided, for this reason."""
    return only({word: word for word in words}, otherwise)


def only(words: Mapping[Any, Any], otherwise: str) -> Callable[[Any, Old], Any]:
    """Translate these values; any other must be decided, for this reason."""

    def make(value: Any, _old: Old) -> Any:
        key = value if not isinstance(value, list) or len(value) != 1 else value[0]
        if isinstance(key, (list, dict)) or key not in words:
            raise MustDecide(otherwise)
        return words[key]

    return make


def name_of_run(value: Any, old: Old) -> Any:
    """Make a name of a folder of it, or of the file's name."""
    text = "".join(one if one.isascii() and (one.isalnum() or one in "_.-") else "-" for one in str(value or old.stem))
    name = text.lstrip("-.") or "run"
    return name if value else Because(name, "the name of the file; it names the folder of the run")


def name_of_trial(value: Any, old: Old) -> Any:
    """Make a name of a folder of it; runs that have none are the first."""
    return name_of_run(value, old) if value else Because("trial0", "each run has a name")


def share_of_steps(steps: Any, total: Any, why: str = "") -> Because:
    """Make a share of all steps of steps of warmup; leave it to be filled in where the total is not known."""
    if not steps:
        return Because(0.0, "no warmup")
    if total is None or total <= 0:
        return Because(MISSING, f"{steps} steps, as a share of all{why}")
    return Because(min(1.0, steps / total), f"{steps} of {total} steps")


def at_least_one(value: Any) -> int:
    """Round up to a whole number of at least 1."""
    return max(1, -int(-value // 1))


def switch_on(services: Any, _old: Old) -> Tree:
    """Return the blocks of the loggers that are named."""
    names = [services] if isinstance(services, str) else list(services or [])
    modes = {"wandb": "online", "trackio": "online", "swanlab": "cloud"}
    chosen = [name for name in modes if name in names]
    loggers: Tree = {f"stats_logger.{name}.mode": modes[name] for name in chosen}
    return loggers | ({"stats_logger.tensorboard.path": "tensorboard"} if "tensorboard" in names else {})


def beside(servers: str, total: int, *, tensor: int = 1) -> Because:
    """Return an allocation in which servers and trainer share the devices out that each of them had in turn."""
    if total == 1:
        return Because("lite.d1|d1", "one device: the server runs in the trainer's process")
    size = tensor if tensor * 2 <= total else 1
    replicas = max(1, total // 2 // size)
    mode = f"{servers}.d{replicas}p1t{size}+d{total - replicas * size}p1t1"
    return Because(
        mode, f"servers and trainer have devices of their own: {total} are shared out; change it as you like"
    )


def on_devices(mode: Any, total: int, nodes: int = 1) -> Tree:
    """Return an allocation and the cluster of so many devices for it."""
    return {"allocation_mode": mode, "cluster.n_nodes": nodes, "cluster.n_gpus_per_node": -(-total // nodes)}
