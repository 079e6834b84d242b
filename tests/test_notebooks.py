"""Lessons are stored as they ran, and each exercise has a hole, a check and a solution.

pytest --nbval runs the lessons and compares every output. It cannot notice what is missing from
the stored file: a notebook without outputs passes. That is seen to here.
"""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

HERE = Path(__file__).parent
LESSONS = sorted((HERE.parent / "notebooks").glob("*.ipynb"))
IGNORES = {"nbval-ignore-output", "nbval-skip"}
SAYS_SOMETHING = re.compile(r"(?<![\w.])(print|check|show_source|show_diff|table|say)\(")


def complaints(notebook) -> list[str]:
    """Return what is wrong with a stored lesson, a line for each fault."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = []
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("not run from top to bottom: execution counts are not 1, 2, 3, ...")
    ignored = [cell for cell in cells if tags(cell) & IGNORES or "NBVAL_" in cell.source]
    if 6 * len(ignored) >= len(cells):
        found.append(f"{len(ignored)} of {len(cells)} cells are not compared: one in six or more")
    for cell in cells:
        line = cell.source.strip().splitlines()[:2]
        if SAYS_SOMETHING.search(cell.source) and not defines_only(cell) and not cell.outputs:
            found.append(f"no stored output: {line}")
        raised = any(output.output_type == "error" for output in cell.outputs)
        if ("raises-exception" in tags(cell)) != raised:
            found.append(f"{'raised' if raised else 'did not raise'}: {line}")
        if cell.metadata.keys() & {"execution", "ExecuteTime", "collapsed"}:
            found.append(f"metadata of a run: {line}")
    return found + exercise_complaints(cells)


def exercise_complaints(cells) -> list[str]:
    """Return what is wrong with the exercises: see ddp_helpers/lesson/check.py for their form."""
    kinds = "".join(kind(cell) for cell in cells)
    if not re.fullmatch(r"(-|e+c+s+)*", kinds):
        return [f"cells tagged exercise, check, solution must follow in this order: {kinds}"]
    found = []
    for group in re.finditer(r"e+c+s+", kinds):
        members = cells[group.start() : group.end()]
        checks = [text(cell) for cell in members if kind(cell) == "c"]
        solutions = [cell for cell in members if kind(cell) == "s"]
        holes = re.findall(r"^not yet: (.*?): ", "\n".join(checks), re.M)
        solved = re.findall(r"^correct: (.*)$", "\n".join(map(text, solutions)), re.M)
        if not holes or holes != solved:
            found.append(f"holes {holes}, but solutions {solved}")
        for cell in solutions:
            hidden = {"source_hidden": True, "outputs_hidden": True}
            if cell.metadata.get("jupyter") != hidden:
                found.append(f"a solution in plain sight: {cell.source.splitlines()[0]}")
    return found


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def kind(cell) -> str:
    for tag in ("exercise", "check", "solution"):
        if tag in tags(cell):
            return tag[0]
    return "-"


def defines_only(cell) -> bool:
    """True when every line that prints is inside a function or class of the cell."""
    return not any(
        SAYS_SOMETHING.search(line) for line in cell.source.splitlines() if line[:1].strip()
    ) and bool(re.search(r"^(async )?(def|class) ", cell.source, re.M))


def text(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_stored_as_it_ran(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert complaints(notebook) == []


# --- the complaints themselves ---


def a_lesson() -> nbformat.NotebookNode:
    """A small lesson without faults: a print, an error, an exercise, and some quiet cells."""
    hidden = {"source_hidden": True, "outputs_hidden": True}
    cells = [
        cell("print(1)", "1\n"),
        cell("def f():\n    print(1)"),
        cell("1 / 0", error=True, tags=["raises-exception"]),
        cell("answer = ...", tags=["exercise"]),
        cell("check('sum', answer, 6)", "not yet: sum: replace ... by\n", tags=["check"]),
        cell("%%px\nanswer = 6", tags=["solution"], jupyter=hidden),
        cell("check('sum', answer, 6)", "correct: sum\n", tags=["solution"], jupyter=hidden),
    ]
    for number, one in enumerate(cells, start=1):
        one.execution_count = number
    return new_notebook(cells=cells)


def cell(source: str, printed: str = "", error: bool = False, **metadata):
    outputs = [new_output("stream", text=printed)] if printed else []
    if error:
        outputs.append(new_output("error", ename="E", evalue="", traceback=[]))
    return new_code_cell(source, outputs=outputs, metadata=metadata)


def strip(notebook):
    for one in notebook.cells:
        one.outputs, one.execution_count = [], None


def strip_outputs(notebook):
    notebook.cells[0].outputs = []


def run_one_cell_again(notebook):
    notebook.cells[0].execution_count = 8


def ignore_two(notebook):
    for one in notebook.cells[:2]:
        one.metadata["tags"] = ["nbval-ignore-output"]


def ignore_two_by_comment(notebook):
    for one in notebook.cells[:2]:
        one.source += "\n# NBVAL_IGNORE_OUTPUT"


def raise_nothing(notebook):
    notebook.cells[2].outputs = []


def raise_untagged(notebook):
    notebook.cells[2].metadata["tags"] = []


def keep_times(notebook):
    notebook.cells[0].metadata["execution"] = {}


def lose_the_solution(notebook):
    del notebook.cells[5:]


def fill_the_hole(notebook):
    notebook.cells[4].outputs[0].text = "correct: sum\n"


def solve_wrongly(notebook):
    notebook.cells[6].outputs[0].text = "not yet: sum: expected 6, got 5\n"


def show_the_solution(notebook):
    del notebook.cells[6].metadata["jupyter"]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (strip, "not run from top to bottom"),
        (strip_outputs, "no stored output: ['print(1)']"),
        (run_one_cell_again, "not run from top to bottom"),
        (ignore_two, "2 of 7 cells are not compared"),
        (ignore_two_by_comment, "2 of 7 cells are not compared"),
        (raise_nothing, "did not raise: ['1 / 0']"),
        (raise_untagged, "raised: ['1 / 0']"),
        (keep_times, "metadata of a run: ['print(1)']"),
        (lose_the_solution, "must follow in this order: ---ec"),
        (fill_the_hole, "holes [], but solutions ['sum']"),
        (solve_wrongly, "holes ['sum'], but solutions []"),
        (show_the_solution, "a solution in plain sight: check('sum', answer, 6)"),
    ],
)
def test_a_fault_in_a_stored_lesson_is_noticed(spoil, complaint):
    lesson = a_lesson()
    assert complaints(lesson) == []
    spoil(lesson)
    assert any(complaint in line for line in complaints(lesson)), complaints(lesson)


# --- what strict nbval reads in place of what differs ---


@pytest.mark.parametrize(
    ("printed", "compared"),
    [
        ("loss 0.5\n", "loss 0.5\n"),
        ("[rank 1] [W1130 18:25:55.123 socket.cpp:204] text\nloss\n", "loss\n"),
        ("[rank0]:[W1130 18:25:55.1 x.cpp:20] text\nloss\n", "loss\n"),
        ("<object at 0x7f927d103420>", "<object at 0x...>"),
        ("pid 123 (python)", "pid N (python)"),
        ("no answer from 127.0.0.1:29500", "no answer from 127.0.0.1:PORT"),
        ("by peer [127.0.0.1]:41393", "by peer [127.0.0.1]:PORT"),
        ("MASTER_PORT=27249", "MASTER_PORT=PORT"),
        ("'master_port': 27249,", "'master_port': PORT,"),
        ("listen. port: 27249, useIpv6: false", "listen. port: PORT, useIpv6: false"),
        ("rank, such as 27249.", "rank, such as PORT."),
        ("rank 0 has waited 1 s in barrier():", "rank 0 has waited N s in barrier():"),
        ("/home/a/.venv/lib/python3.11/site-packages/torch/x.py:3", "site-packages/torch/x.py:3"),
        ("wrote /tmp/tmpab12/rank_0.json", "wrote /tmp/..."),
        ("node2 is at 10.77.12.2", "node2 is at 10.77.K.2"),
        ("node1  torch        ok    2.14.1", "node1  torch        ok    VERSION"),
        ("runs python with torch 2.14.1+cu130", "runs python with torch VERSION"),
        ("epoch 1: 1,234.5 images/s", "epoch 1: N images/s"),
    ],
)
def test_what_differs_between_two_runs_is_replaced_before_comparing(printed, compared):
    from nbval.plugin import get_sanitize_patterns

    for pattern, replacement in get_sanitize_patterns((HERE / "nbval_sanitize.cfg").read_text()):
        printed = re.sub(pattern, replacement, printed)
    assert printed == compared
