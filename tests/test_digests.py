import pytest

from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.manifest import (
    DamagedError,
    Format,
    file_digest,
    read_folder_manifest,
    write_folder_manifest,
    write_manifest,
)

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # from FIPS 180-2
FORMAT = Format("test", 3)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"0" * 5000)
    return tmp_path


@pytest.fixture
def manifest(folder):
    write_folder_manifest(folder / "manifest.json", FORMAT, {"seed": 1})
    return folder / "manifest.json"


def test_the_digest_is_sha256(folder):
    assert file_digest(folder / "a") == ABC
    write_folder_manifest(folder / "manifest.json", FORMAT, {})
    assert read_folder_manifest(folder / "manifest.json", FORMAT)["files"]["a"] == {"bytes": 3, "sha256": ABC}


def test_a_manifest_says_what_was_written(folder, manifest):
    assert (
        read_folder_manifest(manifest, FORMAT, "a", "b").items() >= {"seed": 1, "format": "test", "version": 3}.items()
    )
    with pytest.raises(DamagedError, match="c"):
        read_folder_manifest(manifest, FORMAT, "c")


@pytest.mark.parametrize("other", [Format("test", 2), Format("test", 4), Format("another", 3)])
def test_another_format_or_version_is_refused(manifest, other):
    with pytest.raises(StorageError, match="'test' 3"):
        read_folder_manifest(manifest, other)


def test_every_changed_byte_is_found(folder, manifest):
    for path in (folder / "b", manifest):
        whole = path.read_bytes()
        for k in range(0, len(whole), 31):
            path.write_bytes(whole[:k] + bytes([whole[k] ^ 1]) + whole[k + 1 :])
            with pytest.raises(StorageError, match=path.name):
                read_folder_manifest(manifest, FORMAT)
        path.write_bytes(whole)
    assert read_folder_manifest(manifest, FORMAT)["seed"] == 1


def test_a_file_of_another_length_or_none_is_found_without_reading_it(folder, manifest):
    (folder / "b").write_bytes(b"0" * 4999)
    with pytest.raises(DamagedError, match=r"it has 4,999 bytes, but 5,000 were written"):
        read_folder_manifest(manifest, FORMAT, max_hashed=10)
    (folder / "b").unlink()
    with pytest.raises(DamagedError, match="missing"):
        read_folder_manifest(manifest, FORMAT)


def test_of_large_files_only_the_size_is_checked(folder, manifest):
    (folder / "b").write_bytes(b"1" * 5000)
    read_folder_manifest(manifest, FORMAT, max_hashed=100)
    (folder / "a").write_bytes(b"xyz")
    with pytest.raises(DamagedError, match="a is damaged"):
        read_folder_manifest(manifest, FORMAT, max_hashed=100)


@pytest.mark.parametrize("files", [None, [], {"../a": {}}, {"a": None}, {"a": {"bytes": 3}}, {"a": {"bytes": "x"}}])
def test_a_manifest_that_says_something_else_is_damaged(folder, files):
    write_manifest(folder / "manifest.json", FORMAT, {"files": files})
    with pytest.raises(DamagedError):
        read_folder_manifest(folder / "manifest.json", FORMAT)
