import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers.worker.checkpoint import CheckpointError, load, read, save, unwrap

launcher = pytest.mark.launcher


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


class OwnModule(nn.Module):
    """A plain model with a submodule of the name that DDP uses."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 2)


def same(first, second):
    first, second = unwrap(first).state_dict(), unwrap(second).state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


WRAPPERS = {
    "plain": lambda model: model,
    "DDP": DDP,
    "compiled": torch.compile,
    "compiled DDP": lambda model: torch.compile(DDP(model)),
    "DDP of compiled": lambda model: DDP(torch.compile(model)),
}


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("loaded", WRAPPERS)
@pytest.mark.parametrize("saved", WRAPPERS)
def test_B41_a_checkpoint_loads_into_a_wrapped_and_a_plain_model(saved, loaded, tmp_path):
    """https://github.com/Pointcept/Pointcept/pull/166: 'module.' is cut from every key."""
    first, second = WRAPPERS[saved](linear(1)), WRAPPERS[loaded](linear(2))
    save(tmp_path / "c.pt", first)
    assert not same(first, second)
    load(tmp_path / "c.pt", second)
    assert same(first, second)


@pytest.mark.usefixtures("group_of_one")
def test_keys_are_saved_without_the_prefix_of_a_wrapper(tmp_path):
    save(tmp_path / "c.pt", DDP(linear()))
    assert set(read(tmp_path / "c.pt")["model"]) == set(linear().state_dict())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_in_a_file_from_elsewhere_are_cut(prefix, tmp_path):
    save(tmp_path / "c.pt", linear(1))
    state = torch.load(tmp_path / "c.pt")
    state["model"] = {prefix + key: value for key, value in state["model"].items()}
    torch.save(state, tmp_path / "c.pt")
    model = linear(2)
    load(tmp_path / "c.pt", model)
    assert same(model, linear(1))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("wrapper", ["plain", "DDP"])
def test_B41_a_models_own_submodule_called_module_keeps_its_name(wrapper, tmp_path):
    """https://github.com/Pointcept/Pointcept/pull/166: 'module.' is cut from every key."""
    save(tmp_path / "c.pt", WRAPPERS[wrapper](OwnModule()))
    assert set(read(tmp_path / "c.pt")["model"]) == {"module.weight", "module.bias"}
    model = WRAPPERS[wrapper](OwnModule())
    load(tmp_path / "c.pt", model)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (nn.Sequential(nn.Linear(3, 2)), "not in the model: 1.weight, 1.bias, 1.running_mean"),
        (nn.Sequential(*linear(), nn.Linear(2, 2)), "missing: 2.weight, 2.bias"),
        (
            nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
            r"other shape: 0.weight \(2, 3\) not \(2, 4\)",
        ),
    ],
    ids=["too many", "too few", "shape"],
)
def test_a_file_of_another_model_lists_the_keys(other, text, tmp_path):
    save(tmp_path / "c.pt", linear())
    with pytest.raises(CheckpointError, match=text) as caught:
        load(tmp_path / "c.pt", other)
    assert str(tmp_path / "c.pt") in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_part_that_was_not_saved_is_named(tmp_path):
    model = linear()
    save(tmp_path / "c.pt", model)
    with pytest.raises(CheckpointError, match="was saved without optimizer"):
        load(tmp_path / "c.pt", model, torch.optim.SGD(model.parameters(), 0.1))


def test_an_optimizer_of_another_model_is_a_clear_error(tmp_path):
    model = linear()
    save(tmp_path / "c.pt", model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(CheckpointError, match="does not fit: "):
        load(tmp_path / "c.pt", model, torch.optim.SGD([model[0].weight], 0.1))


class Evil:
    """Unpickling this would run code."""

    def __reduce__(self):
        return print, ("ran",)


def damage(path, how):
    whole = path.read_bytes()
    if how == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("epoch 1")
    elif how == "code":
        torch.save(Evil(), path)
    elif how == "other dictionary":
        torch.save(linear().state_dict(), path)
    elif how == "tensor":
        torch.save(torch.ones(2), path)
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("truncated", "damaged or no checkpoint"),
        ("empty", "damaged or no checkpoint"),
        ("text", "damaged or no checkpoint"),
        ("code", "damaged or no checkpoint"),
        ("other dictionary", "no checkpoint of this program: model, epoch, step"),
        ("tensor", "no checkpoint of this program"),
        ("missing", "There is no checkpoint"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named_with_the_reason(how, reason, tmp_path, capsys):
    path = tmp_path / "c.pt"
    save(path, linear())
    damage(path, how)
    model = linear(1)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load(path, model)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    assert same(model, linear(1))
    assert "ran" not in capsys.readouterr().out


def test_a_failed_write_leaves_the_previous_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    save(path, linear(1), epoch=1)

    def full_disk(state, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(CheckpointError, match="c.pt could not be written: .*No space left"):
            save(path, linear(2), epoch=2)
    assert load(path, model := linear()).epoch == 1
    assert same(model, linear(1))
    assert [file.name for file in tmp_path.iterdir()] == ["c.pt"]


def test_the_file_is_read_to_where_the_caller_says_and_runs_no_code(tmp_path, monkeypatch):
    save(tmp_path / "c.pt", linear())
    seen = []
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: (seen.append(k), real(*a, **k))[1])
    load(tmp_path / "c.pt", linear())
    load(tmp_path / "c.pt", linear(), map_location=torch.device("cpu"))
    assert seen == [
        {"map_location": "cpu", "weights_only": True},
        {"map_location": torch.device("cpu"), "weights_only": True},
    ]


@launcher
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(worlds, world_size):
    ranks = worlds("resumed_and_uninterrupted", world_size)
    for uninterrupted, resumed in ranks:
        assert resumed == uninterrupted
    if world_size == 2:  # and each rank has got its own random numbers back
        assert ranks[0][1]["next random numbers"] != ranks[1][1]["next random numbers"]


@launcher
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_resumed_within_an_epoch_equals_an_uninterrupted_one(worlds, world_size):
    for pairs in worlds("resumed_within_an_epoch", world_size):
        assert len(pairs) == 3  # plain, accumulating, with worker processes
        for uninterrupted, resumed in pairs:
            assert resumed == uninterrupted


@launcher
def test_on_another_number_of_ranks_the_epoch_begins_anew(worlds):
    for position in worlds("on_other_ranks", 2):
        assert position == {"epoch": 1, "step": 0, "mine": None, "note": "ranks 1 then, 2 now"}


@launcher
def test_only_rank_0_writes_and_all_ranks_see_the_file(worlds):
    assert worlds("files_renamed_per_rank", 2) == [1, 0]


@launcher
def test_all_ranks_stop_when_one_cannot_read_its_file(worlds):
    for value in worlds("damaged_for_rank_1_only", 2):
        assert value["error"].startswith("DamagedCheckpoint: rank 1: ")
        assert "damaged_1.pt is damaged" in value["error"]


@launcher
def test_all_ranks_stop_when_rank_0_cannot_write(worlds):
    for value in worlds("unwritable", 2):
        assert value["error"].startswith("CheckpointError: ")
        assert "could not be written" in value["error"]
