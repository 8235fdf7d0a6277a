"""What each method does, in a sentence, and what it looks at. Knows names; neither records nor how methods work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """One method, as a card tells of it.

    `maps` says what the maps line up: on the input side (in), on the output side (out).
    """

    does: str | None = None
    calibrated: bool = True
    """Whether it looks at samples."""
    labels: bool = True
    """Whether it looks at their labels."""
    loss: bool = True
    """Whether it looks at the objective's gradients."""
    turns: bool = True
    """Whether it turns the task vector by maps."""
    maps: str = "inputs (in) and output gradients (out)"


UNKNOWN = About()
METHODS = {
    "bico": About(
        "Two orthogonal maps a site turn the task vector: one lines up the two models' inputs of the layer, the other "
        "the gradients of the loss at its outputs."
    ),
    "bico-fisher": About(
        "As bico, without labels: the gradients that are lined up are those of every label in turn, each counted by "
        "how likely the fine-tuned source finds it, and each row of the inputs is counted by the size of the layer's "
        "own gradients there.",
        labels=False,
        maps="inputs, weighted by gradients, (in) and output gradients (out)",
    ),
    "bico-path": About(
        "As bico-fisher, in steps from the base to the fine-tuned source: the maps are found anew before each part of "
        "the task vector.",
        labels=False,
        maps="inputs, weighted by gradients, (in) and output gradients (out)",
    ),
    "input-only": About(
        "Half of bico: one orthogonal map a site lines up the two models' inputs of the layer; the output side is "
        "padded by zeros, or cropped.",
        labels=False,
        loss=False,
        maps="inputs (in)",
    ),
    "output-only": About(
        "Half of bico: one orthogonal map a site lines up the gradients of the loss at the layer's outputs; the input "
        "side is padded by zeros, or cropped.",
        maps="output gradients (out)",
    ),
    "gradient-only": About(
        "Two orthogonal maps a site turn the task vector, and both line up gradients of the loss: at the layer's "
        "inputs, and at its outputs.",
        maps="input gradients (in) and output gradients (out)",
    ),
    "theseus": About(
        "Two orthogonal maps a site turn the task vector: one lines up the two models' inputs of the layer, the other "
        "its outputs. No gradient is looked at.",
        labels=False,
        loss=False,
        maps="inputs (in) and outputs (out)",
    ),
    "naive": About(
        "The task vector is added as it is, padded by zeros or cropped. No data is looked at.",
        calibrated=False,
        labels=False,
        loss=False,
        turns=False,
    ),
    "transfusion": About(
        "Permutations of heads, neurons and axes bring the source's pretrained weights into the order in which they "
        "are most like the target's, and the task vector with them. They are found from the weights alone, without "
        "data.",
        calibrated=False,
        labels=False,
        loss=False,
    ),
    "gradfix": About(
        "The task vector is added as it is, but kept only where its sign agrees with the target's negative gradient.",
        turns=False,
    ),
    "fewshot": About(
        "One step of AdamW on the mean loss of the samples: what the same samples give without a source.", turns=False
    ),
    "finetune": About(
        "AdamW on nine in ten of the split's samples, but for those that are measured on: what training gives.",
        turns=False,
    ),
}
SIGNS = {
    "mean": "the mean gradient of the samples",
    "majority": "the sign that most of the samples' own gradients have",
}
SAMPLINGS = {
    "class-balanced": "evenly from all classes",
    "centroid-near": "evenly from all classes, those nearest to the mean of their class in the base's features",
    "centroid-far": "evenly from all classes, those farthest from the mean of their class in the base's features",
    "half-class": "from half of the classes",
    "one-class": "from one class",
}
MATCHINGS = {
    "similarity": "matched by the similarity of what the blocks read (linear CKA)",
    "given": "as they were given",
}
