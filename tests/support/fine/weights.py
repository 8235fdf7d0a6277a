"""Cases of weights that look fine: a fine-tune's, arranged otherwise than its base's, or over another base."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from hf_bico.errors import BaseMismatchError, BrokenWeightsError, EmptyTaskVectorError, ImplausibleTaskVectorError
from support.fine.cases import FILE, Outcome, Refused, Right, Said, Stage, State, case, rewrite
from support.transformers_world import as_transformers

ARRANGED = "The fine-tune's weights, arranged otherwise"
OVER = "The fine-tune and its base"

BLOCK = "visual.transformer.resblocks."
OUT = f"{BLOCK}0.attn.out_proj.weight"


def _in_other_order(state: State, order: tuple[int, ...]) -> State:
    """q, k and v of every block, packed in another order."""
    for name in [name for name in state if name.startswith(BLOCK) and "in_proj_" in name]:
        parts = state[name].chunk(3)
        state[name] = torch.cat([parts[place] for place in order])
    return state


@case(
    ARRANGED,
    "a square weight of the right shape",
    "it is transposed",
    Refused(
        ImplausibleTaskVectorError, "the fine-tuned model has at blocks.0.attn.out what its base has there, transposed"
    ),
)
def one_square_weight_transposed(stage: Stage) -> Outcome:
    return stage.port(stage.altered(stage.tuned, lambda state: {**state, OUT: state[OUT].T}))


@case(
    ARRANGED,
    "all names of a Linear layout",
    "every weight is kept as (in, out), as a Conv1D does",
    Refused(
        BaseMismatchError,
        (
            "'visual.transformer.resblocks.0.attn.in_proj_weight' is (32, 96) in the fine-tuned model"
            " and (96, 32) in the base"
        ),
    ),
)
def all_weights_transposed(stage: Stage) -> Outcome:
    def transposed(state: State) -> State:
        return {
            name: tensor.T if name.startswith(BLOCK) and tensor.ndim == 2 else tensor for name, tensor in state.items()
        }

    return stage.port(stage.altered(stage.tuned, transposed))


@case(
    ARRANGED,
    "a fused in_proj of the right shape",
    "q and k are swapped in it",
    Refused(
        ImplausibleTaskVectorError, "the fine-tuned model has at blocks.0.attn.q what its base has at blocks.0.attn.k"
    ),
)
def q_and_k_swapped_in_a_fused_weight(stage: Stage) -> Outcome:
    return stage.port(stage.altered(stage.tuned, lambda state: _in_other_order(state, (1, 0, 2))))


@case(
    ARRANGED,
    "separate q_proj and k_proj of one shape",
    "each holds the other's weights",
    Refused(
        ImplausibleTaskVectorError, "the fine-tuned model has at blocks.0.attn.q what its base has at blocks.0.attn.k"
    ),
)
def separate_q_and_k_swapped(stage: Stage) -> Outcome:
    folders = [as_transformers(model, stage.place(model.name)) for model in (stage.tuned, stage.base)]

    def swapped(state: State) -> State:
        other = {"q_proj": "k_proj", "k_proj": "q_proj"}
        return {
            ".".join(other.get(part, part) for part in name.split(".")) if "vision" in name else name: tensor
            for name, tensor in state.items()
        }

    rewrite(folders[0] / "model.safetensors", swapped)
    return stage.port(folders[0], base=folders[1])


@case(
    ARRANGED,
    "a fused in_proj of the right shape",
    "it holds k, v, q in this order",
    Refused(
        ImplausibleTaskVectorError, "the fine-tuned model has at blocks.0.attn.q what its base has at blocks.0.attn.k"
    ),
)
def fused_in_another_order(stage: Stage) -> Outcome:
    return stage.port(stage.altered(stage.tuned, lambda state: _in_other_order(state, (1, 2, 0))))


@case(
    ARRANGED,
    "a fused in_proj of the right shape",
    "q, k and v alternate in it head by head",
    Refused(
        ImplausibleTaskVectorError,
        (
            "the fine-tuned model's weights at blocks.0.attn.k, blocks.1.attn.q, blocks.1.attn.k have"
            " nothing in common with its base's: they differ by up to 143% of their norm"
        ),
    ),
)
def fused_head_by_head(stage: Stage) -> Outcome:
    def interleaved(state: State) -> State:
        for name in [name for name in state if name.startswith(BLOCK) and "in_proj_" in name]:
            parts = [part.unflatten(0, (2, -1)) for part in state[name].chunk(3)]
            state[name] = torch.stack(parts, 1).reshape(state[name].shape)
        return state

    return stage.port(stage.altered(stage.tuned, interleaved))


@case(
    ARRANGED,
    "every block is there",
    "two blocks have changed places",
    Refused(
        ImplausibleTaskVectorError, "the fine-tuned model has at blocks.0.attn.q what its base has at blocks.1.attn.q"
    ),
)
def two_blocks_swapped(stage: Stage) -> Outcome:
    def swapped(state: State) -> State:
        other = {f"{BLOCK}0.": f"{BLOCK}1.", f"{BLOCK}1.": f"{BLOCK}0."}
        return {
            other.get(name[: len(BLOCK) + 2], name[: len(BLOCK) + 2]) + name[len(BLOCK) + 2 :]: t
            for name, t in state.items()
        }

    return stage.port(stage.altered(stage.tuned, swapped))


@case(
    ARRANGED,
    "a weight of the usual size",
    "its sign is flipped",
    Refused(
        ImplausibleTaskVectorError,
        ("the fine-tuned model has at blocks.0.attn.out what its base has there with the sign flipped"),
    ),
)
def one_weight_negated(stage: Stage) -> Outcome:
    return stage.port(stage.altered(stage.tuned, lambda state: {**state, OUT: -state[OUT]}))


# -- the fine-tune and its base


@case(
    OVER,
    "a base of the same shape",
    "it was initialised from another seed",
    Refused(
        ImplausibleTaskVectorError,
        ("the fine-tuned model differs from its base by 142% of the weights' own norm, which fine-tuning does not do"),
    ),
)
def base_of_another_seed(stage: Stage) -> Outcome:
    def drawn_anew(state: State) -> State:
        generator = torch.Generator().manual_seed(7)
        return {
            name: tensor.std() * torch.randn(tensor.shape, generator=generator) if tensor.ndim == 2 else tensor
            for name, tensor in state.items()
        }

    return stage.port(base=stage.altered(stage.base, drawn_anew, "other"))


@case(
    OVER,
    "a base of the same shape",
    "it is another fine-tune of the real base, as its card says",
    Said("The base narrow-rotated-90 was itself made from user/narrow: what it learnt over that is not carried."),
)
def base_is_another_fine_tune(stage: Stage) -> Outcome:
    base = stage.copied(stage.world.fine_tuned("narrow", "rotated-90"))
    (base / "README.md").write_text("---\nbase_model: user/narrow\n---\n")
    return stage.port(base=base)


@case(
    OVER,
    "a base",
    "it is the target",
    Refused(BaseMismatchError, "'visual.class_embedding' is (32,) in the fine-tuned model and (48,) in the base"),
)
def base_is_the_target(stage: Stage) -> Outcome:
    return stage.port(base=stage.target)


@case(OVER, "a target", "it is the base itself", Said("The target is the base itself."))
def target_is_the_base(stage: Stage) -> Outcome:
    return stage.port(to=stage.base)


@case(OVER, "a target", "it is the fine-tuned model itself", Said("The target is the fine-tuned model itself."))
def target_is_the_fine_tune(stage: Stage) -> Outcome:
    return stage.port(to=stage.tuned)


@case(
    OVER,
    "a fine-tune",
    "it is a copy of its base",
    Refused(EmptyTaskVectorError, "the fine-tuned model differs from its base nowhere"),
)
def unchanged(stage: Stage) -> Outcome:
    return stage.port(stage.copied(stage.base, "tuned"))


@case(
    OVER,
    "a fine-tune",
    "only its LayerNorms and embeddings were trained",
    Refused(EmptyTaskVectorError, "the fine-tuned model differs from its base only in tensors that are not carried"),
)
def only_norms_changed(stage: Stage) -> Outcome:
    trained = ("ln_1", "ln_2", "ln_pre", "ln_post", "class_embedding", "positional_embedding")

    def others_as_in_the_base(state: State) -> State:
        start = load_file(stage.base / FILE)
        return {
            name: tensor if any(part in name for part in trained) else start[name] for name, tensor in state.items()
        }

    return stage.port(stage.altered(stage.tuned, others_as_in_the_base))


@case(OVER, "a fine-tune's state dict", "it holds the visual tower alone", Right())
def only_the_tower_saved(stage: Stage) -> Outcome:
    return stage.port(
        stage.altered(stage.tuned, lambda state: {name: t for name, t in state.items() if name.startswith("visual.")})
    )


@case(
    OVER,
    "a fine-tune's state dict",
    "a part of its layers is missing",
    Refused(
        BrokenWeightsError,
        ("the fine-tuned model 'narrow-inverted' lacks the tensor 'visual.transformer.resblocks.1.mlp.c_fc.weight'"),
    ),
)
def a_part_of_the_layers_missing(stage: Stage) -> Outcome:
    return stage.port(
        stage.altered(stage.tuned, lambda state: {name: t for name, t in state.items() if ".1.mlp." not in name})
    )


def _prefixed(stage: Stage, prefix: str) -> Outcome:
    return stage.port(
        stage.altered(stage.tuned, lambda state: {prefix + name: tensor for name, tensor in state.items()})
    )


@case(OVER, "a fine-tune's state dict", "DataParallel put `module.` before every name", Right())
def names_after_module(stage: Stage) -> Outcome:
    return _prefixed(stage, "module.")


@case(OVER, "a fine-tune's state dict", "torch.compile put `_orig_mod.` before every name", Right())
def names_after_orig_mod(stage: Stage) -> Outcome:
    return _prefixed(stage, "_orig_mod.")


@case(OVER, "a fine-tune's state dict", "a wrapper put `model.` before every name", Right())
def names_after_model(stage: Stage) -> Outcome:
    return _prefixed(stage, "model.")


@case(
    OVER,
    "a fine-tune",
    "it is fine-tuned away from its task: the change has the wrong sign",
    Said(
        "The fine-tuned source is WORSE than the target on the samples' labels: 18.0% against 43.0% "
        "(± 5.8 points), so there is nothing to gain."
    ),
)
def change_negated(stage: Stage) -> Outcome:
    start = load_file(stage.base / FILE)
    return stage.port(
        stage.altered(stage.tuned, lambda state: {name: 2 * start[name] - tensor for name, tensor in state.items()})
    )


@case(
    OVER,
    "a fine-tune",
    "its change was multiplied by 1000",
    Refused(
        ImplausibleTaskVectorError,
        ("the fine-tuned model differs from its base by 8825% of the weights' own norm, which fine-tuning does not do"),
    ),
)
def change_times_a_thousand(stage: Stage) -> Outcome:
    start = load_file(stage.base / FILE)

    def further(state: State) -> State:
        return {name: start[name] + 1000 * (tensor - start[name]) for name, tensor in state.items()}

    return stage.port(stage.altered(stage.tuned, further))


@case(
    OVER,
    "a fine-tune and a base",
    "the one was given for the other",
    Said(
        "The fine-tuned source is WORSE than the target on the samples' labels: 35.0% against 43.0% "
        "(± 6.8 points), so there is nothing to gain."
    ),
)
def fine_tune_and_base_exchanged(stage: Stage) -> Outcome:
    return stage.port(stage.base, base=stage.tuned)
