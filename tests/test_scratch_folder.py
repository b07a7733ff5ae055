import os
import signal
import subprocess
import sys

import pytest

from rpft.files import scratch_folder

HOLDING = "from pathlib import Path; from rpft.files import scratch_folder; import time, sys\n"
HOLDING += "with scratch_folder(Path(sys.argv[1]), '.some-') as f: print(f, flush=True); time.sleep(600)"


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def test_a_folder_is_there_for_as_long_as_it_is_needed(tmp_path):
    with scratch_folder(tmp_path, ".some-") as folder:
        (folder / "file").write_text("x")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_with_the_next_and_what_a_living_one_has_stays(holder, tmp_path):
    process, folder = holder
    (tmp_path / ".some-file").write_text("no folder")
    with scratch_folder(tmp_path, ".some-"):
        assert os.path.isdir(folder)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.path.isdir(folder)
    with scratch_folder(tmp_path, ".other-"):
        assert os.path.isdir(folder)
    with scratch_folder(tmp_path, ".some-") as own:
        assert not os.path.exists(folder)
        assert own.is_dir()
    assert (tmp_path / ".some-file").exists()


def test_a_link_is_left_alone(tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "else").mkdir()
    (tmp_path / "place" / ".some-link").symlink_to(tmp_path / "else")
    with scratch_folder(tmp_path / "place", ".some-"):
        pass
    assert (tmp_path / "else").is_dir()
    assert (tmp_path / "place" / ".some-link").is_symlink()
