"""Through the command: workers, plan, recompute, rounds and timing change no number and no byte of the result."""

import random

import pytest
from support.engines import random_plan

LAYERS = 6
SECTIONS = {
    "train": {"gradient_accumulation_steps": 12, "max_steps": 2, "eval_every": 1},
    "engine": {"num_microbatches": 12, "recompute": "stage"},
}
LORA = {"adapter": {"r": 4, "dropout": 0.3}}
UNROUNDED = {**SECTIONS["engine"], "host_gradients": "float32"}  # else the rounds of a step would matter
PROJECTS = {
    "qwen3, tied": ("qwen3", SECTIONS),
    "llama, untied": ("llama", SECTIONS),
    "llama, LoRA with dropout": ("llama", {**SECTIONS, **LORA}),
    "mixtral, LoRA on experts too": ("mixtral", {**SECTIONS, "adapter": {"r": 4}}),
    "gpt2 with dropout, delayed": ("gpt2", {**SECTIONS, "optimizer": {"update": "delayed"}}),
    "qwen3, tied, bfloat16": ("qwen3", {**SECTIONS, "model": {"dtype": "bfloat16"}, "engine": UNROUNDED}),
}


@pytest.fixture(scope="module")
def one_worker(project):
    """one_worker(name) -> the project and what its plainest run left."""
    known = {}

    def of(name):
        family, sections = PROJECTS[name]
        made = project(f"same numbers {name}", family, sections=sections)
        if name not in known:
            known[name] = made.train_well("one worker")
        return made, known[name]

    return of


def check(made, expected, output, *words):
    outcome = made.train_well(output, *words)
    assert outcome.numbers == expected.numbers
    assert outcome.result == expected.result


ENGINES = [
    ("engine.workers=2", "engine.recompute=layer"),
    ("engine.workers=3", "engine.num_microbatches=3"),
    ("engine.workers=5", "engine.num_microbatches=1"),
]
EACH = [(name, words) for name in PROJECTS for words in ENGINES]
DEFAULT = set(zip(PROJECTS, ENGINES[:2] * 3, strict=True))
"""One of the first two for each project; a random plan for each, below, has workers and rounds of its own."""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(*case, id=f"{case[0]}-{' '.join(case[1])}", marks=[] if case in DEFAULT else pytest.mark.slow)
        for case in EACH
    ],
)
def test_workers_recompute_rounds_and_timing_change_nothing(name, words, one_worker):
    made, expected = one_worker(name)
    delays = f"engine.inject_delays={len(words[0] + name)}"
    check(made, expected, " ".join(words), *words, delays)


def check_random_plan(name, seed, one_worker):
    made, expected = one_worker(name)
    rng = random.Random(f"{name} {seed}")
    workers = rng.choice([1, 2, 3, 5])
    plan = random_plan(rng, LAYERS, rng.choice([1, 3, 5, 12]))
    path = made.folder / f"plan {seed}.json"
    path.write_text(plan.to_json())
    print(f"{workers} workers, {plan}")
    words = (f"engine.plan={path}", f"engine.workers={workers}", f"engine.inject_delays={seed}")
    check(made, expected, f"plan {seed}", *words)


@pytest.mark.parametrize("name", PROJECTS)
def test_any_legal_plan_gives_the_same_numbers(name, one_worker):
    check_random_plan(name, 1, one_worker)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 14))
@pytest.mark.parametrize("name", PROJECTS)
def test_many_more_plans_give_the_same_numbers(name, seed, one_worker):
    check_random_plan(name, seed, one_worker)


def test_another_seed_gives_other_numbers(one_worker):
    """Else the cases above would hold for a run that ignores its data and its dropout."""
    made, expected = one_worker("llama, LoRA with dropout")
    other = made.train_well("other seed", "train.seed=7")
    assert other.losses != expected.losses
    assert other.result != expected.result
