"""That the port works on trained language models: real text, real training, the whole pipeline."""

from __future__ import annotations

from statistics import mean

import pytest

import hf_bico
from support.tokenizer_world import one_and_other
from support.worlds import (
    DECODER_SEEDS,
    MORE_DECODER_SEEDS,
    MORE_SEQUENCE_SEEDS,
    MORE_TOKENIZER_SEEDS,
    SEQUENCE_SEEDS,
    TOKENIZER_SEEDS,
    decoders,
    sequences,
    tokenizers,
)


@pytest.mark.parametrize(
    "seeds", [DECODER_SEEDS, pytest.param(MORE_DECODER_SEEDS, marks=pytest.mark.slow)], ids=["narrow", "broad"]
)
def test_ported_lora_lowers_the_held_out_loss_by_a_third_of_what_it_did_at_home(seeds: tuple[int, ...]) -> None:
    """Two blocks of 48 to three of 64, 100 samples, mean over pretrainings; and the padded vector does not."""
    shares: dict[str, list[float]] = {"bico": [], "theseus": [], "naive": []}
    for seed in seeds:
        world = decoders(seed)
        loss = {name: world.loss(world.load(name)) for name in ("source", "tuned", "target")}
        gain = loss["source"] - loss["tuned"]
        assert gain > 0.2, "the LoRA must have taught its own base something"
        for method, found in shares.items():
            ported = hf_bico.port(
                world.adapter,
                to=world.target,
                base=world.source,
                data=world.calibration(100),
                n=100,
                method=method,
                alpha=1.0,
                evaluate=False,
            )
            found.append((loss["target"] - world.loss(ported.model())) / gain)
    means = {method: mean(found) for method, found in shares.items()}
    print(", ".join(f"{method} {value:.0%}" for method, value in means.items()))
    assert means["bico"] >= 1 / 3
    assert min(shares["bico"]) > 0.2
    assert means["bico"] > means["theseus"] + 0.1
    assert means["bico"] > means["naive"] + 0.1


@pytest.mark.parametrize(
    ("seeds", "styles", "methods"),
    [
        (TOKENIZER_SEEDS, ("capitals",), ("bico",)),
        pytest.param(MORE_TOKENIZER_SEEDS, ("capitals", "digits"), ("bico", "theseus"), marks=pytest.mark.slow),
    ],
    ids=["narrow", "broad"],
)
def test_a_port_to_another_tokenizer_does_most_of_what_one_to_the_same_does(
    seeds: tuple[int, ...], styles: tuple[str, ...], methods: tuple[str, ...]
) -> None:
    """Three tokenizers, each LoRA to each target: six in nine ports are between different ones."""
    same: dict[str, list[float]] = {method: [] for method in methods}
    other: dict[str, list[float]] = {method: [] for method in methods}
    for seed in seeds:
        for style in styles:
            for method in same:
                one, two = one_and_other(tokenizers(seed, style).shares(method, alpha=1.0))
                same[method].append(one)
                other[method].append(two)
    print(", ".join(f"{method}: {mean(same[method]):.0%}, to others {mean(other[method]):.0%}" for method in same))
    assert mean(other["bico"]) >= 0.6 * mean(same["bico"]) > 0.2
    if "theseus" in methods:
        assert mean(other["bico"]) > mean(other["theseus"]) + 0.1


@pytest.mark.parametrize(
    ("seeds", "draws"),
    [(SEQUENCE_SEEDS, 1), pytest.param(MORE_SEQUENCE_SEEDS, 2, marks=pytest.mark.slow)],
    ids=["narrow", "broad"],
)
def test_ported_encoder_is_probed_better_than_the_target_and_theseus(seeds: tuple[int, ...], draws: int) -> None:
    """The paper's protocol: an encoder's task vector, N samples that calibrate and that a linear probe is fitted to."""
    found = []
    for seed in seeds:
        world = sequences(seed)
        models = {"to": world.target, "base": world.source, "data": world.data}
        compared = hf_bico.compare(world.tuned, **models, methods=["theseus@1", "bico@1"], n=[50, 100], seeds=draws)
        found.append(compared.prefixed(f"world {seed}, "))
    rows = hf_bico.Comparison.merged(found).rows()
    labels = {row.label for row in rows}
    means = {label: mean(row.average.mean for row in rows if row.label == label and row.average) for label in labels}
    print(", ".join(f"{label} {value:.1%}" for label, value in sorted(means.items())))
    bico = means["BiCo, alpha 1, probe"]
    assert bico > means["target, probe"]
    assert bico > means["THESEUS, alpha 1, probe"]
    assert means["source, fine-tuned, probe"] > bico
