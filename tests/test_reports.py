"""docs/reports.md and the tests that bear a report's id belong together."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "reports.md").read_text()


def test_each_report_of_the_table_has_a_test_and_each_such_test_is_in_the_table():
    listed = set(re.findall(r"^\| \[(B\d\d)\]", TABLE, re.M))
    tests = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert set(re.findall(r"^def test_(B\d\d)_", tests, re.M)) == listed
    assert len(listed) == 29


def test_a_test_links_the_report_that_the_table_links():
    links = dict(re.findall(r"^\| \[(B\d\d)\]\((\S+?)\)", TABLE, re.M))
    for path in TESTS.rglob("test_*.py"):
        found = re.findall(r'^def test_(B\d\d)_\w+\([^"]*?"""([^"]+)', path.read_text(), re.M)
        for report, docstring in found:
            assert links[report] in docstring, f"{path.name}: {report}"
