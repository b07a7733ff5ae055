"""A file without a name: what is written is read, past the cache or not; it leaves nothing, shares nothing."""

import errno
import fcntl
import gc
import os
import random

import pytest
import torch

from rpft import files
from rpft.model import scratch_file
from rpft.model.pages import zeroed_pages
from rpft.model.scratch_file import BLOCK_BYTES, ScratchFile, lies_in_ram

SIZE = 5 * BLOCK_BYTES


def random_bytes(count, seed):
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_any_run_of_bytes_is_read_as_it_was_written_and_the_rest_stays(direct, tmp_path):
    file = ScratchFile(tmp_path, SIZE - 100, direct)
    assert file.num_bytes == SIZE
    expected = torch.zeros(SIZE, dtype=torch.uint8)
    rng = random.Random(direct)
    for turn in range(60):
        start, stop = sorted(rng.sample(range(SIZE + 1), 2))
        if turn % 3 == 0:
            start, stop = start // BLOCK_BYTES * BLOCK_BYTES, -(-stop // BLOCK_BYTES) * BLOCK_BYTES
            blocks = zeroed_pages(stop - start).copy_(random_bytes(stop - start, turn))
            file.write_blocks(start, blocks)
            expected[start:stop] = blocks
        elif turn % 3 == 1:
            data = random_bytes(stop - start, turn)
            file.write(start, data)
            expected[start:stop] = data
        assert torch.equal(file.read(start, stop), expected[start:stop])
    target = zeroed_pages(SIZE)
    file.read_blocks(0, target)
    assert torch.equal(target, expected)


def test_it_has_no_name_and_two_share_nothing(tmp_path):
    first, second = ScratchFile(tmp_path, SIZE), ScratchFile(tmp_path, SIZE)
    assert list(tmp_path.iterdir()) == []
    first.write(10, torch.full((100,), 7, dtype=torch.uint8))
    assert not second.read(0, SIZE).any()


def test_its_bytes_are_reserved_when_it_is_made_and_free_when_it_is_closed(tmp_path):
    file = ScratchFile(tmp_path, 1 << 20)
    status = os.fstat(file._descriptor)
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.read(0, 1)


def test_a_file_system_that_knows_no_direct_reads_goes_through_the_cache_and_forgets(tmp_path, monkeypatch):
    """As tmpfs and some network and overlay file systems answer."""
    whole = os.preadv
    forgotten = []

    def refuse(descriptor, buffers, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: forgotten.append(arguments[1:3]))
    file = ScratchFile(tmp_path, SIZE)
    assert not file.direct
    data = random_bytes(SIZE, 1)
    file.write(0, data)
    assert torch.equal(file.read(0, SIZE), data)
    assert forgotten == [(0, SIZE), (0, SIZE)]


def test_other_errors_of_the_first_read_are_not_taken_for_a_refusal(tmp_path, monkeypatch):
    def fail(descriptor, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        ScratchFile(tmp_path, SIZE)


def test_reads_and_writes_that_come_in_parts_are_gone_on_with(tmp_path, monkeypatch):
    read, write = os.preadv, os.pwritev
    file = ScratchFile(tmp_path, SIZE, direct=False)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:1000]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: write(fd, [buffers[0][:700]], at))
    data = random_bytes(SIZE, 2)
    file.write(0, data)
    assert torch.equal(file.read(0, SIZE), data)


def test_a_file_that_was_cut_short_is_an_error_of_the_disk(tmp_path):
    file = ScratchFile(tmp_path, SIZE, direct=False)
    os.ftruncate(file._descriptor, BLOCK_BYTES)
    with pytest.raises(OSError, match="the file ends before") as caught:
        file.read(0, SIZE)
    assert caught.value.errno == errno.EIO


def test_a_disk_without_room_leaves_no_descriptor_open(tmp_path, monkeypatch):
    def full(descriptor, num_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "reserve", full)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        ScratchFile(tmp_path, SIZE)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("ramfs", True), ("ext4", False), (None, False)])
def test_a_folder_that_lies_in_ram_is_told_by_its_mount(kind, expected, tmp_path, monkeypatch):
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    if kind is not None:
        number = f"{os.major(device)}:{os.minor(device)}"
        mounts.write_text(
            f"1 0 9999:1 / /else rw - tmpfs none rw\n2 1 {number} / /x rw shared:1 m:2 - {kind} none rw\n"
        )
    monkeypatch.setattr(scratch_file, "_MOUNTS", mounts)
    assert lies_in_ram(tmp_path) is expected
