"""The frame: dependencies listed once, arrows between the rooms, quick start-up."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddp_helpers"
MODULES = sorted(path.relative_to(ROOT) for path in PACKAGE.rglob("*.py"))
WITHOUT_TORCH = [
    path
    for path in MODULES
    if path.parts[1] == "launch"
    or path.name in ("__init__.py", "__main__.py", "results.py", "environment.py", "network.py")
]


def imports(path: Path) -> set[str]:
    """Return the full names of the modules that the file at path imports, wherever it does."""
    package = path.with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1]]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            names.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
    return names


def requirements() -> set[str]:
    # tomllib is in Python 3.11 and later only; the lists are plain strings.
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|course|test) = \[(.*?)\]", text, re.S | re.M)
    assert len(lists) == 3
    return set(re.findall(r'"([^"]+)"', "".join(lists)))


def test_environment_yml_lists_what_pyproject_lists():
    text = (ROOT / "environment.yml").read_text()
    listed = re.findall(r"^ +- ([a-z0-9_-]+>=[0-9.]+)$", text, re.M)
    assert len(listed) == len(set(listed))
    assert set(listed) - {"python>=3.10"} == requirements()
    assert 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_the_rooms_import_in_one_direction(path):
    room = path.parts[1]
    forbidden = {
        "worker": ("launch", "lesson", "scripts", "doctor", "bench"),
        "launch": ("worker", "lesson", "scripts", "doctor", "bench"),
        "lesson": ("scripts", "doctor", "bench"),
        "scripts": ("lesson", "launch", "doctor", "bench"),
        "doctor": ("scripts", "bench"),
        "bench": ("lesson",),  # it measures the script itself, and asks the doctor for plain TCP
    }.get(room, ("lesson", "scripts", "doctor", "bench"))
    reached = {name.split(".")[1] for name in imports(path) if name.startswith("ddp_helpers.")}
    assert not reached & set(forbidden)


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parts[1] == "worker"], ids=lambda path: path.name
)
def test_a_worker_file_takes_at_most_two_siblings_along_and_says_which(path):
    siblings = {
        name.split(".")[2] for name in imports(path) if name.startswith("ddp_helpers.worker.")
    }
    assert len(siblings) <= 2
    head = "\n".join((ROOT / path).read_text().splitlines()[:6])
    for sibling in siblings:
        assert f"{sibling}.py" in head
    if path.name != "__init__.py":
        assert "Copy" in head


@pytest.mark.parametrize("path", WITHOUT_TORCH, ids=str)
def test_what_a_head_node_needs_imports_no_torch(path):
    standard = set(sys.stdlib_module_names) | {"ddp_helpers", ""}
    outside = {name.split(".")[0] for name in imports(path)} - standard
    assert not outside


def test_help_answers_in_half_a_second():
    def seconds() -> float:
        began = time.monotonic()
        command = [sys.executable, "-m", "ddp_helpers", "--help"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "launch" in text
        assert "run" in text
        return time.monotonic() - began

    assert min(seconds() for _ in range(5)) < 0.5  # the best of five: the machine may be busy


@pytest.mark.parametrize(
    "command", [["ruff", "check"], ["ruff", "format", "--check"]], ids=" ".join
)
def test_ruff_finds_nothing(command):
    done = subprocess.run(
        [sys.executable, "-m", *command, str(ROOT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
