"""Compare a fine-tuned model's configuration with its base's: what else than weights decides what the two compute.

A change of weights is measured and carried as the base computes, so a fine-tune that computes otherwise is another
model. Reads configurations; what a file leaves out is filled in by its library, which is imported only where two files
differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_bico.errors import BaseMismatchError
from hf_bico.models.model import Model

_NOT_COMPUTED = re.compile(
    # where a model comes from; how it is loaded, initialised and trained
    r"_.*|architectures|auto_map|model_name|name_or_path|transformers_version|.*dtype|tokenizer_\w+|hf_tokenizer_name"
    r"|prefix|task_specific_params|finetuning_task|problem_type|(id2|num_)labels?|label2id|unsloth\w*|keys_to_ignore\w*"
    r"|.*drop(out|_?path|_rate|_prob)?(_\w+)?|\w*pdrop|layerdrop|.*init(ializer)?(_\w+)?|gradient_\w+|\w+_pretrained"
    r"|mask_(time|feature)_\w+|apply_spec_augment|router_\w+|\w*loss\w*|\w*compile\w*|\w*attn_implementation\w*"
    # how outputs are returned, cached and generated
    r"|use_cache|output_\w+|return_dict\w*|torchscript|use_bfloat16|chunk_size_feed_forward|pretraining_tp"
    r"|reorder_and_upcast_attn|(max|min)_length|model_max_length|num_(beam|return)\w+|do_sample|early_stopping|top_[kp]"
    r"|temperature|typical_p|\w+_penalty|\w*ngram_size|bad_words_ids|remove_invalid_values|\w*suppress_tokens"
    r"|(bos|eos|sep|cls|unk|mask|decoder_start|forced\w+|image|pad)_token_id|eos_id"
    # heads and embeddings, which are not carried; sizes that tensors show
    r"|tie_\w+|vocab_size|projection_dim|embed_dim|pooler_output_size|encoder_stride|summary_\w+|classifier_\w+"
    r"|is_encoder_decoder|max_window_layers|custom_text|preprocess_cfg"
)
"""Fields of either library that change nothing that a layer computes, or are written a second time in another one."""
_DECISIVE = re.compile(
    r"hidden_act(ivation)?|activation(_function)?|\w*act_fn|feed_forward_proj|is_gated_act|quick_gelu|act_kwargs"
    r"|(num_(attention_|key_value_)?|n_)heads?|heads|head_dim|head_width|d_kv|qk_norm|scale(d|s)?_\w+"
    r"|is_decoder|is_causal|no_causal_mask|use_bidirectional_attention|add_cross_attention|position_embedding_type"
    r"|sinusoidal_pos_embds|pos_embed_type|rope_theta|partial_rotary_factor|relative_attention_\w+|pad_token_id"
    r"|\w*softcapping|query_pre_attn_scalar|\w+_multiplier|logits_scaling|image_size|patch_size"
    r"|pool_type|pooler_act|attentional_pool|final_ln_after_pool|no_ln_pre"
)
"""Fields without which the same weights compute something else, and which fine-tuning leaves as they are."""
_EPS, _USUAL_EPS = re.compile(r"(\w+_)?eps(ilon)?"), 1e-5
"""What is added to a variance: bases were corrected among values that hardly matter, up to the usual one."""
_GELU = ({"gelu", "gelu_python"}, {"gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"})
"""GELU and its approximation, which are close; bases were corrected from one to the other."""
_ALIKE = (*_GELU, {"silu", "swish"})
"""Names of one function."""
_COUNTED_FROM_PADDING = ("roberta", "camembert")
"""Parts of the model types whose positions begin at the padding token's id."""
_SECTION = "values of its own"
"""The value of a field that holds others."""
_MOST_TOLD, _LONGEST, _DEEPEST, _MOST_FIELDS = 5, 80, 5, 2_000


@dataclass(frozen=True)
class ConfigDifference:
    """A field of a fine-tuned model's configuration with another value than in its base's."""

    field: str
    own: Any
    base: Any

    @property
    def is_decisive(self) -> bool:
        """Whether the two certainly compute different things with the same weights."""
        name, values = self.field.rpartition(".")[2], (self.own, self.base)
        if _EPS.fullmatch(name):
            return not all(type(value) in (int, float) and 0 <= value <= _USUAL_EPS for value in values)
        return _DECISIVE.fullmatch(name) is not None and not all(_is_one_of(value, *_GELU) for value in values)


def config_differences(tuned: Model, base: Model) -> list[ConfigDifference]:
    """Return the fields by which the two may compute different things, the decisive ones first.

    Without a configuration, as beside a bare state dict, a model is taken to be configured as the other one.
    """
    own, other = tuned.config, base.config
    if tuned.family.name != base.family.name or not own or not other:
        return []
    own, other = _same_part(own, other), _same_part(other, own)
    mine, theirs = _fields(own), _fields(other)
    if mine == theirs:
        return []
    # of another type a library might read whatever it names, and of thousands of fields for minutes
    if own.get("model_type") == other.get("model_type") and max(len(mine), len(theirs)) <= _MOST_FIELDS:
        mine, theirs = _fields(tuned.filled(own)), _fields(base.filled(other))
    # once filled in, what only one of them has is not known to the library
    shared = [ConfigDifference(name, value, theirs[name]) for name, value in mine.items() if name in theirs]
    found = [one for one in shared if not _is_same(one.own, one.base)]
    return sorted(found, key=lambda one: not one.is_decisive)


def difference_notices(found: Sequence[ConfigDifference], tuned: str) -> list[str]:
    """Say of each difference that the base's value is used."""
    told = [
        f"{tuned} is configured with {one.field} {brief(one.own)} and its base with {brief(one.base)}, which is used "
        "for both."
        for one in found[:_MOST_TOLD]
    ]
    more = len(found) - len(told)
    return [*told, *([f"{tuned} is configured otherwise than its base in {more} more fields."] if more else [])]


def other_function(found: Sequence[ConfigDifference], tuned: str, base: str) -> BaseMismatchError | None:
    """Return the error if some of the differences are decisive."""
    decisive = [one for one in found if one.is_decisive]
    if not decisive:
        return None
    first, more = decisive[0], f", and {len(decisive) - 1} more fields differ" if len(decisive) > 1 else ""
    return BaseMismatchError(
        f"'{tuned}' is configured with {first.field} {brief(first.own)} and its base '{base}' with "
        f"{brief(first.base)}{more}: with the same weights, they compute different things",
        "name the model that was fine-tuned with --base, or use --force: then both are configured as the base is",
    )


def _same_part(config: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section for the part that `other` describes, such as one tower of a CLIP, or the whole."""
    kind = other.get("model_type")
    if not isinstance(kind, str) or config.get("model_type") == kind:
        return config
    sections = {name: part for name, part in config.items() if isinstance(part, Mapping)}
    named = f"{kind.removesuffix('_model').rpartition('_')[2]}_config"  # where the section does not say its type
    found = next((part for part in sections.values() if part.get("model_type") == kind), sections.get(named))
    return config if found is None else {**found, "model_type": kind}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that may be computed with, by their path."""
    kind = str(config.get("model_type"))
    counted = any(part in kind for part in _COUNTED_FROM_PADDING)

    def values(part: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
        for name, value in ((str(name), value) for name, value in part.items()):
            if _NOT_COMPUTED.fullmatch(name[:_LONGEST]) and not (counted and name == "pad_token_id"):
                continue
            place = (*path, name[:_LONGEST])
            if not isinstance(value, Mapping):
                yield ".".join(place), _shallow(value)
            elif value and len(place) < _DEEPEST:
                yield ".".join(place), _SECTION
                yield from values(value, place)

    return dict(values(config))


def _shallow(value: Any, depth: int = 0) -> Any:
    """Return lists for tuples, without what lies deeper than any library's values."""
    if not isinstance(value, list | tuple):
        return None if isinstance(value, Mapping) else value
    return [_shallow(inner, depth + 1) for inner in value] if depth < _DEEPEST else None


def _is_same(one: Any, other: Any) -> bool:
    if any(_is_one_of(one, names) and _is_one_of(other, names) for names in _ALIKE):
        return True
    sides = [value if isinstance(value, list) else [value, value] for value in (one, other)]
    return bool(one == other or sides[0] == sides[1])  # a square is written with one side or two


def _is_one_of(value: Any, *names: set[str]) -> bool:
    return isinstance(value, str) and any(value in some for some in names)


def brief(value: Any) -> str:
    """Return a value as text, cut where it is long."""
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
