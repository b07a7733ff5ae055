"""`rpft doctor` where there are GPUs: each is named, its link measured, page-locking tried."""

import pytest
import torch

from rpft.train.doctor import examine

pytestmark = pytest.mark.gpu


def test_every_gpu_and_link_is_found_and_page_locking_is_tried(tmp_path):
    found = {finding.what: finding for finding in examine(tmp_path)}
    for number in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(number) in found[f"GPU {number}"].found
        assert 0 < found[f"GPU {number}"].figures["usable_bytes"] < found[f"GPU {number}"].figures["total_bytes"]
        assert found[f"link of GPU {number}"].figures["up"] > 1e9
    assert ("all links at once" in found) == (torch.cuda.device_count() > 1)
    assert found["page-locking"].figures["allowed"] is True
    assert not any(finding.grade == "fault" for finding in found.values())
