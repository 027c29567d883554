import pytest

from fedrecon._src.storage.atomic import atomic_folder


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "folder"
    with atomic_folder(path) as temporary:
        (temporary / "a").write_text("1")
        assert not path.exists()
    assert (path / "a").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_could_not_be_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "folder"
    with atomic_folder(path) as temporary:
        (temporary / "a").write_text("1")
    with pytest.raises(RuntimeError), atomic_folder(path, replace=True) as temporary:  # noqa: PT012
        (temporary / "a").write_text("2")
        raise RuntimeError
    assert (path / "a").read_text() == "1"
    with atomic_folder(path, replace=True) as temporary:
        assert list(temporary.iterdir()) == []
        (temporary / "b").write_text("3")
    assert [p.name for p in path.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_is_not_replaced_unless_asked(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileExistsError, match="exists already"), atomic_folder(tmp_path / "folder"):
        pass
