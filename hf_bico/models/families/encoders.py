"""Encoders of text, by any prefix of files: BERT and its namesakes (MiniLM, RoBERTa), and DistilBERT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hf_bico.models.families.base import EMBEDDINGS, NORM, HeadModules, Shapes, linear_site
from hf_bico.models.families.blueprints import (
    CLASSIFICATION_HEAD,
    POSITIONS,
    PRETRAINING_HEAD,
    BackboneFamily,
    Blueprint,
    require_class,
)
from hf_bico.models.families.pretrained import first_architecture
from hf_bico.models.families.text_models import EncoderModel
from hf_bico.models.layout import Layout, Site

UNUSED_POOLER = "unused pooler"
POOLER = "pooler"
_BERT = Blueprint(
    prefixes=("bert.", "roberta.", ""),
    stem="encoder.layer.",
    modules={
        "attn.q": "attention.self.query",
        "attn.k": "attention.self.key",
        "attn.v": "attention.self.value",
        "attn.out": "attention.output.dense",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
    },
    beside=r"(?:attention\.)?output\.LayerNorm\.(?:weight|bias|gamma|beta)",
    needs=("embeddings.word_embeddings.weight",),
)
_DISTILBERT = Blueprint(
    prefixes=("distilbert.", ""),
    stem="transformer.layer.",
    modules={
        "attn.q": "attention.q_lin",
        "attn.k": "attention.k_lin",
        "attn.v": "attention.v_lin",
        "attn.out": "attention.out_lin",
        "mlp.up": "ffn.lin1",
        "mlp.down": "ffn.lin2",
    },
    beside=r"(?:sa|output)_layer_norm\.(?:weight|bias)",
    needs=("embeddings.word_embeddings.weight",),
)

_BARE = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "distilbert": "DistilBert",
}
"""The beginning of a class's name by the type of model."""
_ROBERTA_HEAD = {"hidden": "classifier.dense", "out": "classifier.out_proj", "activation": "tanh"}


class Encoder(BackboneFamily):
    name = "encoder"
    blueprints = (_BERT, _DISTILBERT)
    objectives = ("classification",)
    pipeline_tag = "text-classification"
    auto_class = "AutoModelForSequenceClassification"
    head_modules: ClassVar[Mapping[str, HeadModules]] = {
        "bert": HeadModules("BertForSequenceClassification", pooler="bert.pooler.dense"),
        "roberta": HeadModules("RobertaForSequenceClassification", **_ROBERTA_HEAD),
        "xlm-roberta": HeadModules("XLMRobertaForSequenceClassification", **_ROBERTA_HEAD),
        "distilbert": HeadModules("DistilBertForSequenceClassification", hidden="pre_classifier", activation="relu"),
    }
    live = EncoderModel
    reasons: ClassVar[Mapping[str, str]] = {
        r"^(pre_)?classifier\.": CLASSIFICATION_HEAD,
        r"^(cls|lm_head|vocab_\w+)\.": PRETRAINING_HEAD,
        r"(^|\.)pooler\.": UNUSED_POOLER,
        r"LayerNorm\.|layer_norm\.": NORM,
        r"(^|\.)position_(embeddings|ids)": POSITIONS,
        r"(^|\.)embeddings\.": EMBEDDINGS,
    }

    def outside_sites(self, blueprint: Blueprint, shapes: Shapes, prefix: str, config: Mapping[str, Any]) -> list[Site]:
        """BERT's pooler, which reads one row of each text; classifiers of the others do not read theirs."""
        weight, bias = f"{prefix}pooler.dense.weight", f"{prefix}pooler.dense.bias"
        if blueprint is not _BERT or _kind(config) not in ("Bert", "") or weight not in shapes:
            return []
        return [linear_site(shapes, weight, bias, name=POOLER, role=POOLER, block=None)]

    def backbone(
        self, folder: Path, config: Mapping[str, Any], shapes: Shapes, layout: Layout
    ) -> tuple[str, dict[str, Any]]:
        """Keep the pooler where it is read; DistilBERT has none, and no option for it."""
        named = require_class(f"{_kind(config)}Model", folder, config)
        pooled = any(site.role == POOLER for site in layout.sites)
        return named, {} if named == "DistilBertModel" else {"add_pooling_layer": pooled}


def _kind(config: Mapping[str, Any]) -> str:
    """Return the start of its class names; empty if the configuration does not say."""
    by_type = _BARE.get(str(config.get("model_type")))
    return by_type or re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", first_architecture(config) or "")
