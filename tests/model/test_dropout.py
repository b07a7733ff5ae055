"""Dropout is a function of its place: any worker, thread or recompute draws the same mask, at the right rate."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from rpft.model.dropout import halves, keep_mask, mix, placed_dropout

CPU = torch.device("cpu")
COUNT = 1 << 16
KNOWN_MIX = 0xA8F3134A766937DC
KNOWN_MASK = "11101110111011001111000011011001"


def mask(key: int, p: float = 0.5, count: int = COUNT) -> torch.Tensor:
    return keep_mask(torch.Size([count]), p, halves(key), CPU)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Pearson's, of two boolean vectors; its standard error for independent ones is 1 / sqrt(length)."""
    return torch.corrcoef(torch.stack([a, b]).float())[0, 1].item()


@pytest.mark.parametrize("p", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_the_rate_is_p_for_every_key(p: float) -> None:
    bound = 5 * (p * (1 - p) / COUNT) ** 0.5
    for key in (0, 1, 2, (1 << 32) - 1, 1 << 32, (1 << 64) - 1, *(mix(7, i) for i in range(40))):
        dropped = 1 - mask(key, p).float().mean().item()
        assert abs(dropped - p) < bound, (key, dropped)


def test_rates_of_zero_and_one_keep_all_and_none() -> None:
    assert mask(3, 0.0).all()
    assert not mask(3, 1.0).any()


def test_a_mask_depends_on_the_key_and_place_alone() -> None:
    torch.manual_seed(1)
    first = mask(11)
    torch.manual_seed(2)
    assert torch.equal(first, mask(11))
    assert torch.equal(first.view(64, -1), keep_mask(torch.Size([64, COUNT // 64]), 0.5, halves(11), CPU))
    assert torch.equal(first[:1000], mask(11, count=1000))
    assert not torch.equal(first, mask(12))
    state = torch.get_rng_state()
    mask(13)
    assert torch.equal(state, torch.get_rng_state())


def test_a_known_mask_stays_the_same_in_every_version() -> None:
    assert mix(1, 2, 3) == KNOWN_MIX
    drawn = mask(mix(1, 2, 3), count=32).tolist()
    assert "".join("01"[keep] for keep in drawn) == KNOWN_MASK


def test_masks_of_neighbouring_keys_and_elements_are_not_correlated() -> None:
    bound = 5 / COUNT**0.5
    base = mix(42, 1)
    first = mask(base)
    flipped = [base ^ (1 << bit) for bit in (0, 1, 31, 32, 63)]
    for other in (base + 1, base - 1, *flipped, mix(42, 2), mix(43, 1)):
        assert abs(correlation(first, mask(other % (1 << 64)))) < bound, hex(base ^ other)
    for lag in (1, 2, 3, 8, 64, 256, 4096, COUNT // 2):
        assert abs(correlation(first[:-lag], first[lag:])) < 5 / (COUNT - lag) ** 0.5, lag


def test_masks_of_a_run_s_layers_and_microbatches_are_pairwise_independent() -> None:
    masks = torch.stack(
        [
            mask(mix(mix(3, step, microbatch), layer), count=4096)
            for step in range(3)
            for microbatch in range(3)
            for layer in range(5)
        ]
    )
    between = torch.corrcoef(masks.float()).fill_diagonal_(0)
    assert between.abs().max() < 6 / 4096**0.5


def test_equal_inputs_mix_to_equal_keys_and_order_counts() -> None:
    keys = {mix(a, b) for a in range(50) for b in range(50)}
    assert len(keys) == 2500
    assert mix(1, 2) == mix(1, 2) != mix(2, 1)
    assert all(0 <= key < 1 << 64 for key in keys)
    assert 0 <= mix(-1) < 1 << 64


def test_functional_and_module_dropout_scale_what_they_keep_and_pass_the_gradient() -> None:
    x = torch.rand(200, 200) + 1
    x.requires_grad_()
    with placed_dropout(5):
        y = F.dropout(x, 0.25)
    kept = y != 0
    assert abs(kept.float().mean() - 0.75) < 0.02
    assert torch.equal(y[kept], (x / 0.75)[kept])
    y.sum().backward()
    assert torch.equal(x.grad, kept / 0.75)
    with placed_dropout(5):
        assert torch.equal(y, torch.nn.Dropout(0.25)(x))
        assert not torch.equal(y, torch.nn.Dropout(0.25)(x))  # the second call of this place
        assert torch.nn.Dropout(0.25).eval()(x) is x
        assert F.dropout(x, 0.0) is x


def test_without_a_key_torch_s_own_dropout_is_left_alone() -> None:
    x = torch.ones(1000)
    torch.manual_seed(3)
    expected = F.dropout(x, 0.5)
    torch.manual_seed(3)
    with placed_dropout(None):
        assert torch.equal(F.dropout(x, 0.5), expected)


def test_two_threads_at_once_draw_what_they_draw_one_after_the_other() -> None:
    x = torch.ones(64, 64)

    def draw(key: int, into: dict[int, list[torch.Tensor]], barrier: threading.Barrier | None = None) -> None:
        with placed_dropout(key):
            into[key] = []
            for _ in range(50):
                if barrier is not None:
                    barrier.wait(10)
                into[key].append(F.dropout(x, 0.5))

    alone: dict[int, list[torch.Tensor]] = {}
    together: dict[int, list[torch.Tensor]] = {}
    for key in (1, 2):
        draw(key, alone)
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=draw, args=(key, together, barrier)) for key in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for key in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(alone[key], together[key], strict=True))
    assert not torch.equal(alone[1][0], alone[2][0])


Q, K, V = (torch.randn(2, heads, 6, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
K4, V4 = K.repeat_interleave(2, 1), V.repeat_interleave(2, 1)
BOOLEAN = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.3
BOOLEAN[..., 0] = True
ADDED = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        ((Q, K4, V4), {}),
        ((Q, K4, V4), {"is_causal": True}),
        ((Q, K4, V4), {"attn_mask": BOOLEAN}),
        ((Q, K4, V4), {"attn_mask": ADDED, "scale": 0.3}),
        ((Q, K, V), {"enable_gqa": True}),
        ((Q, K, V), {"enable_gqa": True, "is_causal": True, "scale": 1.7}),
        ((Q[:, :, :4], K4, V4), {"attn_mask": BOOLEAN[:, :, :4]}),
    ],
    ids=["plain", "causal", "bool mask", "float mask and scale", "gqa", "gqa causal scale", "fewer queries"],
)
def test_attention_written_out_is_sdpa_but_for_its_dropout(tensors: tuple, settings: dict) -> None:
    expected = F.scaled_dot_product_attention(*tensors, **settings)
    with placed_dropout(1):
        nothing_drops = F.scaled_dot_product_attention(*tensors, dropout_p=1e-9, **settings)
        half_drops = F.scaled_dot_product_attention(*tensors, dropout_p=0.5, **settings)
    mask, others = settings.get("attn_mask"), {k: v for k, v in settings.items() if k != "attn_mask"}
    with placed_dropout(1):
        F.dropout(Q, 0.5)  # as the second call of this place, by position
        assert torch.equal(F.scaled_dot_product_attention(*tensors, mask, 0.5, **others), half_drops)
    torch.testing.assert_close(nothing_drops, expected, rtol=1e-5, atol=1e-6)
    assert (half_drops - expected).abs().max() > 0.1


def test_dropout_in_attention_is_drawn_from_the_key_and_right_on_average() -> None:
    expected = F.scaled_dot_product_attention(Q, K4, V4, is_causal=True)
    draws = []
    for key in range(800):
        with placed_dropout(mix(key)):
            draws.append(F.scaled_dot_product_attention(Q, K4, V4, dropout_p=0.2, is_causal=True))
    with placed_dropout(mix(0)):
        assert torch.equal(draws[0], F.scaled_dot_product_attention(Q, K4, V4, dropout_p=0.2, is_causal=True))
    drawn = torch.stack(draws)
    error = (drawn.mean(0) - expected).abs() / (drawn.std(0) / 800**0.5)
    assert error.max() < 5


def test_attention_without_dropout_keeps_its_fused_kernel() -> None:
    with placed_dropout(1):
        assert torch.equal(
            F.scaled_dot_product_attention(Q, K4, V4, is_causal=True, dropout_p=0.0),
            F.scaled_dot_product_attention(Q, K4, V4, is_causal=True),
        )
