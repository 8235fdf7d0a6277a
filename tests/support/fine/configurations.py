"""Cases of configurations that look fine: a fine-tune's weights fit its base, and it computes something else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hf_bico.errors import BaseMismatchError
from support.fine.cases import Outcome, Refused, Right, Said, Stage, case
from support.fine.texts import decoders, encoders
from support.transformers_world import as_transformers

CONFIGURED = "The fine-tune's configuration"
LOADED = "Loaded models"


def _changed(file: Path, *path: str, to: Any) -> None:
    """Put another value into a JSON file, below these names."""
    content = json.loads(file.read_text())
    inner = content
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = to
    file.write_text(json.dumps(content))


def _open_clip(stage: Stage, *path: str, to: Any, **options: Any) -> Outcome:
    tuned = stage.copied(stage.tuned)
    _changed(tuned / "open_clip_config.json", *path, to=to)
    return stage.port(tuned, **options)


def _texts(stage: Stage, inputs: dict[str, Any], to: Any, *path: str) -> Outcome:
    tuned = stage.copied(inputs["source"])
    _changed(tuned / "config.json", *path, to=to)
    return stage.port(**{**inputs, "source": tuned})


def _refused(tuned: str, base: str, what: str) -> Refused:
    field, own, other = what.split()
    return Refused(
        BaseMismatchError,
        f"'{tuned}' is configured with {field} {own} and its base '{base}' with {other}: "
        "with the same weights, they compute different things",
    )


@case(
    CONFIGURED,
    "a fine-tune's weights",
    "its activation is not its base's: open_clip's `quick_gelu`",
    _refused("narrow-inverted", "narrow", "model_cfg.quick_gelu True False"),
)
def another_activation(stage: Stage) -> Outcome:
    return _open_clip(stage, "model_cfg", "quick_gelu", to=True)


@case(
    CONFIGURED,
    "a fine-tune's weights",
    "its activation is not its base's, and `--force` is given",
    Said(
        "narrow-inverted is configured with model_cfg.quick_gelu True and its base with False, which is used for both."
    ),
)
def another_activation_forced(stage: Stage) -> Outcome:
    return _open_clip(stage, "model_cfg", "quick_gelu", to=True, force=True)


@case(
    CONFIGURED,
    "a fine-tune's weights",
    "its attention has as many numbers in other heads",
    _refused("narrow-inverted", "narrow", "model_cfg.vision_cfg.head_width 8 16"),
)
def heads_of_another_width(stage: Stage) -> Outcome:
    return _open_clip(stage, "model_cfg", "vision_cfg", "head_width", to=8)


@case(
    CONFIGURED,
    "a fine-tuned tower's weights",
    "its LayerNorms add 0.1 to the variance, those of the whole CLIP 1e-05",
    _refused("tower", "narrow", "layer_norm_eps 0.1 1e-05"),
)
def another_eps(stage: Stage) -> Outcome:
    from transformers import CLIPModel

    base, tuned = (as_transformers(model, stage.place(model.name)) for model in (stage.base, stage.tuned))
    tower = stage.place("tower")
    CLIPModel.from_pretrained(tuned).vision_model.save_pretrained(tower)
    _changed(tower / "config.json", "layer_norm_eps", to=0.1)
    return stage.port(tower, base=base)


@case(
    CONFIGURED,
    "a fine-tuned encoder's weights",
    "it is a decoder, which reads no later token",
    _refused("tuned", "base", "is_decoder True False"),
)
def encoder_that_is_a_decoder(stage: Stage) -> Outcome:
    return _texts(stage, encoders(stage), True, "is_decoder")


@case(
    CONFIGURED,
    "a fine-tuned decoder's weights",
    "its positions turn at another rate, as after training on long texts",
    _refused("tuned", "base", "rope_parameters.rope_theta 1000000.0 10000.0"),
)
def another_rotary_base(stage: Stage) -> Outcome:
    return _texts(stage, decoders(stage), 1e6, "rope_parameters", "rope_theta")


@case(
    CONFIGURED,
    "a fine-tuned decoder's weights",
    "each token reads fewer of those before it than in the base",
    Said("tuned is configured with sliding_window 8 and its base with 4096, which is used for both."),
)
def another_window(stage: Stage) -> Outcome:
    return _texts(stage, decoders(stage, "mistral"), 8, "sliding_window")


@case(
    CONFIGURED,
    "a fine-tune's configuration",
    "defaults are spelled out in it, and dropout, labels and dtype are others",
    Right(because="nothing of that is computed with, and nothing is said"),
)
def configuration_of_another_release(stage: Stage) -> Outcome:
    tuned = stage.copied(stage.tuned)
    file = tuned / "open_clip_config.json"
    for path, value in {"quick_gelu": False, "custom_text": False, "init_logit_scale": 1.5}.items():
        _changed(file, "model_cfg", path, to=value)
    _changed(file, "model_cfg", "vision_cfg", "pool_type", to="tok")
    _changed(file, "model_cfg", "vision_cfg", "patch_dropout", to=0.5)
    found = stage.port(tuned)
    assert not any("configured" in sentence for sentence in found.said)
    return found


@case(
    CONFIGURED,
    "a fine-tune with its preprocessing",
    "it resizes images otherwise than its base",
    Said(
        "narrow-inverted prepares images with interpolation nearest and its base with bicubic, which is used for both."
    ),
)
def another_interpolation(stage: Stage) -> Outcome:
    return _open_clip(stage, "preprocess_cfg", "interpolation", to="nearest")


# -- models that were loaded before


def _loaded(stage: Stage) -> tuple[Any, Any]:
    """The fine-tuned model and its base, by transformers."""
    from transformers import CLIPModel

    folders = [as_transformers(model, stage.place(model.name)) for model in (stage.tuned, stage.base)]
    tuned, base = (CLIPModel.from_pretrained(folder) for folder in folders)
    return tuned, base


@case(LOADED, "a loaded target", "it is the loaded base", Said("The target is the base itself."))
def loaded_target_is_the_base(stage: Stage) -> Outcome:
    tuned, base = _loaded(stage)
    return stage.port(tuned, base=base, to=base)


@case(LOADED, "a loaded target", "it is a copy of the base, in bfloat16", Said("The target is the base itself."))
def loaded_target_is_a_copy_of_the_base(stage: Stage) -> Outcome:
    tuned, base = _loaded(stage)
    return stage.port(tuned, base=base, to=copy.deepcopy(base).bfloat16())


@case(
    LOADED,
    "a loaded target",
    "it is a copy of the fine-tuned model",
    Said("The target is the fine-tuned model itself."),
)
def loaded_target_is_the_fine_tune(stage: Stage) -> Outcome:
    tuned, base = _loaded(stage)
    return stage.port(tuned, base=base, to=copy.deepcopy(tuned))


@case(
    LOADED,
    "a loaded fine-tune",
    "its activation is not its base's",
    _refused("CLIPModel", "CLIPModel", "vision_config.hidden_act relu gelu"),
)
def loaded_with_another_activation(stage: Stage) -> Outcome:
    tuned, base = _loaded(stage)
    tuned.config.vision_config.hidden_act = "relu"
    return stage.port(tuned, base=base)
