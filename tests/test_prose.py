"""Prose is tested too: links lead somewhere, and the commands shown can be typed."""

import json
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("notebooks/*.ipynb")])


def prose(path: Path) -> str:
    """Return a Markdown file's text, or that of a notebook's Markdown cells."""
    if path.suffix == ".md":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def commands(path: Path) -> list[list[str]]:
    """Return the words of every command line in a fenced block, continued lines joined."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", prose(path), re.M | re.S):
        if language != "bash":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"^(\S+)?\$ ", "", line.strip())
            words = shlex.split(line, comments=True)
            if words and words[0] in ("torchrun", "mpirun", "mpiexec", "srun", "python", "make"):
                found.append(words)
    return found


def headings(path: Path) -> set[str]:
    """Return the anchors of a text's headings, as GitHub and JupyterLab write them."""
    titles = re.findall(r"^#+ +(.+)$", prose(path), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_relative_links_and_pictures_exist(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file) if file else path
        assert linked.exists(), target
        if anchor:
            assert anchor.lower() in headings(linked), target


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_modules_and_files_in_commands_exist(path):
    for words in commands(path):
        for flag, value in zip(words, words[1:], strict=False):
            if flag == "-m" and value not in ("pip", "venv"):
                assert find_spec(value), words
        for word in words:
            if word.startswith(("notebooks/", "benchmarks/", "ddp_helpers/", "tests/")):
                assert (ROOT / word).exists(), words


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_make_targets_in_commands_exist(path):
    targets = [word for words in commands(path) if words[0] == "make" for word in words[1:]]
    for target in (word for word in targets if "=" not in word):
        done = subprocess.run(["make", "-n", "-C", ROOT, target], capture_output=True, check=False)
        assert done.returncode == 0, target


def test_the_old_spelling_of_mpirun_options_is_shown_only_where_it_is_explained():
    # -bind-to none and -map-by slot do not start on Open MPI 5.
    for path in TEXTS:
        for words in commands(path):
            if words[0] == "mpirun":
                assert not {"-bind-to", "-map-by"} & set(words), path
