"""Run lessons from top to bottom and store their outputs in them: what `make notebooks` calls.

    python notebooks/execute.py                          # all lessons
    python notebooks/execute.py notebooks/01_*.ipynb     # these

A lesson whose cell raises, without the tag raises-exception, is left as it was.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
CELL_TIMEOUT_S = 180
# The same on every machine: the version of Python would only make needless differences.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> None:
    """Run the notebook at path in a fresh kernel and replace the file, outputs and all."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        # Nothing that differs between two runs: no times, no widgets, one text per stream.
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    half_written = path.with_suffix(".half_written")
    nbformat.write(notebook, half_written)
    half_written.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(HERE.glob("*.ipynb")))
    failed = 0
    with tempfile.TemporaryDirectory() as ipython:
        os.environ["IPYTHONDIR"] = ipython  # the user's own profile takes no part
        for path in parser.parse_args(argv).notebooks:
            start = time.monotonic()
            try:
                execute(path)
            except CellExecutionError as error:
                print(f"{path.name}: failed\n{error}", file=sys.stderr)
                failed += 1
            else:
                print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
