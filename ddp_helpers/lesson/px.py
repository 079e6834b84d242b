"""%%px and %px in the running notebook.

Lesson: notebooks/01_processes_and_ranks.ipynb
"""

from __future__ import annotations

import re
from typing import Any

CELL_S = 150.0  # time limit of a cell that sets none: nothing waits for ever


def register_px(shell: Any, engines: Any) -> None:
    """Make %%px and %px in shell, the running IPython, run on engines."""
    from IPython.core.error import UsageError
    from IPython.core.magic import no_var_expand
    from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

    @no_var_expand
    @magic_arguments()
    @argument("--timeout", type=float, default=CELL_S, help="end the cell after so many seconds")
    @argument("--ranks", help="run on these ranks only, such as 0,2")
    def px(line: str, cell: str | None = None) -> None:
        """Run this cell on every rank, and show what they print in rank order."""
        if cell is None:  # %px statement
            engines.run(line)
            return
        arguments = parse_argstring(px, line)
        ranks = None
        if arguments.ranks is not None:
            if not re.fullmatch(r"\d+(,\d+)*", arguments.ranks):
                raise UsageError(f"--ranks {arguments.ranks}: write it as --ranks 0,2")
            ranks = [int(number) for number in arguments.ranks.split(",")]
            if max(ranks) >= len(engines):
                raise UsageError(f"--ranks {arguments.ranks}: there are {len(engines)} ranks")
        # A line for %%px itself: errors then count lines as the notebook shows them.
        engines.run("\n" + cell, ranks, arguments.timeout)

    px.engines = engines
    shell.register_magic_function(px, "line_cell", "px")
