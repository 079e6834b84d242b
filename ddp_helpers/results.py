"""One JSON file per rank: written inside the job, read outside. Standard library only.

A launcher mixes what its ranks print. A file per rank cannot be mixed up, and needs no parsing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class ResultsError(RuntimeError):
    """A result folder does not hold one file for each rank of one job."""


def write_result(result_dir: str | Path, rank: int, **fields: Any) -> Path:
    """Write fields to result_dir/rank_RANK.json, whole or not at all, and return its path."""
    path = Path(result_dir) / f"rank_{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    half_written = path.with_suffix(f".{os.getpid()}.tmp")
    half_written.write_text(json.dumps({"rank": rank, **fields}, indent=1) + "\n")
    half_written.replace(path)
    return path


def read_results(result_dir: str | Path) -> list[dict[str, Any]]:
    """Return the fields of every rank, rank 0 first.

    Raises ResultsError when ranks are missing or the files are of jobs of different sizes.
    """
    results = [json.loads(path.read_text()) for path in Path(result_dir).glob("rank_*.json")]
    results.sort(key=lambda result: result["rank"])
    ranks = [result["rank"] for result in results]
    sizes = {result.get("world_size", len(results)) for result in results}
    if len(sizes) > 1:
        raise ResultsError(
            f"{result_dir} holds files of jobs of {' and '.join(map(str, sorted(sizes)))} ranks.\n"
            "Give each job a result folder of its own."
        )
    expected = list(range(sizes.pop() if sizes else 1))
    if ranks != expected:
        raise ResultsError(f"{result_dir} holds results of ranks {ranks}, expected {expected}.")
    return results
