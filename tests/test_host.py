"""What a process may take of its machine is found where the system writes it."""

from types import SimpleNamespace

import pytest

from rpft.host import memory_left_by_groups, others_cores

GIB = 1 << 30


def group(folder, limit, used, cached, names=("memory.max", "memory.current"), prefix=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    stat = f"anon 5\ninactive_file 1\nactive_file 2\n{prefix}inactive_file {cached}\n{prefix}active_file 0\n"
    (folder / "memory.stat").write_text(stat)


FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def of_version_2(root):
    group(root / "user.slice" / "run.scope", 8 * GIB, 5 * GIB, 2 * GIB)
    group(root / "user.slice", "max", 50 * GIB, 0)
    return "0::/user.slice/run.scope"


def of_a_group_above(root):
    group(root / "user.slice" / "run.scope", "max", GIB, 0)
    group(root / "user.slice", 6 * GIB, GIB, 0)
    return "0::/user.slice/run.scope"


def of_a_container(root):
    group(root, 8 * GIB, 3 * GIB, 0)
    return "0::/"


def of_version_1(root):
    group(root / "memory" / "job", 8 * GIB, 5 * GIB, 2 * GIB, FIRST, "total_")
    return "9:name=systemd:/elsewhere\n4:cpu,memory:/job\n0::/"


def of_a_container_that_sees_the_hosts_path(root):
    group(root / "memory", 8 * GIB, 3 * GIB, 0, FIRST, "total_")
    return "4:memory:/docker/0123abc"


GROUPS = (of_version_2, of_a_group_above, of_a_container, of_version_1, of_a_container_that_sees_the_hosts_path)


@pytest.mark.parametrize("make", GROUPS)
def test_the_limit_of_a_control_group_counts_and_files_that_may_go_do_not(make, tmp_path):
    process = tmp_path / "cgroup"
    process.write_text(make(tmp_path / "groups") + "\n")
    assert memory_left_by_groups(process, tmp_path / "groups") == 5 * GIB


def test_more_than_the_limit_leaves_nothing(tmp_path):
    group(tmp_path, GIB, 2 * GIB, 0)
    assert memory_left_by_groups(tmp_path / "nothing", tmp_path) == 0


@pytest.mark.parametrize("text", ["0::/", "0::/a/b", "4:memory:/job", ""])
def test_without_a_limit_there_is_none(text, tmp_path):
    (tmp_path / "cgroup").write_text(text)
    assert memory_left_by_groups(tmp_path / "cgroup", tmp_path) is None


def test_cores_of_others_are_counted_over_the_time_of_the_look(monkeypatch):
    for before, after, cores in ((1.0, 4.0, 1.5), (1.0, 0.9, 0.0), (None, None, None)):
        seconds, clock = iter((before, after)), iter((7.0, 9.0))
        monkeypatch.setattr("rpft.host._others_seconds", seconds.__next__)
        monkeypatch.setattr("rpft.host.time", SimpleNamespace(sleep=id, perf_counter=clock.__next__))
        assert others_cores() == cores
