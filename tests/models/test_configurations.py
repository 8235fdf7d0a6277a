"""A fine-tune's configuration beside its base's: what is computed with is refused or said, what is not is silent.

The configurations are those of models that people use, as they lie on the Hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_bico.hub.client import RepoFiles
from hf_bico.models.checkpoints import MemoryCheckpoint
from hf_bico.models.configurations import config_differences, difference_notices, other_function
from hf_bico.models.families import family_named
from hf_bico.models.layout import Layout
from hf_bico.models.model import Model
from support.toys import WRITERS, Toy, open_clip_config, random_state

Config = dict[str, Any]
TOY = Toy()

BERT: Config = {
    **{"architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False},
    **{"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02},
    **{"intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert"},
    **{"num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute"},
    **{"transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522},
}
BERT_OF_2019 = {
    name: value
    for name, value in BERT.items()
    if name not in ("gradient_checkpointing", "position_embedding_type", "transformers_version", "use_cache")
}
CLASSIFIER: Config = {
    **{"architectures": ["BertForSequenceClassification"], "_name_or_path": "bert-base-uncased", "use_cache": False},
    **{"finetuning_task": "mrpc", "id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}},
    **{"problem_type": "single_label_classification", "torch_dtype": "float16", "classifier_dropout": 0.2},
}
ROBERTA: Config = {
    **{"architectures": ["RobertaForMaskedLM"], "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu"},
    **{"hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-5, "max_position_embeddings": 514},
    **{"model_type": "roberta", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1},
    **{"type_vocab_size": 1, "vocab_size": 50265},
}
DISTILBERT: Config = {
    **{"activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768},
    **{"dropout": 0.1, "hidden_dim": 3072, "max_position_embeddings": 512, "model_type": "distilbert", "n_heads": 12},
    **{"n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False},
    **{"tie_weights_": True, "vocab_size": 30522},
}
GPT2: Config = {
    **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1},
    **{"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "layer_norm_epsilon": 1e-5, "n_ctx": 1024},
    **{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1},
    **{"summary_type": "cls_index", "task_specific_params": {"text-generation": {"do_sample": True}}},
}
LLAMA: Config = {
    **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128001},
    **{"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072},
    **{"mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32},
    **{"num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "rope_scaling": {
        **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
        "original_max_position_embeddings": 8192,
    },
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256},
}
MISTRAL: Config = {
    **{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"},
    **{"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral"},
    **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    **{"rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000},
}
QWEN: Config = {
    **{"architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu"},
    **{"hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24},
    **{"model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768, "tie_word_embeddings": True},
    **{"use_mrope": False, "use_sliding_window": False, "vocab_size": 151936},
}
GEMMA: Config = {
    **{"head_dim": 256, "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048, "model_type": "gemma"},
    **{"intermediate_size": 16384, "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1},
    **{"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 256000},
}
T5: Config = {
    **{"architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512},
    **{"decoder_start_token_id": 0, "dropout_rate": 0.1, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-6},
    **{"model_type": "t5", "n_positions": 512, "num_heads": 8, "num_layers": 6, "output_past": True},
    **{"pad_token_id": 0, "relative_attention_num_buckets": 32, "vocab_size": 32128},
}
VIT: Config = {
    **{"architectures": ["ViTModel"], "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu", "hidden_size": 768},
    **{"image_size": 224, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "model_type": "vit"},
    **{"num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": True},
}
TOWER: Config = {
    **{"hidden_act": "quick_gelu", "hidden_size": 768, "image_size": 224, "intermediate_size": 3072},
    **{"layer_norm_eps": 1e-5, "model_type": "clip_vision_model", "num_attention_heads": 12, "num_hidden_layers": 12},
    **{"patch_size": 16, "projection_dim": 512},
}
CLIP: Config = {
    **{"architectures": ["CLIPModel"], "logit_scale_init_value": 2.6592, "model_type": "clip", "projection_dim": 512},
    # what older releases wrote into every part
    "vision_config": {**TOWER, "is_decoder": False, "add_cross_attention": False, "pruned_heads": {}, "top_k": 50},
    "text_config": {"model_type": "clip_text_model", "hidden_act": "quick_gelu", "eos_token_id": 2},
    **{"text_config_dict": None, "vision_config_dict": None},
}
OPEN_CLIP: Config = {
    "model_cfg": {
        "embed_dim": 512,
        "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12},
    },
    "preprocess_cfg": {"mean": [0.48, 0.45, 0.4], "std": [0.26, 0.26, 0.27]},
}


def _cfg(**vision: Any) -> Config:
    """The configuration of an open_clip model, with other fields of its vision tower."""
    model = OPEN_CLIP["model_cfg"]
    return {**OPEN_CLIP, "model_cfg": {**model, "vision_cfg": {**model["vision_cfg"], **vision}}}


def _text_cfg(**text: Any) -> Config:
    model = OPEN_CLIP["model_cfg"]
    return {**OPEN_CLIP, "model_cfg": {**model, "text_cfg": {**model["text_cfg"], **text}}}


FAMILY = {"gpt2": "GPT-2", "t5": "T5", "vit": "ViT", "clip": "transformers CLIP", "None": "open_clip ViT"}
FAMILY |= dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), "decoder")
FAMILY |= dict.fromkeys(("bert", "roberta", "distilbert"), "encoder")


def _found(base: Config, tuned: Config, folder: Path) -> tuple[str, list[str]]:
    """How it ends, and the fields that are told of."""
    family = family_named(FAMILY[str(base.get("model_type"))])
    assert family is not None
    models = []
    for name, config in (("tuned", tuned), ("base", base)):
        (folder / name).mkdir()
        (folder / name / family.config_file).write_text(json.dumps(config))
        layout = Layout(family.name, (), 0, None, None, {})
        place = RepoFiles(name, folder / name, {})
        models.append(Model(name=name, checkpoint=MemoryCheckpoint({}), family=family, layout=layout, place=place))
    found = config_differences(*models)
    refusal = other_function(found, "tuned", "base")
    assert len(difference_notices(found, "tuned")) == len(found)
    if refusal is not None:
        assert f"with {found[0].field} " in refusal.cause
        assert "--force" in refusal.remedy
    return "refused" if refusal else "said" if found else "silent", [one.field.rpartition(".")[2] for one in found]


@pytest.mark.parametrize(
    ("base", "tuned"),
    [
        pytest.param(BERT, {**BERT, **CLASSIFIER}, id="a classifier over a masked language model"),
        pytest.param(BERT_OF_2019, {**BERT, **CLASSIFIER}, id="a classifier over an old file"),
        pytest.param(BERT, {**BERT_OF_2019, **CLASSIFIER}, id="an old classifier over a new file"),
        pytest.param(BERT, {"model_type": "bert", **CLASSIFIER}, id="only what is no default"),
        pytest.param(ROBERTA, {**ROBERTA, "position_embedding_type": "absolute", "num_labels": 3}, id="RoBERTa"),
        pytest.param(DISTILBERT, {**DISTILBERT, "finetuning_task": "sst-2", "output_past": True}, id="DistilBERT"),
        pytest.param(GPT2, {**GPT2, "pad_token_id": 50256, "scale_attn_weights": True, "n_inner": None}, id="GPT-2"),
        pytest.param(
            LLAMA, {**LLAMA, "eos_token_id": [1, 8], "unsloth_version": "2024.9", "head_dim": 128}, id="Llama"
        ),
        pytest.param(LLAMA, {**LLAMA, "tie_word_embeddings": True, "hidden_act": "swish"}, id="only the head"),
        pytest.param(MISTRAL, {**MISTRAL, "attention_dropout": 0.1, "use_cache": False}, id="Mistral"),
        pytest.param(QWEN, {**QWEN, "max_window_layers": 21, "sliding_window": None, "rope_scaling": None}, id="Qwen2"),
        pytest.param(
            GEMMA,
            {**GEMMA, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
            id="Gemma, as its base was corrected",
        ),
        pytest.param(T5, {**T5, "feed_forward_proj": "relu", "relative_attention_max_distance": 128}, id="T5"),
        pytest.param(VIT, {**VIT, "encoder_stride": 16, "image_size": [224, 224], "pooler_act": "tanh"}, id="ViT"),
        pytest.param(CLIP, TOWER, id="a CLIP's tower"),
        pytest.param(
            CLIP, {**TOWER, "attention_dropout": 0.1, "architectures": ["CLIPVisionModel"]}, id="a tower alone"
        ),
        pytest.param(OPEN_CLIP, _cfg(head_width=64, pool_type="tok", norm_kwargs={"eps": 1e-5}), id="spelled out"),
        pytest.param(OPEN_CLIP, _cfg(patch_dropout=0.5, output_tokens=True), id="trained otherwise"),
        pytest.param(BERT, {}, id="no configuration"),
    ],
)
def test_a_legitimate_fine_tune_is_neither_refused_nor_talked_about(
    base: Config, tuned: Config, tmp_path: Path
) -> None:
    assert _found(base, tuned, tmp_path) == ("silent", [])


@pytest.mark.parametrize(
    ("base", "tuned", "field"),
    [
        (BERT, {**BERT, "hidden_act": "relu"}, "hidden_act"),
        (BERT, {**BERT, "num_attention_heads": 8}, "num_attention_heads"),
        (BERT, {**BERT, "layer_norm_eps": 1e-3}, "layer_norm_eps"),
        (BERT, {**BERT, "is_decoder": True}, "is_decoder"),
        (BERT, {**BERT, "position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({**BERT, "hidden_act": "relu"}, {"model_type": "bert"}, "hidden_act"),
        (ROBERTA, {**ROBERTA, "pad_token_id": 0}, "pad_token_id"),
        (DISTILBERT, {**DISTILBERT, "activation": "relu"}, "activation"),
        (DISTILBERT, {**DISTILBERT, "n_heads": 6}, "n_heads"),
        (GPT2, {**GPT2, "scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2, {**GPT2, "n_head": 6}, "n_head"),
        (LLAMA, {**LLAMA, "rope_theta": 1e6}, "rope_theta"),
        (LLAMA, {**LLAMA, "head_dim": 64}, "head_dim"),
        (T5, {**T5, "relative_attention_max_distance": 64}, "relative_attention_max_distance"),
        (T5, {**T5, "feed_forward_proj": "gated-gelu"}, "feed_forward_proj"),
        (VIT, {**VIT, "num_attention_heads": 6}, "num_attention_heads"),
        (CLIP, {**TOWER, "hidden_act": "gelu"}, "hidden_act"),
        (CLIP, {**CLIP, "text_config": {**CLIP["text_config"], "hidden_act": "gelu"}}, "hidden_act"),
        (OPEN_CLIP, {**OPEN_CLIP, "model_cfg": {**OPEN_CLIP["model_cfg"], "quick_gelu": True}}, "quick_gelu"),
        (OPEN_CLIP, _cfg(head_width=32), "head_width"),
        (OPEN_CLIP, _cfg(act_kwargs={"approximate": "tanh"}), "act_kwargs"),
        (OPEN_CLIP, _cfg(norm_kwargs={"eps": 0.1}), "eps"),
        (OPEN_CLIP, _text_cfg(no_causal_mask=True), "no_causal_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_decides_what_is_computed_is_refused(
    base: Config, tuned: Config, field: str, tmp_path: Path
) -> None:
    ending, fields = _found(base, tuned, tmp_path)
    assert (ending, fields[0]) == ("refused", field)


@pytest.mark.parametrize(
    ("base", "tuned", "field"),
    [
        (BERT, {**BERT, "hidden_act": "gelu_new"}, "hidden_act"),
        (BERT, {**BERT, "hidden_size": "wide"}, "hidden_size"),  # transformers does not read that
        (LLAMA, {**LLAMA, "rms_norm_eps": 1e-6}, "rms_norm_eps"),
        (LLAMA, {**LLAMA, "max_position_embeddings": 262144}, "max_position_embeddings"),
        (LLAMA, {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "factor"),
        (MISTRAL, {**MISTRAL, "sliding_window": None}, "sliding_window"),
        (MISTRAL, {**MISTRAL, "model_type": "llama"}, "model_type"),
        (QWEN, {**QWEN, "use_sliding_window": True, "max_window_layers": 12}, "layer_types"),
        ({**BERT, "model_type": "nameless", "twist": 1}, {**BERT, "model_type": "nameless", "twist": 2}, "twist"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_may_change_what_is_computed_is_said(
    base: Config, tuned: Config, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILY, "nameless", "encoder")
    ending, fields = _found(base, tuned, tmp_path)
    assert ending == "said"
    assert field in fields


def test_loaded_open_clip_models_show_how_they_compute(tmp_path: Path) -> None:
    import open_clip

    config = open_clip_config(TOY)
    config["text_cfg"].pop("hf_tokenizer_name")
    folder = WRITERS["open_clip"](tmp_path / "base", TOY, random_state(TOY, 0))

    def fields(base: Any, **model: Any) -> list[tuple[str, bool]]:
        tuned = Model.open(open_clip.CLIP(**{**config, **model}), "the fine-tuned model")
        found = config_differences(tuned, Model.open(base, "the base", "open_clip"))
        return [(one.field, one.is_decisive) for one in found]

    vision = {**config["vision_cfg"], "head_width": 2 * config["vision_cfg"]["head_width"]}
    for base in (folder, open_clip.CLIP(**config), open_clip.CustomTextCLIP(**config)):
        assert fields(base) == []
        assert fields(base, quick_gelu=True) == [("model_cfg.quick_gelu", True)]
        assert fields(base, vision_cfg=vision) == [("model_cfg.vision_cfg.head_width", True)]
        assert fields(base, vision_cfg={**config["vision_cfg"], "norm_kwargs": {"eps": 0.1}}) == [
            ("model_cfg.vision_cfg.norm_kwargs.eps", True)
        ]
        assert fields(base, text_cfg={**config["text_cfg"], "pool_type": "last"}) == [
            ("model_cfg.text_cfg.pool_type", True)
        ]
