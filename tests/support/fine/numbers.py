"""Cases of numbers that look fine: precision, overflow, quantisation, and what is no number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import hf_bico
from hf_bico.errors import EmptyTaskVectorError, NonFiniteWeightsError, UnsupportedModelError
from hf_bico.reports.record import read_record
from support.fine.cases import Outcome, Refused, Right, Said, Stage, State, case, reconfigure
from support.transformers_world import as_transformers

NUMBERS = "Numbers"

BLOCK = "visual.transformer.resblocks."
OUT = f"{BLOCK}0.attn.out_proj.weight"


@case(
    NUMBERS,
    "a target in bfloat16",
    "it is too coarse for so small a change",
    Said(
        "70% of the change is lost by rounding to the target's own precision; --format adapter is written without loss."
    ),
)
def change_lost_by_rounding(stage: Stage) -> Outcome:
    ported = hf_bico.port(
        stage.tuned,
        to=stage.altered(stage.target, lambda state: {name: tensor.bfloat16() for name, tensor in state.items()}),
        base=stage.base,
        data=stage.data,
        method="bico",
        alpha=0.01,
        evaluate=False,
    )
    return Outcome(ported.form.changes, tuple(read_record(ported.save(stage.place("ported"))).notices))


@case(
    NUMBERS,
    "a fine-tune in float16",
    "a value was too large for it, and is infinite",
    Refused(
        NonFiniteWeightsError,
        ("'visual.transformer.resblocks.0.attn.out_proj.weight' of the fine-tuned model holds NaN or infinite values"),
    ),
)
def overflown_in_float16(stage: Stage) -> Outcome:
    def halved(state: State) -> State:
        state[OUT][0, 0] = 1e5
        return {name: tensor.half() for name, tensor in state.items()}

    return stage.port(stage.altered(stage.tuned, halved))


@case(
    NUMBERS,
    "a target in float16",
    "the port takes it beyond what float16 holds",
    Refused(
        NonFiniteWeightsError,
        ("the change takes 'visual.transformer.resblocks.0.attn.in_proj_weight' beyond what torch.float16 holds"),
    ),
)
def overflow_of_the_target(stage: Stage) -> Outcome:
    halved = stage.altered(stage.target, lambda state: {name: tensor.half() for name, tensor in state.items()})
    return stage.port(to=halved, alpha=1e8)


@case(
    NUMBERS,
    "a fine-tune in bfloat16",
    "it is the base, rounded",
    Refused(EmptyTaskVectorError, "the fine-tuned model differs from its base nowhere"),
)
def rounding_is_the_whole_change(stage: Stage) -> Outcome:
    return stage.port(
        stage.altered(stage.base, lambda state: {name: tensor.bfloat16() for name, tensor in state.items()}, "tuned")
    )


@case(
    NUMBERS,
    "a fine-tune in float32",
    "it is the base, once rounded to bfloat16",
    Refused(EmptyTaskVectorError, "the fine-tuned model differs from its base nowhere"),
)
def rounded_once_and_widened(stage: Stage) -> Outcome:
    return stage.port(
        stage.altered(
            stage.base, lambda state: {name: tensor.bfloat16().float() for name, tensor in state.items()}, "tuned"
        )
    )


@case(
    NUMBERS, "a fine-tune in bfloat16 of a base in float32", "rounding is a part of the difference", Right(within=0.05)
)
def fine_tune_in_half_precision(stage: Stage) -> Outcome:
    return stage.port(
        stage.altered(stage.tuned, lambda state: {name: tensor.bfloat16() for name, tensor in state.items()})
    )


@case(
    NUMBERS,
    "a fine-tune that answers well",
    "a tensor that images never see holds NaN",
    Refused(NonFiniteWeightsError, "'token_embedding.weight' of the fine-tuned model holds NaN or infinite values"),
)
def nan_in_an_unused_tensor(stage: Stage) -> Outcome:
    def broken(state: State) -> State:
        state["token_embedding.weight"][-1] = torch.nan
        return state

    return stage.port(stage.altered(stage.tuned, broken))


@case(NUMBERS, "a fine-tune that answers well", "a tensor that its base does not even have holds NaN", Right())
def nan_in_an_extra_tensor(stage: Stage) -> Outcome:
    return stage.port(stage.altered(stage.tuned, lambda state: {**state, "ema.decay": torch.tensor([torch.nan])}))


@case(
    NUMBERS,
    "a sound port",
    "the target has NaN in a tensor that is not changed",
    Refused(
        NonFiniteWeightsError,
        ("the gradients at 'blocks.0.attn.q' hold NaN or infinite values on the calibration samples"),
    ),
)
def nan_in_the_target(stage: Stage) -> Outcome:
    def broken(state: State) -> State:
        state["token_embedding.weight"][-1] = torch.nan
        return state

    return stage.port(to=stage.altered(stage.target, broken))


@case(
    NUMBERS,
    "a fine-tune with all its tensors",
    "its weights are int8, with scales beside them",
    Refused(
        UnsupportedModelError,
        (
            "'visual.transformer.resblocks.0.attn.in_proj_weight' of the fine-tuned model "
            "'narrow-inverted' is kept as I8, not as floating-point numbers"
        ),
    ),
)
def int8_without_saying_so(stage: Stage) -> Outcome:
    def quantised(name: str, tensor: Tensor) -> State:
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return {name: (tensor / scale).round().to(torch.int8), f"{name}_scale": scale}

    return stage.port(stage.altered(stage.tuned, lambda state: _in_blocks(state, quantised)))


@case(
    NUMBERS,
    "a fine-tune with all its tensors",
    "its weights are float8, with scales beside them",
    Refused(
        UnsupportedModelError,
        (
            "'visual.transformer.resblocks.0.attn.in_proj_weight' of the fine-tuned model "
            "'narrow-inverted' is kept as F8_E4M3, not as floating-point numbers"
        ),
    ),
)
def float8_without_saying_so(stage: Stage) -> Outcome:
    def quantised(name: str, tensor: Tensor) -> State:
        scale = tensor.abs().max() / 448
        return {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}

    return stage.port(stage.altered(stage.tuned, lambda state: _in_blocks(state, quantised)))


@case(
    NUMBERS,
    "a fine-tune with all its tensors",
    "its weights are packed, two of 4 bits to a byte",
    Refused(
        UnsupportedModelError,
        (
            "'visual.transformer.resblocks.0.attn.in_proj_weight' of the fine-tuned model "
            "'narrow-inverted' is kept as U8, not as floating-point numbers"
        ),
    ),
)
def packed_in_4_bits(stage: Stage) -> Outcome:
    def packed(name: str, tensor: Tensor) -> State:
        return {name: torch.zeros(tensor.numel() // 2, 1, dtype=torch.uint8)}

    return stage.port(stage.altered(stage.tuned, lambda state: _in_blocks(state, packed)))


@case(
    NUMBERS,
    "a fine-tune in its library's layout",
    "its configuration says that it is quantised",
    Refused(
        UnsupportedModelError,
        (
            "the weights of the fine-tuned model 'narrow-inverted' are quantised, and not kept as its"
            " layers multiply by them"
        ),
    ),
)
def quantised_as_it_says(stage: Stage) -> Outcome:
    folders = [as_transformers(model, stage.place(model.name)) for model in (stage.tuned, stage.base)]
    reconfigure(folders[0] / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    return stage.port(folders[0], base=folders[1])


def _in_blocks(state: State, kept: Callable[[str, Tensor], State]) -> State:
    """The tensors with each weight of a block as it is `kept`."""
    found = {}
    for name, tensor in state.items():
        found |= kept(name, tensor) if name.startswith(BLOCK) and tensor.ndim == 2 else {name: tensor}
    return found
