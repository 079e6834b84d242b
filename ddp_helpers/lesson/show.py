"""Show code and results in a lesson: the code that really runs, not a copy of it.

    show_source(pass_message)                  # from ddp_helpers/scripts/message_passing.py
    show_diff(train_alone, train_together)     # what has to change
    table(read_results("results"), ["rank", "host", "number"])
    show_commands(torchrun(job))               # as they are typed on each host

Source and tables are Markdown, which JupyterLab colours and nbval compares as plain text.
"""

from __future__ import annotations

import difflib
import inspect
import re
import shlex
import sysconfig
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ddp_helpers
from ddp_helpers.launch.commands import HostCommand

# Installed packages first: the virtual environment may lie in this project's folder.
_ROOTS = (Path(sysconfig.get_path("purelib")), Path(ddp_helpers.__file__).parents[1])


def show_source(*objects: Any) -> None:
    """Display the source of functions, classes or modules, and say which file it is from."""
    for one in objects:
        code = _source(one)
        _display(f"From `{_file(one)}`:\n\n{_fenced('python', code)}", code)


def show_diff(before: Any, after: Any) -> None:
    """Display what has to change in before's source to make it after's."""
    names = f"`{before.__name__}` to `{after.__name__}`"
    lines = list(
        difflib.unified_diff(
            _source(before).splitlines(),
            _source(after).splitlines(),
            f"{before.__name__} ({_file(before)})",
            f"{after.__name__} ({_file(after)})",
            lineterm="",
        )
    )
    changes = [line[0] for line in lines[2:]]  # the first two name the files
    count = f"{_lines(changes.count('+'))} added, {_lines(changes.count('-'))} removed"
    text = "\n".join(lines)
    _display(f"From {names}: {count}.\n\n{_fenced('diff', text)}", text)


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Display rows as a table with these columns; None: the keys of the first row.

    A missing value is left empty. Floats are shown with four significant digits.
    """
    rows = list(rows)
    names = list(columns if columns is not None else rows[0] if rows else ())
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    is_number = [
        any(row.get(name) is not None for row in rows)
        and all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
        for name in names
    ]
    rules = ["---:" if number else "---" for number in is_number]
    markdown = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in [cells[0], rules, *cells[1:]]
    ]
    _display("\n".join(markdown), _aligned(cells, is_number))


def show_commands(commands: Iterable[HostCommand], width: int = 88) -> None:
    """Print commands with their host in front, in lines that can be pasted into a shell.

    An option and its value stay on one line.
    """
    for command in commands:
        lines = [f"{command.host}$"]
        for piece in _pieces(command):
            if len(lines[-1]) + len(piece) > width - 3:  # room for two blanks and a backslash
                lines.append("   ")
            lines[-1] += f" {piece}"
        print(" \\\n".join(lines))


def _pieces(command: HostCommand) -> list[str]:
    """Return the parts of a command line between which a line may end."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in command.env]
    pieces = [*assignments, command.argv[0]]
    for word in map(shlex.quote, command.argv[1:]):
        is_value = not word.startswith("-") and re.fullmatch(r"--?[\w-]+", pieces[-1])
        if is_value:
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    return pieces


def _source(one: Any) -> str:
    return textwrap.dedent(inspect.getsource(one)).rstrip()


def _file(one: Any) -> str:
    """Return where the source is, as every machine would say it."""
    path = Path(inspect.getsourcefile(inspect.unwrap(one)) or "")
    if re.search(r"ipykernel_\d+", str(path)) or str(path).startswith("<"):
        return "this notebook"
    for root in _ROOTS:
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


def _fenced(language: str, code: str) -> str:
    longest = max(map(len, re.findall(r"`{3,}", code)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def _lines(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\n", " ")


def _aligned(cells: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def _display(markdown: str, plain: str) -> None:
    from IPython.display import display

    display({"text/markdown": markdown, "text/plain": plain}, raw=True)
