"""`train.router_aux_loss` by the command: it is trained, logged apart from the loss, or refused."""

from typing import Any

from support.recipes import read_jsonl


def test_the_balance_of_routers_is_logged_beside_the_loss(project: Any) -> None:
    made = project("router loss", "mixtral", router_aux_loss_coef=0.5)
    plain = made.train_well("plain")
    balanced = made.train_well("balanced", "train.router_aux_loss=model", "engine.workers=2")
    same = made.train_well("same", "train.router_aux_loss=0.5")
    assert balanced.losses == same.losses
    assert balanced.losses[0] == plain.losses[0]
    assert balanced.losses[-1] != plain.losses[-1]
    lines, without = (
        [line for line in read_jsonl(run.folder / "metrics.jsonl") if "loss" in line] for run in (balanced, plain)
    )
    assert all(1.0 < line["router_aux_loss"] < 4.0 for line in lines)
    assert not any("router_aux_loss" in line for line in without)


def test_a_model_without_routers_is_refused(project: Any) -> None:
    ran = project("refusals", "llama").train("balanced", "train.router_aux_loss=0.1")
    assert ran.code == 2
    assert "train.router_aux_loss 0.1: model 'llama' has no router" in ran.err
