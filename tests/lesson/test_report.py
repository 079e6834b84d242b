"""What a learner reads when a cell did not end well."""

import linecache
import sys

import pytest

from ddp_helpers.lesson.report import GO_ON, Outcome, name_ranks, shorten, trail, write_report

CELL = "<px 7>"


@pytest.fixture(autouse=True)
def cell_sources():
    cells = {
        CELL: ["%%px\n", "x = 1\n", "raise ValueError('boom')\n", "dist.barrier()\n"],
        "<px 3>": ["\n", "def f():\n", "    return 1 / 0\n"],
    }
    for name, lines in cells.items():
        linecache.cache[name] = (1, None, lines, name)
    yield
    for name in cells:
        del linecache.cache[name]


def at(line: int) -> tuple:
    return ((CELL, line, "<module>"),)


RAISED = Outcome(0, "raised", "ValueError: boom", at(3))
LOST = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("outcomes", "headline", "expected"),
    [
        pytest.param(
            [RAISED, Outcome(1, "finished"), Outcome(2, "finished")],
            "",
            "rank 0 raised ValueError: boom\n"
            "    line 3 of the cell: raise ValueError('boom')\n"
            "ranks 1, 2 finished",
            id="one raised",
        ),
        pytest.param(
            [Outcome(1, "busy", frames=at(4)), Outcome(2, "busy", frames=at(4)), RAISED],
            "",
            "rank 0 raised ValueError: boom\n"
            "    line 3 of the cell: raise ValueError('boom')\n"
            "ranks 1, 2 are still waiting at\n"
            "    line 4 of the cell: dist.barrier()\n"
            f"{GO_ON}",
            id="the others wait",
        ),
        pytest.param(
            [
                Outcome(0, "raised", LOST, at(4)),
                Outcome(1, "raised", "ValueError: boom", at(3)),
                Outcome(2, "raised", LOST, at(4)),
            ],
            "",
            "rank 1 raised ValueError: boom\n"
            "    line 3 of the cell: raise ValueError('boom')\n"
            "ranks 0, 2 then raised RuntimeError: Connection closed by peer\n"
            "    line 4 of the cell: dist.barrier()",
            id="the cause before its consequences",
        ),
        pytest.param(
            [Outcome(0, "raised", "RuntimeError: Timed out", at(4)), Outcome(1, "finished")],
            "",
            "rank 0 raised RuntimeError: Timed out\n"
            "    line 4 of the cell: dist.barrier()\n"
            "rank 1 finished",
            id="a consequence without a cause",
        ),
        pytest.param(
            [
                Outcome(0, "raised", LOST, at(4)),
                Outcome(1, "raised", "RuntimeError: Timed out waiting 3000ms", at(4)),
            ],
            "",
            "ranks 0, 1 raised RuntimeError: Timed out waiting 3000ms\n"
            "    line 4 of the cell: dist.barrier()",
            id="a deadlock that ends by torch's own timeout",
        ),
        pytest.param(
            [Outcome(0, "finished"), Outcome(1, "raised", "RendezvousError: rank 0 missing")],
            "",
            f"rank 1 raised RendezvousError: rank 0 missing\nrank 0 finished\n{GO_ON}",
            id="ranks that did not meet",
        ),
        pytest.param(
            [Outcome(0, "finished"), Outcome(1, "stopped", frames=at(2)), Outcome(2, "busy")],
            "the cell did not end within 4 s",
            "the cell did not end within 4 s\n"
            "rank 2 is still waiting\n"
            "rank 1 was stopped at\n"
            "    line 2 of the cell: x = 1\n"
            "rank 0 finished\n"
            f"{GO_ON}",
            id="a deadline",
        ),
    ],
)
def test_a_report_names_who_what_where_and_how_to_go_on(outcomes, headline, expected):
    assert write_report(outcomes, CELL, headline) == expected


def test_the_report_does_not_depend_on_which_rank_came_first():
    outcomes = [Outcome(r, "raised", f"ValueError: {r}", at(3)) for r in range(3)]
    assert write_report(outcomes, CELL) == write_report(outcomes[::-1], CELL)


def test_a_place_is_shown_for_cells_own_files_and_this_package_only(tmp_path):
    own = tmp_path / "mine.py"
    own.write_text("\n\nstep()\n")
    package = sys.modules["ddp_helpers.lesson.report"].__file__
    frames = [
        (CELL, 2, "<module>"),
        ("<px 3>", 3, "f"),
        (str(own), 3, "train"),
        (pytest.__file__, 1, "main"),  # an installed library
        (linecache.__file__, 1, "getline"),  # the standard library
        ("<frozen importlib._bootstrap>", 1, "_find_and_load"),
        (package.replace("lesson", "worker").replace("report", "network"), 1, "free_port"),
        (package, 1, "course machinery"),
    ]
    assert trail(frames, CELL) == [
        "line 2 of the cell: x = 1",
        "line 3 of an earlier cell, in f: return 1 / 0",
        "mine.py line 3, in train: step()",
        'ddp_helpers/worker/network.py, in free_port: """Names, addresses, interfaces, ports; and'
        " answers that may never come: standard library only.",
    ]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("boom", "boom"),
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"
            " [127.0.0.1]:41393. This is typically caused by a remote worker crashing.",
            "Connection closed by peer",
        ),
        ("Read error [127.0.0.1]:1: Connection reset by peer.", "Connection closed by peer"),
        (
            "[/gloo/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete",
            "Timed out waiting 5000ms for recv operation to complete",
        ),
        ("bad\nException raised from f at g.cpp:1\nframe #0: c10::Error", "bad"),
        ("two\n\nlines", "two\n    lines"),
    ],
)
def test_an_error_is_shortened_to_what_is_the_same_in_every_run(message, expected):
    assert shorten(message) == expected


def test_ranks_are_named_in_words():
    assert name_ranks([1]) == "rank 1"
    assert name_ranks([1, 3]) == "ranks 1, 3"
