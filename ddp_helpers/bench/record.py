"""A bench's figures in one JSON file, written after each round: a bench that ends early goes on.

Standard library only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class RecordError(RuntimeError):
    """The file of a bench holds something else."""


def read_record(path: str | Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what an earlier run with the same settings has written to path, else a new record.

    Raises RecordError when path holds other settings, or no record.
    """
    if path is None or not Path(path).exists():
        return {"settings": settings}
    record = load_record(path)
    before = record["settings"]
    names = sorted({*before, *settings})
    if other := [name for name in names if before.get(name) != settings.get(name)]:
        name = other[0]
        raise RecordError(
            f"{path} holds a bench with {name} {before.get(name)!r}, this one has"
            f" {settings.get(name)!r}.\n"
            f"Give this one another --out, or remove the file: rm {path}"
        )
    return record


def load_record(path: str | Path) -> dict[str, Any]:
    """Return the record that path holds. Raises RecordError when it holds none."""
    try:
        record = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist. Make it: bench train --out {path}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is no file of a bench: {error}") from None
    if not isinstance(record, dict) or "settings" not in record:
        raise RecordError(f"{path} is no file of a bench: it has no settings.")
    return record


def write_record(path: str | Path | None, record: dict[str, Any]) -> None:
    """Write record to path, whole or not at all."""
    if path is None:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half_written = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    half_written.write_text(json.dumps(record, indent=1) + "\n")
    half_written.replace(path)
