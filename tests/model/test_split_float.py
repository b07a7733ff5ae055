"""float32 in two halves: joined again it is the same number, and the upper half is the nearest bfloat16."""

import torch

from rpft.model.split_float import _BLOCK, join, split_into

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3.4028235e38, 1.0, -1.0]
TIES = [1.00390625, 1.01171875, -1.00390625, -1.01171875]
"""Half-way between two bfloat16 neighbours."""


def split(values):
    high, low = torch.zeros(len(values), dtype=torch.bfloat16), torch.zeros(len(values), dtype=torch.int16)
    split_into(high, low, values)
    return high, low


def random_bits(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def test_joined_halves_are_the_number_to_the_bit():
    values = torch.cat([torch.tensor(SPECIAL + TIES), random_bits(_BLOCK + 17)])
    assert torch.equal(join(*split(values)).view(torch.int32), values.view(torch.int32))


def test_the_upper_half_is_the_nearest_bfloat16_and_a_tie_goes_away_from_zero():
    values = torch.cat([torch.tensor(SPECIAL), torch.randn(100_000)])
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    high, _ = split(values)
    torch.testing.assert_close(high[~ties], values[~ties].bfloat16(), rtol=0, atol=0, equal_nan=True)
    high, low = split(torch.tensor(TIES))
    assert high.tolist() == [1.0078125, 1.015625, -1.0078125, -1.015625]
    assert set(low.tolist()) == {-32768}


def test_a_bfloat16_number_has_nothing_beyond_its_upper_half():
    values = torch.randn(1000).bfloat16()
    high, low = split(values.float())
    assert torch.equal(high, values)
    assert not low.any()
