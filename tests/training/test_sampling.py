"""The tokens that are generated: those of a plain model in a plain loop, whatever the topology."""

from __future__ import annotations

import pytest
import torch

from tests import reference_models
from tests.configs import SEQ, VOCAB, Case, config_of, engine_of
from tests.harness import run_ranks
from threed.training.sampling import generate

PROMPT, COUNT = [5, 17, 3], SEQ + 4  # past the model's length, where the window slides
GREEDY = 1e-9  # so cold that all but the largest logit have the probability 0


def plain(model: reference_models.Decoder, temperature: float | None, seed: int) -> list[int]:
    """PROMPT continued without anything of threed; the largest logit where there is no temperature."""
    draw, ids = torch.Generator().manual_seed(seed), list(PROMPT)
    for _ in range(COUNT):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-SEQ:]]))[0, -1]
        if temperature is None:
            ids.append(int(logits.argmax()))
        else:
            ids.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=draw)))
    return ids


def sampled(cases: list[Case]) -> list[tuple[list[int], ...]]:
    """Of each case what it generates: greedily, and twice by chance; on rank 0 with what the plain model does."""
    out = []
    for case in cases:
        engine = engine_of(config_of(case))
        found = (
            generate(engine, PROMPT, COUNT, GREEDY),
            *(generate(engine, PROMPT, COUNT, 0.8, n) for n in (0, 7)),
        )
        weights = engine.full_state_dict()
        if weights:
            model = reference_models.gpt(
                vocab=VOCAB, h=32, layers=case.layers, heads=4, seq=SEQ, tied=True
            ).double()
            model.take(weights)
            assert found == (plain(model, None, 0), plain(model, 0.8, 0), plain(model, 0.8, 7)), (
                case
            )
        out.append(found)
    return out


@pytest.mark.seldom("4")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_generated_tokens_are_the_plain_models(world: int) -> None:
    """fp64: two right orders of summation differ by 1e-15, which decides no token."""
    shapes = {1: [(1, 1, 1)], 2: [(1, 1, 2), (2, 1, 1), (1, 2, 1)], 4: [(2, 1, 2)]}[world]
    cases = [Case(*shape, layers=2, sequence=shape[2] > 1, microbatches=-4) for shape in shapes]
    cases += [Case(*shape, layers=2, zero=3, microbatches=-4) for shape in shapes if shape[1] > 1]
    (first, *others) = run_ranks(world, sampled, cases)
    assert all(other == first for other in others)  # the same on every rank
    for tokens in first:
        assert len({tuple(ids) for ids in tokens}) == 3
