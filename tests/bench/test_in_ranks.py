"""bench train and bench allreduce on real ranks."""

import json

import pytest

from ddp_helpers.__main__ import main
from ddp_helpers.bench import text

pytestmark = pytest.mark.launcher
SMALL = ["--", "--image_size", "16", "--batch_size", "4"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Run bench train on two ranks once; return its file."""
    path = tmp_path_factory.mktemp("bench") / "run.json"
    trace = path.parent / "trace"
    typed = ["-n", "2", "--seconds", "0.05", "--out", str(path), "--trace", str(trace)]
    assert main(["bench", "train", *typed, *SMALL]) == 0
    return path


def test_every_count_is_measured_in_every_round(bench):
    record = json.loads(bench.read_text())
    assert record["settings"]["ranks"] == [1, 2]
    assert len(record["rounds"]) == 5
    for one in record["rounds"]:
        assert list(one) == ["1", "2"]
        for ranks, found in one.items():
            images = 4 * int(ranks)  # of all ranks in a step
            assert found["images_per_s"] == pytest.approx(images / found["step_s"])


def test_a_step_is_taken_apart_and_its_parts_add_up(bench):
    parts = json.loads(bench.read_text())["parts"]
    assert list(parts["phases"]) == ["exchange", "ready", "no_sync"]
    for phases in parts["phases"].values():
        assert list(phases) == ["data", "forward", "backward", "optimizer"]
        assert all(seconds > 0 for seconds in phases.values())
    # ResNet-18 with 10 classes: 11,181,642 parameters of 4 bytes.
    assert sum(bucket["bytes"] for bucket in parts["buckets"]) == 4 * 11_181_642
    ready = [bucket["ready_s"] for bucket in parts["buckets"]]
    assert ready == sorted(ready)
    assert all(bucket["begin_s"] < bucket["end_s"] for bucket in parts["buckets"])
    # Running means and variances of 4,800 channels, and 20 counters of 8 bytes.
    assert parts["work"]["broadcast_bytes"] == 4 * 2 * 4800 + 20 * 8


def test_the_tables_say_what_the_file_holds(bench):
    record = json.loads(bench.read_text())
    printed = text.train(record)
    assert "resnet18, 16x16, weak scaling, 4 images a rank" in printed
    assert "1.000 (1.000 to 1.000)" in printed
    assert f"{text.step_s(record, 2) * 1000:.0f} ms" in printed


def test_a_trace_is_written_for_each_rank(bench):
    for rank in (0, 1):
        trace = json.loads((bench.parent / "trace" / f"rank_{rank}.json").read_text())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert any("convolution" in name for name in names)
        assert any("all_reduce" in name or "allreduce" in name for name in names)


def test_the_same_command_goes_on_where_it_was_ended(bench, capfd):
    record = json.loads(bench.read_text())
    last = record["rounds"].pop()
    bench.write_text(json.dumps({**record, "rounds": record["rounds"]}))
    typed = ["-n", "2", "--seconds", "0.05", "--out", str(bench), "--launcher", "mpirun"]
    assert main(["bench", "train", *typed, *SMALL]) == 0
    again = json.loads(bench.read_text())
    assert again["rounds"][:4] == record["rounds"]
    assert again["rounds"][4] != last
    assert again["parts"] == record["parts"]
    assert "round 5 of 5" in capfd.readouterr().out


def test_too_many_ranks_are_refused_with_what_to_type(capfd):
    assert main(["bench", "train", "-n", "1", "--ranks", "1,2", *SMALL]) == 1
    assert "--ranks 2, but the job has 1.\nStart more: -n 2" in capfd.readouterr().out


def test_all_reduces_of_torch_and_of_mpi_and_plain_tcp(capfd):
    typed = ["-n", "2", "--launcher", "mpirun", "--sizes", "4k,1m", "--json"]
    assert main(["bench", "allreduce", *typed]) == 0
    printed = capfd.readouterr().out
    record = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert list(record["all_reduce"]) == ["gloo", "mpi4py"]
    for timings in record["all_reduce"].values():
        assert [one["bytes"] for one in timings] == [4096, 1 << 20]
        for one in timings:
            assert one["least_s"] <= one["seconds"] <= one["most_s"]
            # Two ranks: what each sends is what is reduced.
            assert one["bus_bytes_per_s"] == pytest.approx(one["bytes_per_s"])
    [pair] = record["pairs"]
    assert pair["ranks"] == [0, 1]
    assert min(pair[name] for name in pair if name != "ranks") > 0
