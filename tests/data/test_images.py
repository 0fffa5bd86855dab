import itertools

import numpy as np
import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.data import ImageLoader, ImageSource, SyntheticImages, load_images

MADE = SyntheticImages(num_images=50, validation_fraction=0.2, image_size=8)


def write(path, count, first=0, **changes):
    """Images whose pixels all equal the image's number; labels are 0, 1, 2 in turn."""
    numbers = np.arange(first, first + count)
    images = np.broadcast_to(numbers[:, None, None, None].astype(np.uint8), (count, 4, 4, 3))
    np.savez(path, **{"images": images, "labels": numbers % 3, **changes})
    return str(path)


def source(*files, **fields):
    return ImageSource(files=files, image_size=4, **fields)


def everything(images):
    return images.take(np.arange(len(images)))


def test_every_image_of_the_files_is_on_one_side_with_its_label(tmp_path):
    write(tmp_path / "a.npz", 30)
    write(tmp_path / "b.npz", 20, first=30)
    images = load_images(source(str(tmp_path / "*.npz"), validation_fraction=0.2), 3, 3)
    sides = [everything(side) for side in (images.train, images.validation)]
    assert [len(labels) for _, labels in sides] == [40, 10]
    numbers = np.concatenate([x[:, 0, 0, 0] for x, _ in sides])
    np.testing.assert_array_equal(np.sort(numbers), np.arange(50))
    np.testing.assert_array_equal(np.concatenate([y for _, y in sides]), numbers % 3)
    assert len(set(sides[1][1].tolist())) == 3
    assert images.description.endswith("40 for training, 10 for validation, of 4 x 4 x 3")


def test_validation_files_are_a_side_of_their_own(tmp_path):
    files = write(tmp_path / "a.npz", 6), write(tmp_path / "b.npz", 3, first=6)
    images = load_images(source(files[0], validation_files=files[1:]), 3, 3)
    assert (len(images.train), len(images.validation)) == (6, 3)


def test_made_images_depend_on_their_number_alone():
    first, again = (load_images(MADE, 3, 10) for _ in range(2))
    np.testing.assert_array_equal(everything(first.train)[0], everything(again.train)[0])
    x, y = first.train.take(np.array([7, 3]))
    np.testing.assert_array_equal(x[1], first.train.take(np.array([3]))[0][0])
    assert (x.dtype, x.shape, y.shape) == (np.uint8, (2, 8, 8, 3), (2,))
    assert len(first.train) == 40
    assert len(first.validation) == 10


def test_made_images_can_be_learned():
    """The nearest class mean of the training images classifies all other images correctly."""
    made = SyntheticImages(num_images=400, validation_fraction=0.25, image_size=16)
    images = load_images(made, 3, 5)
    x, y = (np.asarray(part, np.float64) for part in everything(images.train))
    means = np.stack([x[y == label].mean(0) for label in range(5)])
    held, labels = everything(images.validation)
    distance = ((held[:, None] - means[None]) ** 2).sum((2, 3, 4))
    assert set(labels.tolist()) == set(range(5))
    assert (distance.argmin(1) == labels).all()


def loader(**fields):
    return ImageLoader(load_images(MADE, 3, 10), **{"global_batch": 4, **fields})


def test_batches_are_what_the_loss_takes():
    batch = next(loader())
    assert {name: (x.dtype, x.shape) for name, x in batch.items()} == {
        "x": (np.uint8, (4, 8, 8, 3)),
        "y": (np.int32, (4,)),
    }


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_resumed_run_goes_on_with_the_same_batches(num_processes):
    whole = [batch["x"] for batch in itertools.islice(loader(), 6)]
    one = loader()
    [next(one) for _ in range(3)]
    parts = [loader(process=p, num_processes=num_processes) for p in range(num_processes)]
    for part in parts:
        part.restore(one.state())
    for number in range(3, 6):
        rows = np.concatenate([next(part)["x"] for part in parts])
        np.testing.assert_array_equal(rows, whole[number])


def test_an_epoch_holds_every_image_once():
    one = loader(global_batch=8)
    labels = np.concatenate([next(one)["y"] for _ in range(5)])
    np.testing.assert_array_equal(np.sort(labels), np.sort(everything(one.samples.images.train)[1]))


def test_validation_is_the_same_every_time():
    first, again = (list(loader(seed=seed).validation_batches(2)) for seed in (0, 1))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one["x"], other["x"])
    assert len(first) == 2


def test_a_state_of_other_images_is_refused():
    other = ImageLoader(load_images(SyntheticImages(num_images=60, image_size=8), 3, 10),
                        global_batch=4)  # fmt: skip
    with pytest.raises(ConfigError, match=r"num_samples=54.*same data, height, width and seed"):
        loader().restore(other.state())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((6, 4, 4, 3))}, r"float64 \(6, 4, 4, 3\), which must be uint8"),
        ({"images": np.zeros((6, 5, 5, 3), np.uint8)}, r"\(N, 4, 4, 3\): .*data.image_size"),
        ({"labels": np.zeros(5, int)}, r"labels of int64 \(5,\), which must be integers \(6,\)"),
        ({"labels": np.zeros(6)}, r"labels of float64 \(6,\), which must be integers"),
        ({"labels": np.arange(6)}, r"model.num_classes: got 3, but .* has the label 3"),
        ({"labels": np.array([None] * 6)}, r"is not an .npz file with the arrays images and"),
    ],
)
def test_files_that_are_not_such_images(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_images(source(write(tmp_path / "a.npz", 6, **changes)), 3, 3)


def test_a_file_that_is_no_npz(tmp_path):
    (tmp_path / "a.npz").write_text("text")
    np.save(tmp_path / "b.npy", np.zeros(3))
    np.savez(tmp_path / "c.npz", pictures=np.zeros(3))
    for name in ("a.npz", "b.npy", "c.npz"):
        with pytest.raises(ConfigError, match=r"write it with np.savez\(path, images="):
            load_images(source(str(tmp_path / name)), 3, 3)


def test_a_file_on_both_sides(tmp_path):
    name = write(tmp_path / "a.npz", 6)
    with pytest.raises(ConfigError, match=r"1 files are in data.files and in data.val"):
        load_images(source(name, validation_files=(name,)), 3, 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (ImageSource(), r"data.files names no file.*data.kind=synthetic_images"),
        (source("a", validation_fraction=0.0), r"validation_fraction=0.0 must be between 0 and 1"),
        (
            source("a", validation_files=("b",), validation_fraction=0.2),
            r"validation_fraction=0.2 and data.validation_files=\('b',\) both define",
        ),
        (ImageSource(files=("a",), image_size=0), r"image_size=0 must be at least 1"),
        (SyntheticImages(num_images=1), r"num_images=1 must be at least 2"),
        (SyntheticImages(num_images=4, validation_fraction=0.1), r"of 4 images leaves none for v"),
        (SyntheticImages(num_images=4, validation_fraction=0.9), r"of 4 images leaves none for t"),
        (source("/none/*.npz"), r"data.files: '/none/\*.npz' matches no file"),
    ],
)
def test_settings_that_cannot_be(bad, message):
    with pytest.raises(ConfigError, match=message):
        load_images(bad, 3, 3)
