"""Checks for exercises: one line that says correct, or what is not right yet. Never a traceback.

An exercise is four kinds of cells, one after the other, told apart by their tags:

1. Markdown that asks.
2. A cell tagged "exercise" with a hole, an ellipsis for the learner to replace; %%px is allowed:

       total = ...

3. A cell tagged "check":

       check("the sum over 4 ranks", total, 6)

   As committed the hole is empty and the stored output is

       not yet: the sum over 4 ranks: replace ... by your answer

4. One or more cells tagged "solution", with the metadata
   {"jupyter": {"source_hidden": true, "outputs_hidden": true}}: the learner sees a bar to click on.
   They fill the hole, and the last one ends in the same check:

       total = 0 + 1 + 2 + 3
       check("the sum over 4 ranks", total, 6)       # correct: the sum over 4 ranks

So a lesson runs from top to bottom untouched, and strict nbval compares both lines.
tests/test_notebooks.py sees to the tags, and that each check has both.

An answer that a function computes, or that comes from the ranks, is given as a lambda, so that its
errors become a line as well:

    check("mean([1, 2, 6])", lambda: mean([1, 2, 6]), 3.0)
    check("every rank's total", lambda: engines.pull("total"), [6, 6, 6, 6])
"""

from __future__ import annotations

import math
from typing import Any


def check(name: str, answer: Any, expected: Any, tolerance: float = 1e-6) -> bool:
    """Print whether answer equals expected, and return it as 1 or 0; name says what is asked for.

    A callable answer is called first, without arguments. Numbers, also in lists, tuples, dicts,
    arrays and tensors, may differ by tolerance, relative to the expected one or absolute.
    """
    wrong = _what_is_wrong(answer, expected, tolerance)
    print(f"not yet: {name}: {wrong}" if wrong else f"correct: {name}")
    return _Shown(not wrong)


class _Shown(int):
    """A truth value that a notebook does not show again at the end of a cell."""

    def _ipython_display_(self) -> None:
        pass


def _what_is_wrong(answer: Any, expected: Any, tolerance: float) -> str:
    """Return "" for a right answer."""
    try:
        answer, expected = _plain(answer() if callable(answer) else answer), _plain(expected)
        right = _equal(answer, expected, tolerance)
    except Exception as error:  # of the learner's function, or of a value that cannot be compared
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if right:
        return ""
    if _has_hole(answer):
        return "replace ... by your answer"
    if answer is None:
        return "there is no value yet (None)"
    return f"expected {_short(expected)}, got {_short(answer)}"


def _plain(value: Any) -> Any:
    """Return tensors and arrays as numbers and lists, also inside lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _has_hole(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_has_hole, value.values() if isinstance(value, dict) else value))
    return value is ...


def _equal(answer: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(answer, list)
            and len(answer) == len(expected)
            and all(_equal(a, e, tolerance) for a, e in zip(answer, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(answer, dict)
            and answer.keys() == expected.keys()
            and all(_equal(answer[key], expected[key], tolerance) for key in expected)
        )
    # True == 1 in Python, but as an answer they differ.
    if isinstance(answer, bool) != isinstance(expected, bool):
        return False
    if isinstance(expected, (int, float)) and isinstance(answer, (int, float)):
        return math.isclose(answer, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(answer == expected)


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + " ..."
