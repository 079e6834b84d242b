"""An exercise's check says correct or not yet, in one line, and never raises."""

import numpy
import pytest
import torch

from ddp_helpers.lesson.check import check


def mean(values):
    return sum(values) / len(values)


def fail(text):
    raise ValueError(text)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (6, 6),
        (6.0, 6),
        (0.1 + 0.2, 0.3),
        ("rank 1", "rank 1"),
        ([6, 6], [6, 6]),
        ((6, 6), [6, 6]),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        ([torch.tensor([1.0]), torch.tensor([2.0])], [[1.0], [2.0]]),
        (numpy.float64(0.5), 0.5),
        ({0: [0, 2], 1: [1, 3]}, {0: [0, 2], 1: [1, 3]}),
        ({"a", "b"}, {"b", "a"}),
        (None, None),
        (lambda: mean([1, 2, 6]), 3.0),
    ],
)
def test_a_right_answer_is_correct(answer, expected, capsys):
    assert check("the sum", answer, expected)
    assert capsys.readouterr().out == "correct: the sum\n"


@pytest.mark.parametrize(
    ("answer", "expected", "text"),
    [
        pytest.param(..., 6, "replace ... by your answer", id="a hole"),
        pytest.param([..., ...], [6, 6], "replace ... by your answer", id="a hole on each rank"),
        pytest.param(None, 6, "there is no value yet (None)", id="nothing"),
        pytest.param(lambda: None, 6, "there is no value yet (None)", id="an empty function"),
        pytest.param(5, 6, "expected 6, got 5", id="another number"),
        pytest.param("5", 6, "expected 6, got '5'", id="another type"),
        pytest.param(1, True, "expected True, got 1", id="a number for a truth value"),
        pytest.param([6], [6, 6], "expected [6, 6], got [6]", id="too few"),
        pytest.param(torch.tensor([1]), [2], "expected [2], got [1]", id="a tensor"),
        pytest.param({"a": 1}, {"b": 1}, "expected {'b': 1}, got {'a': 1}", id="another key"),
        pytest.param(
            lambda: mean([]), 0.0, "ZeroDivisionError: division by zero", id="an exception"
        ),
        pytest.param(lambda: fail("one\ntwo"), 0, "ValueError: one\n", id="an error of two lines"),
        pytest.param(
            lambda: torch.ones(2) @ torch.ones(3), 0.0, "RuntimeError: ", id="torch's exception"
        ),
    ],
)
def test_a_wrong_answer_is_not_yet_right_and_says_why_in_one_line(answer, expected, text, capsys):
    assert not check("the sum", answer, expected)
    printed = capsys.readouterr().out
    assert printed.startswith(f"not yet: the sum: {text}")
    assert printed.count("\n") == 1


def test_a_tolerance_can_be_given(capsys):
    assert check("about", 1.01, 1.0, tolerance=0.1)
    assert not check("about", 1.01, 1.0)


def test_a_notebook_shows_the_line_and_no_true_or_false_below_it():
    from IPython.core.formatters import DisplayFormatter

    assert DisplayFormatter().format(check("the sum", 6, 6)) == ({}, {})
