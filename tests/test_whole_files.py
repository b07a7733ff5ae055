"""What the safety of a run rests on: whole files, and links that lead nobody astray."""

import pytest

from rpft import files


@pytest.fixture
def outside(tmp_path):
    """A file that no run may touch, and a folder with another."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("mine")
    return folder


@pytest.mark.parametrize("name", ["state.json", "state.json.partial"])
def test_a_file_is_written_in_the_place_of_a_link_and_not_to_where_it_leads(name, outside, tmp_path):
    (tmp_path / name).symlink_to(outside / "precious")
    files.write_whole(tmp_path / "state.json", "new")
    assert (tmp_path / "state.json").read_text() == "new"
    assert not (tmp_path / "state.json").is_symlink()
    assert (outside / "precious").read_text() == "mine"
    assert not (tmp_path / "state.json.partial").exists()


def test_what_a_crash_has_left_of_a_file_is_in_no_ones_way(tmp_path):
    (tmp_path / "state.json.partial").write_text("torn, and longer than what comes")
    files.write_whole(tmp_path / "state.json", "new")
    assert (tmp_path / "state.json").read_text() == "new"


def test_a_folder_a_file_and_a_link_are_removed_and_what_the_link_leads_to_is_not(outside, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").symlink_to(outside)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(outside)
    for name in ("folder", "file", "link", "nothing"):
        files.remove_tree(tmp_path / name)
    assert list(tmp_path.iterdir()) == [outside]
    assert (outside / "precious").read_text() == "mine"
