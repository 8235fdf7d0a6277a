"""Features of sentence encoders: those that sentence-transformers itself gives, from the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer, models

from hf_bico.errors import BrokenWeightsError, RepoError, UnsupportedModelError
from hf_bico.models.families.pooling import read_pooling
from hf_bico.models.model import Model
from hf_bico.utils.samples import Text
from support.language_toys import sentences, write_encoder, write_t5

TEXTS = [*sentences(5), "emil finds blue glass. dora sells old maps. cleo.", "a"]
WRITERS = {
    "bert": lambda folder: write_encoder(folder),
    "bert without a pooler": lambda folder: write_encoder(folder, task="ForMaskedLM"),
    "roberta": lambda folder: write_encoder(folder, "roberta"),
    "distilbert": lambda folder: write_encoder(folder, "distilbert"),
}
LEGACY = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "lasttoken": "lasttoken"}


def sentence_encoder(folder: Path, kind: str, mode: Any, *after: Any) -> SentenceTransformer:
    """An encoder as sentence-transformers saves it."""
    body = models.Transformer(str(WRITERS[kind](folder / "body")))
    made = SentenceTransformer(modules=[body, models.Pooling(16, mode), *after], device="cpu")
    made.save(str(folder / "saved"))
    return made


def features(folder: Path) -> torch.Tensor:
    live = Model.open(folder, "the encoder").load(torch.device("cpu"), torch.float32)
    with torch.no_grad():
        return live.features([Text(text) for text in TEXTS])


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("mode", ["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_features_are_those_of_sentence_transformers(kind: str, mode: str, normalised: bool, tmp_path: Path) -> None:
    made = sentence_encoder(tmp_path, kind, mode, *([models.Normalize()] if normalised else []))
    expected = made.encode(TEXTS, convert_to_tensor=True)
    assert (features(tmp_path / "saved") - expected).abs().max() < 1e-6


def test_several_poolings_dense_layers_and_a_normalisation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = models.Dense(32, 12), models.Dense(12, 9, bias=False, activation_function=torch.nn.Identity())
    made = sentence_encoder(tmp_path, "bert", ("mean", "max"), *dense, models.Normalize())
    assert (features(tmp_path / "saved") - made.encode(TEXTS, convert_to_tensor=True)).abs().max() < 1e-6


@pytest.mark.parametrize("mode", LEGACY)
def test_files_of_older_releases_say_the_same(mode: str, tmp_path: Path) -> None:
    """They list every mode as true or false; and the pooling's file alone is enough."""
    made = sentence_encoder(tmp_path, "bert", mode)
    pooling = tmp_path / "saved/1_Pooling/config.json"
    modes = {f"pooling_mode_{name}": name == LEGACY[mode] for name in LEGACY.values()}
    pooling.write_text(json.dumps({"word_embedding_dimension": 16, **modes}))
    (tmp_path / "saved/modules.json").unlink()
    assert (features(tmp_path / "saved") - made.encode(TEXTS, convert_to_tensor=True)).abs().max() < 1e-6


def test_no_more_is_read_of_a_text_than_sentence_transformers_reads(tmp_path: Path) -> None:
    made = sentence_encoder(tmp_path, "bert", "mean")
    made.max_seq_length = 7
    made.save(str(tmp_path / "short"))
    again = SentenceTransformer(str(tmp_path / "short"), device="cpu")
    assert (features(tmp_path / "short") - again.encode(TEXTS, convert_to_tensor=True)).abs().max() < 1e-6


def test_a_t5_is_pooled_too(tmp_path: Path) -> None:
    folder = write_t5(tmp_path / "t5")
    plain = features(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "max"}')
    found = features(folder)
    assert (found >= plain).all()
    assert (found > plain).any()


def test_modules_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    sentence_encoder(tmp_path, "bert", "mean", models.Dense(16, 4))
    saved = tmp_path / "saved"
    weights = saved / "2_Dense/model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(BrokenWeightsError, match="'2_Dense' of 'saved' has no model.safetensors"):
        read_pooling(saved)
    (tmp_path / "elsewhere").rename(weights)
    config = json.loads((saved / "2_Dense/config.json").read_text())
    (saved / "2_Dense/config.json").write_text(json.dumps({**config, "activation_function": "os.system"}))
    with pytest.raises(UnsupportedModelError, match="the activation 'system'"):
        read_pooling(saved)
    (saved / "2_Dense/config.json").write_text(json.dumps(config))
    weights.write_bytes(b"no safetensors")
    with pytest.raises(BrokenWeightsError, match="cannot be read as safetensors"):
        read_pooling(saved)
    save_file({"linear.weight": torch.ones(4, 15)}, weights)
    with pytest.raises(BrokenWeightsError, match="reads 15 numbers, and gets 16"):
        features(saved)
    save_file({"weight": torch.ones(4, 16)}, weights)
    with pytest.raises(RepoError, match="cannot be read"):
        read_pooling(saved)
    for listed, error, said in (
        ([{"type": "x.Normalize", "path": ""}] * 21, RepoError, "there are more than 20"),
        ([{"type": "x.Transformer", "path": ""}], RepoError, "no pooling among them"),
        ([{"type": "x.Pooling", "path": "../../1_Pooling"}], RepoError, "is no folder of the model"),
        ([{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.LSTM", "path": ""}], UnsupportedModelError, "'LSTM'"),
        ({"type": 1}, RepoError, "cannot be read"),
        ([[]], RepoError, "cannot be read"),
    ):
        (saved / "modules.json").write_text(json.dumps(listed))
        with pytest.raises(error, match=said):
            read_pooling(saved)
    (saved / "modules.json").unlink()
    (saved / "1_Pooling/config.json").write_text('{"pooling_mode": "median"}')
    with pytest.raises(RepoError, match="the pooling mode is"):
        read_pooling(saved)


def test_a_pickled_encoder_keeps_its_pooling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants
    from safetensors.torch import load_file

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    made = sentence_encoder(tmp_path, "bert", "max", models.Normalize())
    saved = tmp_path / "saved"
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    live = Model.open(saved, "the encoder", allow_pickle=True).load(torch.device("cpu"), torch.float32)
    with torch.no_grad():
        found = live.features([Text(text) for text in TEXTS])
    assert (found - made.encode(TEXTS, convert_to_tensor=True)).abs().max() < 1e-6
