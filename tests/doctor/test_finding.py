"""What the doctor says, as text and as a table."""

from ddp_helpers.doctor.finding import Finding, is_healthy, write, write_table


def test_a_finding_is_a_line_with_its_fix_under_it():
    findings = [Finding("ok", "a", "fine"), Finding("fault", "b", "broken\nbadly", "mend\nit")]
    assert write(findings) == (
        "ok       a: fine\nFAULT    b: broken\n         badly\n         fix: mend\n              it"
    )


def test_warnings_stop_no_job():
    assert is_healthy([Finding("ok", "a", ""), Finding("warning", "b", "")])
    assert not is_healthy([Finding("ok", "a", ""), Finding("fault", "b", "")])


def test_a_value_that_should_be_alike_and_is_not_is_marked():
    rows = [("0", "a", "2.14"), ("1", "b", "2.6"), ("2", "c", "2.14")]
    assert write_table(["rank", "host", "torch"], rows).splitlines() == [
        "rank  host  torch",
        "0     a     2.14",
        "1     b     2.6*",
        "2     c     2.14",
    ]
