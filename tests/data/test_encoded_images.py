"""Images from folders and records: contents of batches, resuming, and errors."""

import io
import itertools
import multiprocessing
import os
import pathlib
import signal
import types

import numpy as np
import pytest
from PIL import Image, ImageOps

from axon_dist.core.errors import ConfigError
from axon_dist.data import ImageFolder, ImageLoader, ImageRecords, load_images
from axon_dist.data.encoded_images import decode

SIZE = 8


def encoded(number, size=(SIZE, SIZE), form="PNG", mode="RGB"):
    """Returns an image whose pixels all equal its number."""
    fill = number if mode in ("L", "F", "I") else (number,) * len(mode)
    file = io.BytesIO()
    Image.new(mode, size, fill).save(file, form)
    return file.getvalue()


def folders(root, per_class=6, classes=("ant", "bee", "cat")):
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            (root / name / f"{i}.png").write_bytes(encoded(10 * label + i, (9 + i, 7 + i)))
    return str(root)


def rows(count=12):
    return [{"image": {"bytes": encoded(i), "path": None}, "label": i % 3} for i in range(count)]


def parquet(folder, table=None):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "train-0.parquet"
    parquet.write_table(arrow.Table.from_pylist(table or rows()), path, row_group_size=5)
    return str(path)


def arrow(folder, table=None):
    arrow = pytest.importorskip("pyarrow")
    path = folder / "data-00000-of-00001.arrow"
    whole = arrow.Table.from_pylist(table or rows())
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=5)
    return str(path)


def message(*fields):
    """Encodes a protobuf of (number, bytes)."""
    return b"".join(
        bytes([8 * number + 2, len(x) & 127 | 128, len(x) >> 7]) + x for number, x in fields
    )


def array_record(folder, table=None):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = folder / "train.array_record-00000-of-00001"
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for row in table or rows():
        image = message((1, b"image"), (2, message((1, message((1, row["image"]["bytes"]))))))
        label = message((1, b"label"), (2, message((3, bytes([8, row["label"]])))))
        writer.write(message((1, message((1, image), (1, label)))))
    writer.close()
    return str(path)


def records(path, **fields):
    return ImageRecords(files=(path,), image_size=SIZE, **fields)


def folder(*roots, **fields):
    return ImageFolder(files=roots, image_size=SIZE, **fields)


def pixels(images):
    """Returns the number of each image, with its label."""
    x, y = images.take(np.arange(len(images)))
    assert (x.dtype, x.shape[1:]) == (np.uint8, (SIZE, SIZE, 3))
    assert (x == x[:, :1, :1, :1]).all()
    return sorted(zip(x[:, 0, 0, 0].tolist(), y.tolist(), strict=True))


def test_every_image_of_a_folder_is_on_one_side_with_its_class(tmp_path):
    images = load_images(folder(folders(tmp_path), validation_fraction=0.25), 3, 3)
    sides = pixels(images.train), pixels(images.validation)
    assert [len(side) for side in sides] == [14, 4]
    assert sorted(sides[0] + sides[1]) == [(10 * c + i, c) for c in range(3) for i in range(6)]


def test_a_hidden_folder_is_no_class_and_an_empty_one_is_refused(tmp_path):
    root = folders(tmp_path)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    labels = [label for _, label in pixels(load_images(folder(root), 3, 3).train)]
    assert sorted(set(labels)) == [0, 1, 2]
    (tmp_path / "aardvark").mkdir()
    with pytest.raises(ConfigError, match=r"aardvark has no images, so it is no class") as refused:
        load_images(folder(root), 4, 3)
    assert refused.value.code == "image-class-without-images"


def test_classes_of_the_validation_have_the_numbers_of_training(tmp_path):
    root = folders(tmp_path / "train")
    held = folders(tmp_path / "val", 2, ["cat"])
    images = load_images(folder(root, validation_files=(held,)), 3, 3)
    assert pixels(images.validation) == [(0, 2), (1, 2)]
    dogs = folders(tmp_path / "other", 2, ["dog"])
    with pytest.raises(ConfigError, match=r"other/dog is not a class of data.files"):
        load_images(folder(root, validation_files=(dogs,)), 3, 3)
    with pytest.raises(ConfigError, match=r"1 files are in data.files and in data.val"):
        load_images(folder(root, validation_files=(root,)), 3, 3)


@pytest.mark.parametrize("write", [parquet, arrow, array_record])
def test_every_image_of_records_is_there_with_its_label(tmp_path, write):
    images = load_images(records(write(tmp_path), validation_fraction=0.25), 3, 3)
    assert sorted(pixels(images.train) + pixels(images.validation)) == [
        (i, i % 3) for i in range(12)
    ]
    again = load_images(records(write(tmp_path), validation_fraction=0.25), 3, 3)
    assert again.train.checksum() == images.train.checksum()


def test_an_image_is_cut_to_its_middle_and_resized():
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200
    file = io.BytesIO()
    Image.fromarray(wide).save(file, "PNG")
    cut = decode("it", file.getvalue(), (5, 5, 3)).astype(int)
    assert (abs(cut - 200) < 20).all()
    grey = decode("it", encoded(7, mode="L"), (4, 4, 3))
    assert (grey == 7).all()
    assert decode("it", encoded(7), (4, 4, 1)).shape == (4, 4, 1)


@pytest.mark.sample("0")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_where_it_stood_on_any_number_of_processes(tmp_path, num_workers):
    images = load_images(folder(folders(tmp_path)), 3, 3)
    whole = [batch["x"] for batch in itertools.islice(ImageLoader(images, global_batch=4), 5)]
    one = ImageLoader(images, global_batch=4, num_workers=num_workers)
    for number in range(3):
        np.testing.assert_array_equal(next(one)["x"], whole[number])
    parts = [ImageLoader(images, global_batch=4, process=p, num_processes=2) for p in range(2)]
    for part in parts:
        part.restore(one.state())
    for number in range(3, 5):
        rows = np.concatenate([next(part)["x"] for part in parts])
        np.testing.assert_array_equal(rows, whole[number])


@pytest.mark.full
def test_workers_begin_anew_and_say_what_is_wrong(tmp_path):
    images = load_images(folder(folders(tmp_path)), 3, 3)
    one = ImageLoader(images, global_batch=4, num_workers=2)
    first, second = next(one)["x"], next(one)["x"]
    one.restore({**one.state(), "samples_seen": 4})
    np.testing.assert_array_equal(next(one)["x"], second)
    one.restore({**one.state(), "samples_seen": 0})
    np.testing.assert_array_equal(next(one)["x"], first)
    (tmp_path / "ant" / "0.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"ant/0.png is not an image that can be decoded"):
        [next(one) for _ in range(12)]
    one = ImageLoader(images, global_batch=4, num_workers=1, num_ahead=0)
    next(one)
    multiprocessing.active_children()[0].kill()
    with pytest.raises(ConfigError, match=r"ended with exit code -9.*lower data.num_workers"):
        [next(one) for _ in range(3)]


WORKS = """
import multiprocessing, sys
from axon_dist.data import ImageFolder, ImageLoader, load_images
if __name__ == "__main__":
    images = load_images(ImageFolder(files=(sys.argv[1],), image_size=8), 3, 3)
    loader = ImageLoader(images, global_batch=4, num_workers=1)
    next(loader)
    print(multiprocessing.active_children()[0].pid, flush=True)
    input()
"""


@pytest.mark.full
def test_a_worker_outlives_a_signal_and_not_its_process(tmp_path):
    import subprocess
    import sys
    import time

    (tmp_path / "works.py").write_text(WORKS)
    command = [sys.executable, str(tmp_path / "works.py"), folders(tmp_path / "images")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        worker = int(process.stdout.readline())
        os.kill(worker, signal.SIGTERM)
        time.sleep(0.5)
        os.kill(worker, 0)
        process.kill()
    for _ in range(50):
        time.sleep(0.1)
        if not os.path.exists(f"/proc/{worker}"):
            return
    raise AssertionError("the worker is still there")


JPEG = encoded(3, (64, 64), "JPEG")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (JPEG[: len(JPEG) // 2], "runcated"),
        (b"", "cannot identify"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify"),
        (b"P5 16384 8192 255\n", "it has 134217728 pixels, more than 67108864"),
        (b"P5 99999 99999 255\n", "exceeds limit"),
        (encoded(3, form="TIFF", mode="F"), "mode is F, which is neither 8 nor 16 bits"),
    ],
)
@pytest.mark.filterwarnings("ignore:Image size")
def test_an_image_that_lies(data, message):
    with pytest.raises(
        ConfigError, match=rf"^it is not an image that can be decoded: .*{message}.*; write"
    ):
        decode("it", data, (8, 8, 3))


def test_folders_that_are_refused(tmp_path):
    def refused(message, **fields):
        with pytest.raises(ConfigError, match=message):
            load_images(folder(str(tmp_path), **fields), 3, 3)

    refused("has no folders with images; name a folder that has one subfolder per class")
    (tmp_path / "ant").mkdir()
    (tmp_path / "ant" / "0.png").write_bytes(encoded(0))
    os.mkfifo(tmp_path / "ant" / "1.png")
    refused(r"ant/1.png is a pipe and must be a file; remove it")
    (tmp_path / "ant" / "1.png").unlink()
    (tmp_path / "ant" / "2.png").symlink_to("nowhere")
    refused(r"ant/2.png is a dangling link and must be a file; remove it")
    (tmp_path / "ant" / "2.png").unlink()
    (tmp_path / "ant" / "round").symlink_to(tmp_path)
    refused(r"ant/round is a link to a folder, which may form a cycle")
    with pytest.raises(ConfigError, match=r"matches no folder but a file \(looked from"):
        load_images(folder(str(tmp_path / "ant" / "0.png")), 3, 3)
    with pytest.raises(ConfigError, match=r"got 2, but .* has the label 2"):
        load_images(folder(folders(tmp_path / "many")), 3, 2)
    with pytest.raises(
        ConfigError, match=r"model.channels: got 2, but encoded images have 1, 3 or 4"
    ):
        load_images(folder(str(tmp_path / "many")), 2, 3)


def changed(**fields):
    return [*rows(2), {**rows(1)[0], **fields}]


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (changed(image={"bytes": None, "path": "a.png"}), {}, "has no bytes under 'image'"),
        (changed(label=None), {}, "has None under 'label', which must be a whole number"),
        (changed(label=7), {}, "got 3, but .* has the label 7"),
        (rows(), {"image": "img"}, "has no column 'img'.*Did you mean 'image'"),
    ],
)
def test_records_that_are_refused(tmp_path, table, options, message):
    with pytest.raises(ConfigError, match=message):
        load_images(records(parquet(tmp_path, table), **options), 3, 3)


@pytest.mark.parametrize("write", [parquet, arrow, array_record])
def test_files_of_records_that_are_damaged(tmp_path, write):
    path = write(tmp_path)
    whole = pathlib.Path(path).read_bytes()
    for part in (whole[:60], whole[: len(whole) // 2], b"\xff" * 300, b""):
        with open(path, "wb") as file:
            file.write(part)
        with pytest.raises(ConfigError, match=r"write it again|save the data set again|no record"):
            load_images(records(path), 3, 3)
    with pytest.raises(
        ConfigError, match=r"must all be files of one kind, one of .parquet, .arrow, .array_record"
    ):
        load_images(records(__file__), 3, 3)


def saved(monkeypatch, path, length=12):
    """Replaces `datasets` by a module with one dataset in one file."""
    found = types.SimpleNamespace(cache_files=[{"filename": path}])
    asked = []

    class Found(types.SimpleNamespace):
        def __len__(self):
            return length

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return Found(**vars(found))

    module = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(__import__("sys").modules, "datasets", module)
    return asked


def test_a_data_set_of_the_hub(monkeypatch, tmp_path):
    from axon_dist.data import DatasetsSource

    texts = [{"text": "word " * (1 + i)} for i in range(12)]
    path = arrow(tmp_path, texts)
    asked = saved(monkeypatch, path)
    found = DatasetsSource(files=("org/name:sub@train",), validation_fraction=0.25).open(16)
    assert asked == [("org/name", "sub", "train")]
    assert "9 records for training, 3 for validation" in found.description
    saved(monkeypatch, path, length=5)
    with pytest.raises(ConfigError, match=r"has 5 rows, but its files have 12.*save_to_disk"):
        DatasetsSource(files=("org/name",)).open(16)


def test_texts_of_array_records(tmp_path):
    from axon_dist.data import ArrayRecordSource, JsonlSource

    module = pytest.importorskip("array_record.python.array_record_module")
    texts = [f"text number {i}" for i in range(20)]
    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for i, text in enumerate(texts):
        body = message((1, b"text"), (2, message((1, message((1, text.encode()))))))
        example = message((1, message((1, body))))
        writer.write(example if i % 2 else f'{{"text": "{text}"}}'.encode())
    writer.close()
    lines = "\n".join(f'{{"text": "{text}"}}' for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    one = ArrayRecordSource(files=(str(tmp_path / "a.array_record"),)).open(16)
    other = JsonlSource(files=(str(tmp_path / "a.jsonl"),)).open(16)
    numbers = np.arange(one.identity["num_samples"])
    for name, array in other.train(numbers).items():
        np.testing.assert_array_equal(one.train(numbers)[name], array)


def written(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(32, 32), (48, 32), (300, 200)])
def test_an_image_is_upright_as_a_viewer_shows_it(orientation, size):
    """The same for a JPEG that is decoded at a reduced size."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[: size[1] // 4] = 255
    exif = Image.Exif()
    exif[274] = orientation
    image = Image.fromarray(pixels)
    data = written(image, "JPEG", quality=95, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    wanted = np.asarray(ImageOps.fit(upright, (16, 16)), np.float32)
    found = decode("x", data, (16, 16, 3)).astype(np.float32)
    assert np.abs(found - wanted).mean() < 3
    assert found.shape == (16, 16, 3)


def test_transparent_pixels_become_white():
    clear = Image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 0))
    half = Image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 128))
    for channels in (1, 3):
        assert (decode("x", written(clear), (SIZE, SIZE, channels)) == 255).all()
        assert (decode("x", written(half), (SIZE, SIZE, channels)) == 127).all()
    assert (decode("x", written(clear), (SIZE, SIZE, 4)) == 0).all()
    grey = Image.new("LA", (SIZE, SIZE), (0, 0))
    assert (decode("x", written(grey), (SIZE, SIZE, 3)) == 255).all()


def test_colors_of_a_palette_may_be_transparent():
    image = Image.new("P", (SIZE, SIZE), 1)
    image.putpalette([9, 8, 7, 90, 80, 70])
    assert (decode("x", written(image), (SIZE, SIZE, 3)) == [90, 80, 70]).all()
    assert (decode("x", written(image, transparency=1), (SIZE, SIZE, 3)) == 255).all()


@pytest.mark.parametrize("most", [1023, 4095, 65535])
@pytest.mark.parametrize("is_text", [False, True])
def test_a_pgm_of_more_than_8_bits_is_read_by_its_high_byte(most, is_text):
    values = np.full((SIZE, SIZE), most // 2, ">u2")
    values[:, : SIZE // 2] = most
    body = " ".join(map(str, values.ravel())).encode() if is_text else values.tobytes()
    data = f"{'P2' if is_text else 'P5'} {SIZE} {SIZE} {most}\n".encode() + body
    found = decode("it", data, (SIZE, SIZE, 1))[..., 0]
    np.testing.assert_array_equal(found, np.where(values == most, 255, 127))


def test_pixels_of_32_bits_are_refused_with_a_remedy():
    with pytest.raises(ConfigError, match=r"mode is I, .*; write it again as a PNG of 8 or"):
        decode("it", encoded(3, form="TIFF", mode="I"), (8, 8, 3))


def test_grey_of_16_bits_is_read_by_its_high_byte():
    pixels = np.full((SIZE, SIZE), 0x80FF, np.uint16)
    assert (decode("x", written(Image.fromarray(pixels)), (SIZE, SIZE, 1)) == 0x80).all()
