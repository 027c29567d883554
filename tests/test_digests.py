import pytest

from fedrecon._src.storage.digests import DamagedError, describe_files, file_digest, verify, verify_files

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # from FIPS 180-2


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"0" * 5000)
    return tmp_path


def test_the_digest_is_sha256(folder):
    assert file_digest(folder / "a") == ABC
    assert describe_files(folder, ["a"]) == {"a": {"bytes": 3, "sha256": ABC}}


def test_every_changed_byte_is_found(folder):
    files = describe_files(folder, ["a", "b"])
    assert verify_files(folder, files) == []
    for place in range(0, 5000, 499):
        content = bytearray(b"0" * 5000)
        content[place] ^= 1
        (folder / "b").write_bytes(content)
        with pytest.raises(DamagedError, match=r"b is damaged: its content"):
            verify_files(folder, files)


def test_a_file_of_another_length_or_none_is_found_without_reading_it(folder):
    files = describe_files(folder, ["b"])
    (folder / "b").write_bytes(b"0" * 4999)
    with pytest.raises(DamagedError, match=r"it has 4,999 bytes, but 5,000 were written"):
        verify_files(folder, files, most_bytes=10)
    (folder / "b").unlink()
    with pytest.raises(DamagedError, match="missing"):
        verify_files(folder, files)


def test_large_files_are_named_where_only_their_size_was_checked(folder):
    files = describe_files(folder, ["a", "b"])
    assert verify_files(folder, files, most_bytes=100) == ["b"]
    assert verify(folder / "a", files["a"], most_bytes=3)


@pytest.mark.parametrize("files", [None, [], {"../a": {}}, {"a": None}, {"a": {"bytes": 3}}, {"a": {"bytes": "x"}}])
def test_a_manifest_that_says_something_else_is_damaged(folder, files):
    with pytest.raises(DamagedError):
        verify_files(folder, files)
