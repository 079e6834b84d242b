"""Cells on the ranks that a module's own fixture `ranks` has started."""

import textwrap

import pytest

from ddp_helpers.lesson.cell import RanksFailed


@pytest.fixture
def engines(ranks):
    """The module's ranks, fresh again if the test before has left them stuck or dead."""
    try:
        ranks.push(i_am_free=True)
    except RanksFailed:
        ranks.restart()
    return ranks


@pytest.fixture
def run(engines, capsys):
    """Run a cell; return its text. Or, of a cell that fails, the report after the text."""

    def run(source: str, **options) -> str:
        capsys.readouterr()
        report = ""
        try:
            engines.run(textwrap.dedent(source), **options)
        except RanksFailed as failure:
            report = str(failure)
        return capsys.readouterr().out + report

    return run
