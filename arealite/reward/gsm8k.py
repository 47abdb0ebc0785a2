r"""GSM8K: 1.0 when the final answer is the right number, else 0.0.

The final answer is the content of the last `\boxed{}` or `\fbox{}`, else the line after the last `####` or "the answer
is", unless it is a Markdown heading (`#### Step 1`, `#### 1. Add`, `#### Total`). In it, the value after the last `=`
counts, else the first number. An unfinished expression (`6*3`, `10^2`), a malformed number (`1.2.3`), a time (`12:30`),
several numbers (`18 or 19`), a comparison before it (`not 18`, `< 18`, `Step 2`) are no answers. Numbers are compared
exactly, as fractions; any text is accepted, in linear time.
"""

import re
import unicodedata
from fractions import Fraction
from typing import Any

MAX_DIGITS = 100  # longer numbers and larger exponents are no answers: exact arithmetic on them would not be quick

_DIGIT = re.compile(r"\d")
_INT = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INT}(?:\.\d+)?|\.\d+)"
_VALUE = re.compile(
    r"(?P<sign>(?<![\w.)])[-+]|^[-+]\s+)?"
    r"(?<![^\W\d])"
    rf"(?:(?P<whole>\d+)\s+(?P<part>\d+)\s*/\s*(?P<parts>\d+)|(?P<number>{_DECIMAL})"
    rf"(?:\s*/\s*(?P<divisor>{_DECIMAL})|[eE](?P<exponent>[-+]?\d+))?)"
    r"(?P<percent>\s*(?:%|percent\b))?"
)
_UNFINISHED = re.compile(
    r"[.,:]?\d|[²³]|\s*[-+*/^×÷·xX]+\s*[(.]?\d"
    r"|(?:\s*[,;])?\s*(?:\b(?:or|and|to)\b)?\s*\d[\d.]*(?![\d.]|-[A-Za-z])"
)
_COMPARISON = re.compile(
    r"(?:<|!=|(?<![-=])>|[≤≥≠]|\\(?:[lg](?:eq?|t)|neq?)\b)\W*$"
    r"|\b(?:not|than|between|at\s+(?:least|most)|step)\W+(?:\w+\W+){0,2}$",
    re.IGNORECASE,
)
_COMPARED = 60  # characters before a number in which a comparison with it may stand
_STATED = re.compile(  # what introduces an answer, and the beginning of the line that follows
    r"(?:####+|\banswer\b(?:[^\n.:=#]{0,60}?(?:\bis\b|[:=])|[*_ ]*\n))"
    r"(?=(?:[\s:*_]*\n)?[ \t:]*(?:(?:\\\[|\$\$)\s*)?(.{0,1000}))",
    re.IGNORECASE,
)
_HEADING = re.compile(r"[\s*_]*(?:step\s*\d+\b|\d+\s*[.):]\**\s+\**[A-Za-z]|[^\d¼-¾⅐-⅞]+$)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_CURRENCY = "[$€£¥₹₩]"
_CLEANING = [  # rewrites LaTeX, Markdown, currency and typographic signs as plain ASCII arithmetic
    (re.compile("[−–﹣－]"), "-"),
    (re.compile("[⁄∕]"), "/"),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r" \1/\2"),
    (re.compile(r"\\(?:boxed|fbox|text|mathrm|mathbf|textbf|textit|mbox|operatorname)\b"), " "),
    (re.compile(r"\\(?:times|cdot|div)\b"), "*"),
    (re.compile(r"\\(?:left|right)\b|\\[!,;:()\[\]]|\{,\}(?=\d)"), ""),
    (re.compile(r"\\([%$#& ])"), r"\1"),
    (re.compile("[{}`_~]"), " "),
    (re.compile(r"(?<!\d)(\*{1,3})(?=\S)([^*]+)(?<=\S)\1(?!\d)"), r"\2"),
    (re.compile(rf"(?<!\d)(?:\b(?:US|CA|AU|HK|NZ|[ACS])?{_CURRENCY}|\b(?:USD|EUR|GBP|Rs\.?)(?=[\s\d]))\s*"), ""),
    (re.compile(_CURRENCY), " "),
]
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")


def gsm8k_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **kwargs: Any
) -> float:
    """Return 1.0 if the final answer of `completions` (one text) equals `answer` (`... #### N` or the bare number)."""
    given, expected = final_answer(str(completions)), final_answer(str(answer))
    values, truths = parse_values(given or ""), parse_values(str(answer) if expected is None else expected)
    return float(bool(values and truths) and (values <= truths or truths <= values))


def final_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, else the line after the last `####` or "answer is", else None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    return next((line for line in reversed(_STATED.findall(text)) if not _HEADING.match(line)), None)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` or `\fbox{}`; None if there is none, or it is cut off."""
    start = max((match.end() for match in _BOX.finditer(text)), default=len(text))
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start:position]
    return None


def parse_values(text: str) -> set[Fraction]:
    """Read the number that a final answer states, of a percentage also its hundredth (50% is 50 or 0.5); empty if it
    states none."""
    text = _VULGAR_FRACTION.sub(lambda match: " " + unicodedata.normalize("NFKC", match[0]), text)
    for pattern, replacement in _CLEANING:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())  # on long gaps the patterns below take quadratic time
    left, equals, right = text.rpartition("=")
    if not _DIGIT.search(right):
        left, equals, right = "", "", text
    text = right.strip(" \t*'\"")
    match, first_digit = _VALUE.search(text), _DIGIT.search(text)
    if match is None or first_digit is None or match.start() > first_digit.start():
        return set()
    before = f"{left[-1:]}{equals}{text[: match.start()]}"[-_COMPARED:]
    return set() if _UNFINISHED.match(text, match.end()) or _COMPARISON.search(before) else _values_of(match)


def _values_of(match: re.Match[str]) -> set[Fraction]:
    """Build the number of a `_VALUE` match; empty for a division by zero and for absurd sizes."""
    texts = {name: re.sub(r"[,\s]", "", text or "") for name, text in match.groupdict().items()}
    exponent = texts["exponent"] or "0"
    if max(map(len, texts.values())) > MAX_DIGITS or abs(int(exponent)) > MAX_DIGITS:
        return set()
    try:
        if texts["whole"]:
            number = int(texts["whole"]) + Fraction(int(texts["part"]), int(texts["parts"]))
        else:
            number = Fraction(f"{texts['number']}e{exponent}") / Fraction(texts["divisor"] or 1)
    except ZeroDivisionError:
        return set()
    number = -number if texts["sign"] == "-" else number
    return {number, number / 100} if texts["percent"] else {number}
