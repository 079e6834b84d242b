"""run_local and launch_here with real launchers: every ending, and nothing left running."""

import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

from ddp_helpers.launch import processes
from ddp_helpers.launch.commands import HostCommand, Job, plan, torchrun
from ddp_helpers.launch.hosts import Host, local
from ddp_helpers.launch.mpi import LauncherNotFound, LauncherRefused
from ddp_helpers.launch.runner import JobFailed, launch_here, run_local

SCRIPT = str(Path(__file__).with_name("rank_behaviours.py"))
EVERY_LAUNCHER = pytest.mark.parametrize(
    "launcher", ["torchrun", "torch.distributed.launch", "mpirun"]
)
# Where torch.distributed.launch runs the same code as torchrun, and seconds count.
TWO_LAUNCHERS = pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])


@pytest.fixture
def environ():
    """An environment that marks a test's processes; at the end none of them may be left."""
    mark = uuid.uuid4().hex
    yield {**os.environ, "TEST_OF_THE_RUNNER": mark}
    left = marked({"TEST_OF_THE_RUNNER": mark})
    for process_id, _ in left:
        psutil.Process(process_id).kill()
    assert not left


def marked(environ):
    """The processes that environ marks, with their command lines."""
    mark, found = environ["TEST_OF_THE_RUNNER"], []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_OF_THE_RUNNER") == mark:
                found.append((process.pid, process.cmdline()))
        except psutil.Error:
            continue
    return found


def ranks(launcher, behaviour, folder, n=2):
    return plan(launcher, Job(SCRIPT, (behaviour, str(folder)), hosts=local(n)))


def python(code, *args):
    """A command without a launcher, for what does not depend on one."""
    return HostCommand("localhost", (sys.executable, "-c", code, *map(str, args)))


# --- without a launcher -------------------------------------------------------------------------


def test_output_is_shown_line_by_line_and_returned(environ, capsys):
    code = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr)"
    output = run_local([python(code)], environ=environ)
    assert output == "out\nerr\n"
    assert capsys.readouterr().out == output
    assert run_local([python(code)], echo=False, environ=environ) == output
    assert capsys.readouterr().out == ""


def test_output_is_shown_while_the_job_runs(environ, tmp_path, monkeypatch):
    # The job ends only after its first line has been shown.
    seen = tmp_path / "seen"
    monkeypatch.setattr("builtins.print", lambda text, **_: seen.touch())
    code = "import os, sys, time\nprint('first', flush=True)\n"
    code += "while not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    run_local([python(code, seen)], timeout_s=20, environ=environ)


def test_commands_run_together(environ, tmp_path):
    code = "import os, sys, time\nopen(sys.argv[1], 'w')\n"
    code += "while not os.path.exists(sys.argv[2]): time.sleep(0.01)"
    first, second = tmp_path / "first", tmp_path / "second"
    run_local([python(code, first, second), python(code, second, first)], 20, environ=environ)


def test_all_are_stopped_when_one_fails(environ):
    wait, fail = python("import time; time.sleep(600)"), python("raise ValueError('bad')")
    began = time.monotonic()
    with pytest.raises(JobFailed) as caught:
        run_local([wait, fail], environ=environ)
    assert time.monotonic() - began < 10
    assert caught.value.command == fail
    assert (caught.value.rank, caught.value.exit_code) == (None, 1)
    assert caught.value.traceback.endswith("\nValueError: bad")
    assert str(caught.value) == (
        f"The job failed with exit code 1.\n{caught.value.traceback}\nThe command was: {fail}"
    )


def test_a_job_that_is_too_late_is_stopped_and_shows_its_last_lines(environ):
    command = python("import time; print('in the loop', flush=True); time.sleep(600)")
    with pytest.raises(JobFailed) as caught:
        run_local([command], timeout_s=0.5, environ=environ)
    assert str(caught.value) == (
        "The job did not end within 0.5 s and was stopped.\nin the loop\n"
        f"The command was: {command}"
    )
    assert caught.value.exit_code is None


def test_a_failure_that_did_not_end_the_job_is_reported_when_it_is_too_late(environ):
    # MPICH's mpiexec goes on waiting for the others when one rank has failed.
    code = "import time\nprint('[rank1]: Traceback (most recent call last):', flush=True)\n"
    code += "print('[rank1]: ValueError: bad', flush=True); time.sleep(600)"
    with pytest.raises(JobFailed, match="was stopped. Rank 1 had failed:\nTraceback") as caught:
        run_local([python(code)], 0.5, environ=environ)
    assert caught.value.rank == 1
    assert caught.value.traceback == "Traceback (most recent call last):\nValueError: bad"


def test_more_output_than_a_pipe_holds_does_not_block(environ):
    output = run_local(
        [python("print('x' * 100 + '\\n', end='') or print('y' * 10**6)")], 20, False
    )
    assert len(output) == 101 + 10**6 + 1
    assert run_local([python("for i in range(20000): print(i)")], 20, False).count("\n") == 20000


def test_output_while_being_stopped_does_not_block(environ):
    code = "import signal, sys, time\ndef end(*_): print('z' * 10**6); sys.exit()\n"
    code += "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\ntime.sleep(600)"
    with pytest.raises(JobFailed) as caught:
        run_local([python(code)], 1, False, environ)
    assert len(caught.value.output) > 10**6
    assert caught.value.traceback == "ready"  # and not what it said when it was stopped


def test_a_process_that_ignores_sigterm_is_killed(environ, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.3)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with pytest.raises(JobFailed):
        run_local([python(code)], 1, environ=environ)


def test_a_daemon_left_by_a_job_that_was_done_is_ended(environ):
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    assert run_local([python(code)], 20, environ=environ) == ""


def test_it_also_works_outside_the_main_thread(environ):
    outputs = []
    thread = threading.Thread(
        target=lambda: outputs.append(run_local([python("print(1)")], 20, False, environ))
    )
    thread.start()
    thread.join()
    assert outputs == ["1\n"]


def test_a_missing_launcher_is_named_before_anything_starts(environ, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")  # Slurm may be installed here
    trace = tmp_path / "started"
    commands = [python("open(__import__('sys').argv[1], 'w')", trace), *plan("srun", Job(SCRIPT))]
    with pytest.raises(LauncherNotFound, match="srun not found on this machine.\nsrun comes with"):
        run_local(commands, environ=environ)
    assert not trace.exists()


def test_B21_open_mpi_as_root_is_refused_before_anything_starts(environ, tmp_path, monkeypatch):
    """https://github.com/open-mpi/ompi/issues/4451: mpirun refuses root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environ = {name: value for name, value in environ.items() if not name.startswith("OMPI_")}
    with pytest.raises(LauncherRefused, match="export OMPI_ALLOW_RUN_AS_ROOT=1\n"):
        run_local(ranks("mpirun", "print_lines", tmp_path), environ=environ)
    assert not list(tmp_path.iterdir())


# --- with every launcher ------------------------------------------------------------------------


@pytest.mark.launcher
@EVERY_LAUNCHER
def test_every_rank_gives_whole_lines_in_order_and_a_daemon_of_a_rank_is_ended(
    environ, tmp_path, launcher
):
    output = run_local(ranks(launcher, "print_lines", tmp_path, n=4), 60, False, environ)
    lines = output.splitlines()
    for rank in range(4):
        own = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert own == [f"[rank {rank}] line {number}" for number in range(50)]


@pytest.mark.launcher
@EVERY_LAUNCHER
def test_a_rank_that_raises_is_reported_while_others_are_blocked(environ, tmp_path, launcher):
    commands = ranks(launcher, "fail_while_others_are_blocked", tmp_path, n=4)
    with pytest.raises(JobFailed) as caught:
        run_local(commands, 60, False, environ)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    assert str(caught.value).startswith("Rank 1 failed with exit code 1.\nTraceback")
    assert caught.value.traceback.endswith("\nValueError: deliberate")


FRESH = """
import os, sys
assert "pytest" not in sys.modules
import torch.distributed as dist
assert not dist.is_initialized()
print("rank", os.environ["RANK"])
"""


@pytest.mark.launcher
def test_B49_ranks_are_fresh_processes_whatever_the_kernel_has_done(environ, tmp_path):
    """https://github.com/huggingface/accelerate/issues/1751: a fork of a used process fails."""
    import torch
    import torch.distributed as dist

    script = tmp_path / "fresh.py"
    script.write_text(FRESH)
    commands = plan("torchrun", Job(str(script), hosts=local(2)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        big = torch.ones(500, 500) @ torch.ones(500, 500)  # starts torch's threads
        for _ in range(2):
            output = run_local(commands, 60, False, environ)
            lines = output.splitlines()
            assert sorted(line[-6:] for line in lines) == ["rank 0", "rank 1"]
        dist.all_reduce(big)
        assert big[0, 0] == 500
    finally:
        dist.destroy_process_group()


@pytest.mark.launcher
def test_B07_torchruns_variables_win_over_those_of_a_slurm_task_around_it(environ, tmp_path):
    """https://github.com/Lightning-AI/pytorch-lightning/pull/11406: all think they are rank 0."""
    script = tmp_path / "who.py"
    script.write_text(
        "import os\n"
        "from ddp_helpers.worker.environment import detect\n"
        "env = detect()\n"
        "os.write(1, f'{env.launcher} {env.rank} of {env.world_size}\\n'.encode())\n"
    )
    task = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += ["--local-addr=127.0.0.1", str(script)]
    done = subprocess.run(
        torchrun, env={**environ, **task}, capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(done.stdout.splitlines()) == ["torchrun 0 of 2", "torchrun 1 of 2"]


@pytest.mark.launcher
@TWO_LAUNCHERS
def test_the_first_traceback_is_found_among_interleaved_ones(environ, tmp_path, launcher):
    commands = ranks(launcher, "fail_while_others_fail_too", tmp_path, n=4)
    with pytest.raises(JobFailed) as caught:
        run_local(commands, 60, False, environ)
    assert caught.value.rank == 1
    first, *frames, last = caught.value.traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "ValueError: deliberate"
    names = [frame.split(" in ")[1] for frame in frames if frame.startswith("  File")]
    assert names == ["_caught", "fail"]
    assert all(frame.startswith("  ") for frame in frames)


@pytest.mark.launcher
@TWO_LAUNCHERS
def test_an_exit_code_without_a_traceback_comes_with_the_last_lines(environ, tmp_path, launcher):
    with pytest.raises(JobFailed) as caught:
        run_local(ranks(launcher, "exit_with_3", tmp_path), 60, False, environ)
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)
    assert caught.value.traceback.endswith("[rank 1] last words")


@pytest.mark.launcher
@TWO_LAUNCHERS
def test_a_rank_that_was_killed_is_named_with_the_signal(environ, tmp_path, launcher):
    with pytest.raises(JobFailed, match=r"^Rank 1 was ended by signal 9 \(Killed\)") as caught:
        run_local(ranks(launcher, "be_killed", tmp_path), 60, False, environ)
    assert (caught.value.rank, caught.value.exit_code) == (1, -9)


@pytest.mark.launcher
@EVERY_LAUNCHER
def test_a_hung_job_is_stopped_and_leaves_no_worker(environ, tmp_path, launcher, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 2)
    timeout_s = 3 if launcher == "mpirun" else 8  # torchrun imports torch
    commands = ranks(launcher, "wait_and_one_ignores_sigterm", tmp_path)
    began = time.monotonic()
    with pytest.raises(JobFailed, match=f"did not end within {timeout_s} s") as caught:
        run_local(commands, timeout_s, False, environ)
    assert time.monotonic() - began < timeout_s + 10
    assert len(list(tmp_path.glob("here_*"))) == 2, caught.value.output  # both were running
    assert caught.value.rank is None


@pytest.mark.launcher
@TWO_LAUNCHERS
def test_the_job_ends_with_a_process_that_is_killed(environ, tmp_path, launcher, wait_until):
    code = "import sys\nfrom ddp_helpers.launch.commands import Job, plan\n"
    code += "from ddp_helpers.launch.hosts import local\n"
    code += "from ddp_helpers.launch.runner import run_local\n"
    code += "job = Job(sys.argv[2], tuple(sys.argv[3:]), hosts=local(2))\n"
    code += "run_local(plan(sys.argv[1], job))"
    folders, here = tmp_path / "folders", tmp_path / "here"
    folders.mkdir(), here.mkdir()
    runner = subprocess.Popen(
        [sys.executable, "-c", code, launcher, SCRIPT, "wait_and_one_ignores_sigterm", here],
        env={**environ, "TMPDIR": str(folders)},
    )
    wait_until(lambda: len(list(here.glob("here_*"))) == 2)
    runner.kill()
    runner.wait()
    wait_until(lambda: not marked(environ) and not list(folders.glob("ddp_helpers_*")))


@pytest.mark.launcher
@EVERY_LAUNCHER
def test_a_surrounding_job_is_not_seen_inside_and_a_taken_port_is_not_in_the_way(
    environ, tmp_path, launcher, monkeypatch
):
    around = {
        "RANK": "7",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "7",
        "MASTER_ADDR": "node-z",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "outer",
        "PET_NNODES": "2",
        "OMPI_COMM_WORLD_RANK": "7",
        "OMPI_COMM_WORLD_SIZE": "8",
        "PMIX_RANK": "7",
        "PMIX_NAMESPACE": "outer",
        "OUTER": "kept",
    }
    for name, value in {**environ, **around}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("", 29500))  # the default port of several hosts
            holder.listen()
        except OSError:
            pass  # somebody else holds it already
        for _ in range(2):  # and again, as when a notebook's cell is run twice
            results = launch_here(
                launcher, SCRIPT, "write_result", str(tmp_path), module=False, timeout_s=60
            )
            assert [result["rank"] for result in results] == [0, 1]
            for result in results:
                seen = result["seen"]
                assert seen["OUTER"] == "kept"
                assert seen["OMP_NUM_THREADS"] == "1"
                own = "OMPI_COMM_WORLD_RANK" if launcher == "mpirun" else "RANK"
                assert seen.pop(own) == str(result["rank"])
                assert seen["MASTER_PORT"] not in ("1", "29500")
                assert seen.get("RANK") is None
                assert seen.get("OMPI_COMM_WORLD_RANK") is None


@pytest.mark.launcher
def test_results_are_kept_in_a_folder_that_is_named(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    results = launch_here(
        "mpirun", SCRIPT, "write_result", str(tmp_path), n=3, module=False, result_dir=folder
    )
    assert len(results) == 3
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank_0.json",
        "rank_1.json",
        "rank_2.json",
    ]


@pytest.mark.launcher
def test_two_agents_on_this_machine_are_one_job_and_the_rank_is_the_jobs(
    environ, tmp_path, free_port
):
    hosts = (Host("127.0.0.2", 1), Host("127.0.0.3", 2))
    job = Job(
        SCRIPT,
        ("fail_while_others_are_blocked", str(tmp_path)),
        hosts=hosts,
        master_addr="127.0.0.1",
        master_port=free_port,
    )
    with pytest.raises(JobFailed) as caught:
        run_local(torchrun(job), 60, False, environ)
    assert caught.value.rank == 1  # local rank 0 on the second host
    assert caught.value.command.host == "127.0.0.3"
    assert caught.value.traceback.endswith("ValueError: deliberate")


@pytest.mark.launcher
def test_no_folder_of_a_job_is_left_in_the_temporary_folder(environ, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environ = {**environ, "TMPDIR": str(tmp_path)}
    run_local(ranks("torchrun", "print_lines", tmp_path), 60, False, environ)
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("pid_")]
    assert left == []


@pytest.mark.launcher
@pytest.mark.skipif(os.geteuid() != 0, reason="changing the host name needs root")
@EVERY_LAUNCHER
def test_a_host_name_that_does_not_resolve_does_not_matter(environ, tmp_path, launcher):
    can_rename = subprocess.run(["unshare", "-u", "true"], capture_output=True, check=False)
    if can_rename.returncode != 0:
        pytest.skip("unshare -u is not allowed here")
    (command,) = ranks(launcher, "print_lines", tmp_path)
    inside = ("sh", "-c", f"hostname no-such-name.invalid && {command}")
    renamed = HostCommand("localhost", ("unshare", "-u", *inside))
    assert run_local([renamed], 60, False, environ).count("line 49") == 2
