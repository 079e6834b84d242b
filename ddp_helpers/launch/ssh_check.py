"""Can a job be started on these hosts? All of them asked at once, one verdict per host and check.

    for check in check_hosts(["node-a", "node-b"]):
        print(check.host, check.name, check.ok, check.seen, check.fix)

Lesson: notebooks/06_two_nodes.ipynb
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .ssh import check_installed, typed
from .ssh_ask import DEADLINE_S, Answer, ask, versions
from .ssh_text import reason

CHECKS = ("reachable", "host key", "login", "python", "torch", "ddp_helpers", "clock")
MAX_SKEW_S = 2.0


@dataclass(frozen=True)
class Check:
    """The verdict of one check on one host."""

    host: str
    name: str  # one of CHECKS
    ok: bool | None  # None: not asked, because of one that failed
    seen: str = ""
    fix: str = ""  # what to type; empty unless the check failed


def check_hosts(
    hosts: Sequence[str], config: str | None = None, python: str = sys.executable
) -> list[Check]:
    """Return the verdict of each of CHECKS on every host, in order; it takes under 10 s in all.

    config is ssh's configuration file (None: the user's). python is the interpreter's path on
    every host. Versions are compared with those here; where one is not installed here, with
    the first host that has it. Raises LauncherNotFound when there is no ssh.
    """
    check_installed()
    with ThreadPoolExecutor(max_workers=len(hosts)) as threads:  # all at once, however many
        answers = list(threads.map(lambda host: ask(host, config, python), hosts))
        expected = _expected(versions(), answers)
        judged = threads.map(lambda answer: _judge(answer, expected, config, python), answers)
        return [check for checks in judged for check in checks]


def _expected(here: Mapping[str, str], answers: Sequence[Answer]) -> dict[str, str]:
    """Return the version that each package should have; "" when it is installed nowhere."""
    there = {
        name: next(filter(None, (answer.values.get(name) for answer in answers)), "")
        for name in here
    }
    return {name: here[name] or there[name] for name in here}


def _judge(answer: Answer, expected: Mapping[str, str], config: str | None, python: str):
    """Return the verdicts on one host, in the order of CHECKS."""
    found = _way_in(answer, config)
    if found[-1].ok:
        found.append(_clock(answer, config))
        found.append(_python(answer, config, python))
        if found[-1].ok:
            found += [_version(answer, name, expected[name], config, python) for name in expected]
    by_name = {check.name: check for check in found}
    return [by_name.get(name, Check(answer.host, name, None)) for name in CHECKS]


def _way_in(answer: Answer, config: str | None) -> list[Check]:
    """Return the verdicts on what ssh does before a command runs, up to one that failed."""
    if user := answer.values.get("user"):
        note = "" if user == getpass.getuser() else f", here you are {getpass.getuser()}"
        passed = [Check(answer.host, name, True) for name in CHECKS[:2]]
        return [*passed, Check(answer.host, "login", True, f"as {user}{note}")]
    if not answer.in_time:
        seen, fix = f"no answer in {DEADLINE_S:g} s", typed("ssh -v", answer.host, config, "true")
        return [Check(answer.host, "login", False, seen, fix)]
    why = reason(answer.text, answer.host, config)
    before = CHECKS[: CHECKS.index(why.check)] if why.known else ()
    passed = [Check(answer.host, name, True) for name in before]
    return [*passed, Check(answer.host, why.check, False, why.seen, why.fix)]


def _python(answer: Answer, config: str | None, python: str) -> Check:
    state = answer.values.get("python")
    if state == "runs":
        return Check(answer.host, "python", True, python)
    if state == "missing":
        seen = f"no {python}, expected the same path as here"
        if sys.prefix != sys.base_prefix:
            words = ("python3", "-m", "venv", sys.prefix)
        else:
            words = ("ls", "-l", str(Path(python).parent))
        fix = typed("ssh", answer.host, config, *words)
    else:
        last = answer.text.rpartition("\n")[2]
        seen = f"{python} does not run: {last or 'it said nothing'}"
        if not answer.in_time:
            seen = f"{python} gave no answer in {DEADLINE_S:g} s"
        fix = typed("ssh", answer.host, config, python, "--version")
    return Check(answer.host, "python", False, seen, fix)


def _version(answer: Answer, name: str, expected: str, config: str | None, python: str) -> Check:
    version = answer.values.get(name, "")
    if version == expected:
        return Check(answer.host, name, True, version or "not installed, nor here")
    seen = f"{version or 'not installed'}, expected {expected}"
    install = (python, "-m", "pip", "install", *_source(name, expected))
    return Check(answer.host, name, False, seen, typed("ssh", answer.host, config, *install))


def _source(name: str, version: str) -> list[str]:
    """Return what pip needs to install this very version of a package."""
    project = Path(__file__).parents[2]
    if name == "ddp_helpers" and (project / "pyproject.toml").exists():
        return ["-e", str(project)]
    _, _, build = version.partition("+")
    words = [f"{name.replace('_', '-')}=={version}"]
    if name == "torch" and build:  # such as 2.8.0+cpu: builds that only PyTorch's own index has
        words += ["--index-url", f"https://download.pytorch.org/whl/{build}"]
    return words


def _clock(answer: Answer, config: str | None) -> Check:
    if answer.skew_s is None:
        seen = "not read: `date +%s` over there gives no number" if answer.in_time else ""
        return Check(answer.host, "clock", None, seen)
    skew, error = abs(answer.skew_s), answer.skew_error_s
    order = "ahead of" if answer.skew_s > 0 else "behind"
    seen = f"{skew:.1f} s {order} this machine's"
    if skew - error <= MAX_SKEW_S:
        return Check(answer.host, "clock", True, seen if skew > error else "the same as here")
    fix = typed("ssh -t", answer.host, config, "sudo", "timedatectl", "set-ntp", "true")
    return Check(answer.host, "clock", False, f"{seen}, expected at most {MAX_SKEW_S:g} s", fix)
