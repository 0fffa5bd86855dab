from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.core.errors import ConfigError, StoreError
from axon_dist.core.files import as_place, snapshot
from axon_dist.data import TextFile, files, find_files, split_files, standard_library_files
from axon_dist.data.store import TokenCache

NAMES = st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=20)


def as_files(names):
    return [TextFile(name, Path(f"/somewhere/{i}.txt")) for i, name in enumerate(names)]


@pytest.mark.full
@given(NAMES, st.randoms(), st.floats(0.01, 0.99))
def test_the_side_of_a_file_depends_on_its_name_alone(names, random, fraction):
    sides = split_files(as_files(names), fraction)
    assert sorted(file.name for side in sides for file in side) == sorted(names)
    some = random.sample(names, len(names) // 2)
    for side, other in zip(sides, split_files(as_files(some), fraction), strict=True):
        assert {file.name for file in other} <= {file.name for file in side}


@pytest.mark.full
@given(NAMES, st.floats(0.01, 0.5))
def test_a_larger_fraction_only_adds_to_validation(names, fraction):
    _, small = split_files(as_files(names), fraction)
    _, large = split_files(as_files(names), fraction * 1.5)
    assert set(small) <= set(large)


def test_the_split_is_the_same_in_every_process_and_release():
    _, validation = split_files(as_files([f"{i}.txt" for i in range(30)]), 0.2)
    assert [int(file.path.stem) for file in validation] == [1, 2, 18, 20, 24, 27, 28]


@pytest.fixture
def folder(tmp_path):
    for name in ("a.txt", "b.md", "sub/a.txt", "sub/deep/c.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["*.txt"], ["a.txt"]),
        (["**/*.txt"], ["a.txt", "sub/a.txt", "sub/deep/c.txt"]),
        (["s*/*.txt"], ["sub/a.txt"]),
        (["sub/deep/c.txt"], ["c.txt"]),
        (["b.md", "a.txt"], ["a.txt", "b.md"]),
        (["*.txt", "**/*.txt"], ["a.txt", "sub/a.txt", "sub/deep/c.txt"]),
    ],
)
def test_files_are_named_from_the_folder_without_wildcards(folder, patterns, names):
    found = find_files([str(folder / pattern) for pattern in patterns])
    assert [file.name for file in found] == names
    assert all(file.path.is_file() for file in found)


def test_relative_patterns_look_from_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert [file.name for file in find_files(["**/*.txt"])] == [
        "a.txt",
        "sub/a.txt",
        "sub/deep/c.txt",
    ]
    assert [file.name for file in find_files(["a.txt"])] == ["a.txt"]


def test_a_file_whose_name_reads_as_a_glob_is_itself(folder):
    for name in ("a[1].txt", "a1.txt"):
        (folder / name).write_text(name)
    assert [file.name for file in find_files([str(folder / "a[1].txt")])] == ["a[1].txt"]
    (folder / "a[1].txt").unlink()
    assert [file.name for file in find_files([str(folder / "a[1].txt")])] == ["a1.txt"]


def test_files_of_one_name_are_split_by_their_folders():
    one_by_one = [TextFile("part.txt", Path(f"/texts/s{i}/deep/part.txt")) for i in range(120)]
    train, validation = split_files(one_by_one, 0.1)
    assert len(train) + len(validation) == 120
    assert 4 <= len(validation) <= 24
    moved = [
        TextFile("part.txt", Path("/other") / file.path.relative_to("/")) for file in one_by_one
    ]
    assert [one_by_one[moved.index(file)] for file in split_files(moved, 0.1)[1]] == [*validation]


def test_objects_of_one_name_are_split_by_their_addresses():
    address = as_place("gs://bucket/texts", "here")
    versions = [
        [
            TextFile("a", Path(f"/cache/{number}{version}/a"), address=address / f"s{number}/a")
            for number in range(40)
        ]
        for version in "xy"
    ]
    first, second = ([f.address for f in split_files(one, 0.2)[1]] for one in versions)
    assert 1 <= len(first) < 40
    assert first == second


def test_a_pattern_without_a_match_is_refused(folder):
    with pytest.raises(ConfigError, match=r"none\*' matches no file .*correct the path.*glob"):
        find_files([str(folder / "*.txt"), str(folder / "none*")])
    with pytest.raises(ConfigError, match=r"sub' matches no file .*a folder needs a glob"):
        find_files([str(folder / "sub")])


def test_the_standard_library_is_there_and_without_its_tests():
    found = standard_library_files()
    names = [file.name for file in found]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any("test" in Path(name).parts or "site-packages" in name for name in names)
    assert sum(file.path.stat().st_size for file in found) > 2e6


def test_a_python_without_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(files.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=rf"no Python sources in {tmp_path}.*data.files"):
        standard_library_files()


@pytest.fixture(params=["gs", "s3"])
def bucket(store, request):
    """Texts in two folders of a bucket."""
    for name in ("a.txt", "in/b.txt", "in/deep/c.txt", "in/deep/d.json", "in-other/e.txt"):
        store.objects[f"bucket/texts/{name}"] = len(store.objects) + 1, f"text of {name}".encode()
    return f"{request.param}://bucket/texts"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a.txt", ["a.txt"]),
        ("*.txt", ["a.txt"]),
        ("in/*", ["b.txt"]),
        ("in/**/*.txt", ["b.txt", "deep/c.txt"]),
        ("**/[cd].*", ["in/deep/c.txt", "in/deep/d.json"]),
    ],
)
def test_globs_in_a_bucket(bucket, pattern, found):
    files = find_files([f"{bucket}/{pattern}"])
    assert [file.name for file in files] == found
    assert all(file.read().startswith(b"text of ") for file in files)
    assert all(str(file.address).endswith(f"/{file.name}") for file in files)


def test_a_pattern_without_a_match_in_a_bucket_raises(bucket):
    with pytest.raises(ConfigError, match=r"data.files: '.*/x/\*' matches no object \(looked in "):
        find_files([f"{bucket}/x/*"])


def test_an_object_is_read_once_for_each_version(bucket, store):
    def bodies():
        return [one for one in store.requests if "a.txt" in one and "HEAD" not in one]

    first = find_files([f"{bucket}/a.txt"])[0]
    store.requests.clear()
    assert find_files([f"{bucket}/a.txt"])[0].path == first.path
    assert not [one for one in bodies() if "alt=media" in one or "GET /bucket" in one]
    store.objects["bucket/texts/a.txt"] = 77, b"another"
    assert find_files([f"{bucket}/a.txt"])[0].read() == b"another"
    assert first.read() == b"text of a.txt"


@pytest.mark.parametrize("size", [0, 1, 64, 65, 128, 200])
def test_an_object_of_several_blocks_comes_whole(bucket, store, monkeypatch, size):
    monkeypatch.setattr("axon_dist.core.files._BLOCK", 64)
    store.objects["bucket/texts/a.txt"] = 5, bytes(range(size))
    store.faults = 0.2
    assert find_files([f"{bucket}/a.txt"])[0].read() == bytes(range(size))


def test_an_object_that_is_replaced_while_it_is_read(bucket, store, monkeypatch):
    monkeypatch.setattr("axon_dist.core.files._BLOCK", 64)
    store.objects["bucket/texts/a.txt"] = 5, bytes(100)
    fault = type(store).fault

    def replaced(self):
        if "range" in self.requests[-1].lower() or len(self.requests) > 3:
            self.objects["bucket/texts/a.txt"] = 6, bytes(100)
        return fault(self)

    store.requests.clear()
    monkeypatch.setattr(type(store), "fault", replaced)
    with pytest.raises(StoreError, match=r"a.txt was replaced or removed meanwhile"):
        find_files([f"{bucket}/a.txt"])


@pytest.mark.parametrize("fetch", ["alone", "in its folder"])
def test_an_object_that_is_removed_after_it_was_listed_ends_the_copy(
    bucket, store, monkeypatch, fetch
):
    monkeypatch.setattr("axon_dist.core.files._BLOCK", 64)
    folder = as_place(bucket, "here")
    listed = store.objects.pop("bucket/texts/a.txt")
    monkeypatch.setattr(type(folder), "names", lambda self: ["a.txt"])
    fault = type(store).fault

    def fault_that_ends_the_test(self):
        # A reader that goes on for ever gets another error in the end.
        if len(self.requests) > 50:
            self.objects["bucket/texts/a.txt"] = listed
        return fault(self)

    store.requests.clear()
    monkeypatch.setattr(type(store), "fault", fault_that_ends_the_test)
    with pytest.raises(StoreError, match=r"texts/a.txt does not exist, or was removed while"):
        (folder / "a.txt").fetched() if fetch == "alone" else snapshot(folder, lambda name: True)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_of_several_links_to_a_file_the_first_name_counts(order, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "blob").write_text("text")
    for number in range(3):
        (tmp_path / "data" / f"part{number}.txt").symlink_to(tmp_path / "blob")
    found = [str(tmp_path / "data" / f"part{number}.txt") for number in order]
    monkeypatch.setattr("glob.glob", lambda pattern, recursive: found)
    assert [file.name for file in find_files([f"{tmp_path}/data/*.txt"])] == ["part0.txt"]


def test_tokens_of_a_file_that_was_replaced_are_not_stored_for_the_old_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("aaaa")
    file = TextFile("a.txt", path)
    cache = TokenCache([file])

    def scan(path, digest):
        digest(path.read_bytes())
        return [(0, 4, 1, 4)]

    def make(path, span):
        yield np.frombuffer(path.read_bytes(), np.uint8), None

    def replaced(path, span):
        other = path.with_name("other")
        other.write_text("bbbb")
        other.replace(path)
        return make(path, span)

    indexed = cache.index([file], scan, "text")
    with pytest.raises(ConfigError, match=r"a.txt changed while it was read") as refused:
        cache.tokens(indexed, ["bytes"], replaced)
    assert refused.value.code == "file-changed-while-read"
    assert not list(cache.path.glob("*.tokens"))


def test_an_unknown_home_in_the_folder_of_the_cache(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data.cache: got '~nobody-here/x', and there is no user"
    ):
        TokenCache([TextFile("a", tmp_path / "a")], "~nobody-here/x")


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_a_link_to_a_file_of_training_is_no_file_of_validation(link, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    getattr(tmp_path / "b.txt", link)(tmp_path / "a.txt")
    train, validation = (find_files([str(tmp_path / name)]) for name in ("a.txt", "b.txt"))
    with pytest.raises(ConfigError, match=r"1 files are in data.files and in data.val"):
        files.check_disjoint(train, validation)
