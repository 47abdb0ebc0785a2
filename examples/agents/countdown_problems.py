"""Problems of countdown, their rules and reward, in a separate file because reward processes import only this."""

import ast
import operator
import random
import re
from fractions import Fraction
from typing import Any

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
TASK = (
    "Make {target} from the numbers {numbers}, each used once, with + - * / and parentheses. "
    "End with the expression in <answer> tags, such as <answer>(1 + 2) * 3</answer>."
)


def rows(split: str, *, seed: int, train: int | str = 5000, test: int | str = 200) -> list[dict[str, Any]]:
    """Generate solvable problems with three or four numbers."""
    draw = random.Random(f"{split} {seed}")
    found: list[dict[str, Any]] = []
    while len(found) < int(train if split == "train" else test):
        numbers = [draw.randint(1, 20) for _ in range(draw.choice((3, 4)))]
        value = Fraction(numbers[0])
        for number in numbers[1:]:
            value = draw.choice(list(OPERATORS.values()))(value, Fraction(number))
        if value.denominator == 1 and 0 < value <= 100:
            task = TASK.format(target=value, numbers=", ".join(map(str, numbers)))
            found.append({"messages": [{"role": "user", "content": task}], "numbers": numbers, "target": int(value)})
    return found


def evaluate(expression: str, numbers: list[int]) -> Fraction:
    """Return the value of an expression; ValueError unless it uses each number once."""
    used: list[int] = []

    def value_of(node: ast.AST) -> Fraction:
        match node:
            case ast.Expression(body=body):
                return value_of(body)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return Fraction(OPERATORS[type(op)](value_of(left), value_of(right)))
            case ast.Constant(value=int(number)):
                used.append(number)
                return Fraction(number)
        raise ValueError(f"only + - * / and the numbers may be used: got {ast.unparse(node)}")

    try:
        value = value_of(ast.parse(expression.strip(), mode="eval"))
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"it has no value: {error}") from error
    if sorted(used) != sorted(numbers):
        raise ValueError(f"each number must be used once: got {sorted(used)} instead of {sorted(numbers)}")
    return value


def score(completions: str, numbers: list[int], target: int, **columns: object) -> float:
    """Return 1 for an expression that reaches the target, 0.1 for another valid one, else 0."""
    answers = re.findall(r"<answer>([^<]{1,200})</answer>", completions)
    try:
        return 1.0 if answers and evaluate(answers[-1], numbers) == target else 0.1 if answers else 0.0
    except ValueError:
        return 0.0


def feedback(data: dict[str, Any], reward: float) -> str:
    kind = "is valid but does not reach the target" if reward > 0 else "is missing, or breaks the rules"
    return f"The expression {kind}. Make {data['target']} from {data['numbers']} and try again."
