"""%%px in a real notebook kernel: what the learner types, sees, and interrupts."""

import os
import threading

import pytest
from jupyter_client.manager import start_new_kernel

from ddp_helpers.lesson import processes
from ddp_helpers.lesson.report import GO_ON

pytestmark = pytest.mark.launcher

START = """
from ddp_helpers.lesson.engines import start_engines
engines = start_engines(2)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A kernel with two engines: (manager, client, start's outputs). It leaves nothing behind."""
    folder = tmp_path_factory.mktemp("notebook")
    manager, client = start_new_kernel(
        kernel_name="python3",
        cwd=str(folder),
        env={**os.environ, "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython"))},
    )
    number = manager.provisioner.pid
    yield manager, client, execute(client, START)
    client.stop_channels()
    manager.shutdown_kernel()  # the polite way, as JupyterLab does
    assert not processes.of_kernel(number)
    assert not list(folder.iterdir())


def execute(client, source: str) -> list[dict]:
    """Run a cell and return its outputs; streams of one name are joined, as notebooks do."""
    outputs: list[dict] = []

    def take(message):
        content, kind = message["content"], message["msg_type"]
        if kind == "stream" and outputs and outputs[-1].get("name") == content["name"]:
            outputs[-1]["text"] += content["text"]
        elif kind in ("stream", "display_data", "execute_result", "error"):
            outputs.append({"kind": kind, **content})

    client.execute_interactive(source, output_hook=take, timeout=120, store_history=False)
    return outputs


@pytest.fixture
def cell(kernel):
    """Run a cell after a start in good order, and return its outputs."""
    _, client, _ = kernel
    [state] = execute(client, "engines.push(free=1)\nengines")
    assert state["data"]["text/plain"].startswith("<2 MPI ranks on this machine, ")
    return lambda source: execute(client, source)


def text_of(outputs: list[dict]) -> str:
    assert [output["kind"] for output in outputs] == ["stream"], outputs
    return outputs[0]["text"]


def test_B54_a_start_shows_nothing(kernel):
    """https://github.com/computationalmodelling/nbval/issues/231: output 5 s after the reply."""
    assert kernel[2] == []


def test_a_cell_runs_on_every_rank_and_shows_one_text_in_rank_order(cell):
    outputs = cell("%%px\nimport os\nprint('hello')\nmpi_rank")
    assert text_of(outputs) == "[rank 0] hello\n[rank 0] 0\n[rank 1] hello\n[rank 1] 1\n"
    assert outputs[0]["name"] == "stdout"


def test_a_line_runs_on_every_rank_as_it_is_typed(cell):
    cell("mpi_rank = 'the notebook has a variable of this name, and $HOME'")
    outputs = cell("%px print(f'{mpi_rank} $HOME')")
    assert text_of(outputs) == "[rank 0] 0 $HOME\n[rank 1] 1 $HOME\n"


def test_ranks_can_be_chosen(cell):
    assert text_of(cell("%%px --ranks 1\nprint(mpi_rank)")) == "[rank 1] 1\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--ranks 2", "--ranks 2: there are 2 ranks"),
        ("--ranks all", "--ranks all: write it as --ranks 0,2"),
        ("--timeout soon", "argument --timeout: invalid float value: 'soon'"),
        ("--target 1", "unrecognized arguments: --target 1"),
    ],
)
def test_a_wrong_option_is_a_message(cell, options, expected):
    [output] = cell(f"%%px {options}\nprint(1)")
    assert output["kind"] == "stream"
    assert expected in output["text"]


def test_the_engines_write_to_no_folder_of_the_users(cell):
    assert "ddp_helpers_engines_" in text_of(cell("%px print(os.environ['IPYTHONDIR'])"))


def test_pictures_come_after_the_text_in_rank_order(cell):
    outputs = cell(
        "%%px\nimport matplotlib.pyplot as plt\nprint('drawing')\n"
        "plt.figure(figsize=(1, 1))\nplt.plot([0, mpi_rank])\nplt.show()"
    )
    assert [output["kind"] for output in outputs] == ["stream"] + ["display_data"] * 4
    assert outputs[0]["text"] == "[rank 0] drawing\n[rank 1] drawing\n"
    assert outputs[1]["data"] == {"text/plain": "[rank 0] shows:"}
    assert outputs[3]["data"] == {"text/plain": "[rank 1] shows:"}
    assert all("image/png" in outputs[i]["data"] for i in (2, 4))


def test_an_error_shows_the_report_and_not_the_course_machinery(cell):
    [error] = cell("%%px --ranks 0\n\n1 / 0")
    assert error["ename"] == "RanksFailed"
    report = "rank 0 raised ZeroDivisionError: division by zero\n    line 3 of the cell: 1 / 0"
    assert error["evalue"] == report
    assert "\n".join(error["traceback"]) == f"RanksFailed: {report}"


def test_the_stop_button_ends_a_cell_and_says_how_to_go_on(kernel, cell):
    timer = threading.Timer(1.5, kernel[0].interrupt_kernel)
    timer.start()
    [text, error] = cell("%%px\nprint('waits')\nMPI.COMM_WORLD.Recv(bytearray(1), 1 - mpi_rank)")
    timer.join()
    assert text["text"] == "[rank 0] waits\n[rank 1] waits\n"
    assert error["evalue"] == (
        "the cell was interrupted\n"
        "ranks 0, 1 are still waiting at\n"
        "    line 3 of the cell: MPI.COMM_WORLD.Recv(bytearray(1), 1 - mpi_rank)\n"
        f"{GO_ON}"
    )
    assert text_of(execute(kernel[1], "engines.restart()")).startswith("2 new ranks")


def test_a_second_start_takes_the_place_of_the_first(kernel, cell):
    number = kernel[0].provisioner.pid
    before = {one.pid for one in processes.of_kernel(number)}
    assert cell("engines = start_engines(1)") == []
    assert not before & {one.pid for one in processes.of_kernel(number)}
    assert text_of(execute(kernel[1], "%px print(mpi_size)")) == "[rank 0] 1\n"
    assert execute(kernel[1], START) == []
