import hashlib
import pickle
import tarfile

import pytest
import torch

from ddp_helpers.worker.data import (
    DataNotAvailable,
    evaluation_loader,
    load,
    train_loader,
)

pytest.importorskip("sklearn.datasets")  # here, because it sets variables when first imported
datasets = pytest.importorskip("torchvision.datasets")


@pytest.mark.parametrize("image_size", [8, 32, 45])
def test_digits_are_real_images_in_three_channels(image_size):
    train_set, test_set = load("digits", image_size)
    assert (len(train_set), len(test_set)) == (1437, 360)
    image, label = train_set[0]
    assert image.shape == (3, image_size, image_size)
    assert image.dtype == torch.float32
    assert 0 <= label < 10
    images = torch.stack([image for image, _ in train_set])
    assert abs(images.mean()) < 0.1
    assert abs(images.std() - 1) < 0.25


def test_the_digits_to_test_on_are_the_same_each_time_and_not_trained_on():
    parts = [{image.numpy().tobytes() for image, _ in part} for part in load("digits", 8)]
    again = [{image.numpy().tobytes() for image, _ in part} for part in load("digits", 8)]
    assert parts == again
    assert not parts[0] & parts[1]


def test_synthetic_labels_are_random_but_the_same_in_every_process():
    train_set, test_set = load("synthetic", 16, synthetic_images=1000)
    again, _ = load("synthetic", 16, synthetic_images=1000)
    assert (len(train_set), len(test_set)) == (1000, 250)
    labels = torch.tensor([label for _, label in train_set])
    assert labels.tolist() == [label for _, label in again]
    assert torch.equal(train_set[7][0], again[7][0])
    assert train_set[7][0].shape == (3, 16, 16)
    assert torch.bincount(labels, minlength=10).min() > 60  # of about 100 each


def test_large_synthetic_images_take_little_memory():
    train_set, _ = load("synthetic", 64, synthetic_images=100_000)
    assert train_set[0][0].data_ptr() == train_set[64][0].data_ptr()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DataNotAvailable, match="expected one of digits, cifar10, synthetic"):
        load("mnist")


def orders(seed, epochs=3, world_size=2):
    """Return, for each epoch, what each rank of two visits of range(5)."""
    loaders = [train_loader(range(5), 1, rank, world_size, seed) for rank in range(world_size)]
    found = []
    for epoch in range(epochs):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        found.append([torch.cat(list(loader)).tolist() for loader in loaders])
    return found


def test_B31_the_order_changes_with_the_epoch_and_comes_back_with_the_seed():
    """https://github.com/pytorch/pytorch/issues/31771: the same order in every epoch."""
    first, second, third = orders(seed=0)
    assert first != second != third != first
    assert orders(seed=0) == [first, second, third]
    assert orders(seed=1) != [first, second, third]


def test_ranks_train_on_different_images_and_equally_many():
    for by_rank in orders(seed=0):
        assert [len(order) for order in by_rank] == [3, 3]
        visited = [image for order in by_rank for image in order]
        assert set(visited) == set(range(5))
        assert len(visited) == 6  # one comes twice: 5 images do not divide


@pytest.mark.parametrize("images", [3, 5, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_evaluation_sees_every_image_exactly_once(images, world_size):
    loaders = [evaluation_loader(range(images), 2, rank, world_size) for rank in range(world_size)]
    seen = [image for loader in loaders for batch in loader for image in batch.tolist()]
    assert sorted(seen) == list(range(images))


class TinyCifar:
    """CIFAR-10 of 2 images a file, in a folder, with the checksums that torchvision asks for."""

    def __init__(self, folder, monkeypatch):
        self.batches = folder / "cifar-10-batches-py"
        self.batches.mkdir(parents=True)
        cifar = datasets.CIFAR10
        data = {"data": torch.zeros(2, 3072, dtype=torch.uint8).numpy(), "labels": [3, 4]}
        trains = [[name, self.write(name, data)] for name, _ in cifar.train_list]
        tests = [["test_batch", self.write("test_batch", data)]]
        meta = self.write("batches.meta", {"label_names": list("abcdefghij")})
        monkeypatch.setattr(cifar, "train_list", trains)
        monkeypatch.setattr(cifar, "test_list", tests)
        monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": meta})

    def write(self, name, data):
        content = pickle.dumps(data)
        (self.batches / name).write_bytes(content)
        return hashlib.md5(content).hexdigest()


def test_cifar10_is_read_from_a_folder_on_disk(tmp_path, monkeypatch):
    TinyCifar(tmp_path, monkeypatch)
    train_set, test_set = load("cifar10", 48, tmp_path, local_rank=3)
    assert (len(train_set), len(test_set)) == (10, 2)
    image, label = test_set[1]
    assert image.shape == (3, 48, 48)
    assert label == 4


def test_cifar10_is_unpacked_from_an_archive_on_disk(tmp_path, monkeypatch):
    tiny = TinyCifar(tmp_path / "source", monkeypatch)
    archive = tmp_path / "data" / "cifar-10-python.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tiny.batches, arcname=tiny.batches.name)
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5)
    train_set, _ = load("cifar10", root=archive.parent)
    assert len(train_set) == 10
    names = sorted(path.name for path in archive.parent.iterdir())
    assert names == ["cifar-10-batches-py", "cifar-10-python.tar.gz"]


def test_a_damaged_folder_of_cifar10_is_named(tmp_path, monkeypatch):
    tiny = TinyCifar(tmp_path, monkeypatch)
    (tiny.batches / "data_batch_3").write_bytes(b"half")
    with pytest.raises(DataNotAvailable, match="rm -r") as caught:
        load("cifar10", root=tmp_path)
    assert str(tiny.batches) in str(caught.value)


def test_cifar10_without_data_and_network_says_what_to_do(tmp_path, monkeypatch):
    # A proxy at a port where nobody listens.
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(DataNotAvailable) as caught:
        load("cifar10", root=tmp_path / "data")
    lines = str(caught.value).splitlines()
    assert len(lines) <= 3
    assert str(tmp_path / "data" / "cifar-10-batches-py") in lines[0]
    assert "cifar-10-python.tar.gz" in lines[1]
    assert "--data digits" in lines[1]
