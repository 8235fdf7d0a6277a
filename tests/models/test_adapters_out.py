"""Adapters that are written, as peft reads them: running, merged, and beside the same change applied by hand."""

from __future__ import annotations

import copy
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_bico.errors import BaseMismatchError, BaseUnknownError, EmptyTaskVectorError, RankError
from hf_bico.models.adapters.writing import Fitted
from hf_bico.models.checkpoints import MemoryCheckpoint
from hf_bico.models.low_rank import Factors, dense, energy
from hf_bico.models.model import Model
from hf_bico.porting.task_vector import TaskVector
from support.hub import Hub
from support.hub_scenes import BASE_CARD, upload
from support.toys import CONTEXT_LENGTH, Toy, open_clip_config, random_state, write_open_clip, write_transformers

State = dict[str, Tensor]

TOY = Toy()
VOCABULARY = 40
BLOCK, TEXT_BLOCK = "visual.transformer.resblocks.0.", "transformer.resblocks.0."
FILES = ("adapter_config.json", "adapter_model.safetensors")
FALSE_ALARMS = (
    "did not match any targeted module",  # said of every rank of a parameter, which is honoured all the same
    "fan_in_fan_out is set to",  # said where Conv1D and Linear layers stand in one model; peft sets both right
)
TOKENS = torch.randint(3, 20, (3, CONTEXT_LENGTH), generator=torch.Generator().manual_seed(0))
WORDS = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))


def images(size: int = TOY.image_size) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(2))


# --- kinds of models


@dataclass(frozen=True)
class Kind:
    """A kind of model: how its folder is written, read by its own library, and run."""

    write: Callable[[Path, torch.dtype], Path]
    load: Callable[[Path, torch.dtype], nn.Module]
    run: Callable[[Any], list[Tensor]]

    def state(self, folder: Path) -> State:
        return load_file(next(folder.glob("*model.safetensors")))


def _open_clip(toy: Toy) -> Kind:
    def load(folder: Path, dtype: torch.dtype) -> nn.Module:
        import open_clip

        model = open_clip.CLIP(**open_clip_config(toy)).to(dtype)
        model.load_state_dict(load_file(folder / "open_clip_model.safetensors"), strict=False)
        return model.eval()

    def run(model: Any) -> list[Tensor]:
        pixels = images(toy.image_size).to(next(model.parameters()).dtype)
        return [model.encode_image(pixels), model.encode_text(TOKENS), model.logit_scale.exp()]

    return Kind(lambda folder, dtype: write_open_clip(folder, toy, random_state(toy, 0, dtype)), load, run)


def _transformers_clip(toy: Toy) -> Kind:
    def run(model: Any) -> list[Tensor]:
        found = model(pixel_values=images(toy.image_size).to(next(model.parameters()).dtype), input_ids=TOKENS)
        return [found.image_embeds, found.text_embeds, found.logits_per_image]

    return Kind(
        lambda folder, dtype: write_transformers(folder, toy, random_state(toy, 0, dtype)), _from_pretrained, run
    )


def _from_pretrained(folder: Path, dtype: torch.dtype) -> nn.Module:
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model: nn.Module = getattr(transformers, name).from_pretrained(folder, dtype=dtype)
    return model.eval()


def _generic(name: str, config: str, run: Callable[[Any], Tensor], **fields: Any) -> Kind:
    def write(folder: Path, dtype: torch.dtype) -> Path:
        import transformers

        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = getattr(transformers, name)(getattr(transformers, config)(**fields))
            for parameter in model.parameters():
                parameter.data += 0.2 * torch.randn(parameter.shape)
        model.to(dtype).save_pretrained(folder)
        return folder

    return Kind(write, _from_pretrained, lambda model: [run(model)])


def _logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=WORDS).logits
    return found


def _decoded(model: Any) -> Tensor:
    found: Tensor = model(input_ids=WORDS, decoder_input_ids=WORDS[:, :5]).logits
    return found


def _classified(model: Any) -> Tensor:
    found: Tensor = model(pixel_values=images().to(next(model.parameters()).dtype)).logits
    return found


_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
}
_BERT_LIKE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
_T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}

CLIPS = {"open_clip": _open_clip(TOY), "transformers CLIP": _transformers_clip(TOY)}
GENERIC = {
    "BERT": _generic("BertForSequenceClassification", "BertConfig", _logits, vocab_size=VOCABULARY, **_BERT_LIKE),
    "BERT, masked": _generic("BertForMaskedLM", "BertConfig", _logits, vocab_size=VOCABULARY, **_BERT_LIKE),
    "ViT": _generic("ViTForImageClassification", "ViTConfig", _classified, image_size=16, patch_size=4, **_BERT_LIKE),
    "GPT-2": _generic("GPT2LMHeadModel", "GPT2Config", _logits, **_GPT2, **_ENDS),
    "GPT-2, untied": _generic("GPT2LMHeadModel", "GPT2Config", _logits, tie_word_embeddings=False, **_GPT2, **_ENDS),
    "Qwen2": _generic("Qwen2ForCausalLM", "Qwen2Config", _logits, tie_word_embeddings=False, **_LLAMA_LIKE),
    "Qwen2, tied": _generic("Qwen2ForCausalLM", "Qwen2Config", _logits, tie_word_embeddings=True, **_LLAMA_LIKE),
    "Llama": _generic("LlamaForCausalLM", "LlamaConfig", _logits, **_LLAMA_LIKE),
    "T5": _generic("T5ForConditionalGeneration", "T5Config", _decoded, decoder_start_token_id=0, **_T5),
}
WIDE = {"open_clip": _open_clip(Toy(width=32)), "transformers CLIP": _transformers_clip(Toy(width=32))}
KINDS = {**CLIPS, **GENERIC}

Folders = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The base of a kind and dtype, written once."""

    @functools.cache
    def write(kind: str, dtype: torch.dtype = torch.float32, wide: bool = False) -> Path:
        maker = (WIDE if wide else KINDS)[kind]
        return maker.write(tmp_path_factory.mktemp("bases") / "base", dtype)

    return write


# --- a change, its adapter, and what peft makes of it


def tuned(state: State, names: Iterable[str], size: float = 0.05, rows: slice = slice(None)) -> State:
    """The state with noise on some tensors, or on some of their rows."""
    generator = torch.Generator().manual_seed(3)
    changed = {name: tensor.clone() for name, tensor in state.items()}
    for name in names:
        noise = size * torch.randn(state[name].shape, generator=generator)
        part = changed[name][rows] if state[name].ndim else changed[name]
        part += (noise[rows] if state[name].ndim else noise).to(part.dtype)
    return changed


def matching(state: State, pattern: str) -> list[str]:
    found = [name for name, tensor in state.items() if re.search(pattern, name) and tensor.is_floating_point()]
    assert found, pattern
    return found


def loaded(base: nn.Module, folder: Path) -> PeftModel:
    """The adapter by peft's own loader, of which every tensor found its place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    said = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning | RuntimeWarning)]
    assert [words for words in said if not any(alarm in words for alarm in FALSE_ALARMS)] == []
    return model


def greatest(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
    return max(float((one.float() - other.float()).abs().max()) for one, other in zip(a, b, strict=True))


@dataclass(frozen=True)
class Compared:
    """The three forms of one change: the adapter that runs, the merged model, and the change added by hand."""

    base: nn.Module
    full: nn.Module
    merged: nn.Module
    unmerged_error: float
    merged_error: float

    def weight_error(self, full: nn.Module | None = None) -> float:
        found, meant = self.merged.state_dict(), (full or self.full).state_dict()
        return greatest([found[name] for name in meant], meant.values())


def compare(kind: Kind, base_folder: Path, adapter: Path, fitted: Fitted, dtype: torch.dtype) -> Compared:
    base = kind.load(base_folder, dtype)
    full = copy.deepcopy(base)
    fitted.changes.apply_to(full)
    model = loaded(base, adapter)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # of CPUs without bfloat16
        meant, running = kind.run(full), kind.run(model)
        merged = model.merge_and_unload()
        afterwards = kind.run(merged)
    assert set(merged.state_dict()) == set(base.state_dict()), "merging once leaves nothing of peft behind"
    return Compared(base, full, merged, greatest(running, meant), greatest(afterwards, meant))


def write(
    kind: Kind, base: Path, folder: Path, changed: State, rank: int | float | None = None, everything: bool = False
) -> Fitted:
    vector = TaskVector.from_models(MemoryCheckpoint(changed), base=base)
    return vector.save_adapter(folder, rank, everything=everything, device="cpu")


def require_same(kind: Kind, base: Path, folder: Path, changed: State, everything: bool = False) -> Fitted:
    """At full rank and in float32, all forms are the same model."""
    fitted = write(kind, base, folder, changed, everything=everything)
    found = compare(kind, base, folder, fitted, torch.float32)
    assert found.unmerged_error <= 2e-5
    assert found.merged_error <= 2e-5
    assert found.weight_error() <= 1e-6
    if everything:
        assert set(fitted.changes) == set(fitted.vector)
        assert fitted.energy_kept == pytest.approx(1.0, abs=1e-9)
        by_hand = copy.deepcopy(found.base)
        fitted.vector.apply_to(by_hand)
        assert found.weight_error(by_hand) <= 1e-6
    with torch.no_grad():
        assert greatest(kind.run(found.full), kind.run(found.base)) > 1e-3, "the change makes a difference"
    return fitted


# --- what of the model has changed

OPEN_CLIP = {
    "q, k and v": rf"^{BLOCK}attn\.in_proj_weight",
    "q, k and v in every block": r"^visual\..*in_proj_weight",
    "q, k and v with biases": r"^visual\..*in_proj_(weight|bias)",
    "out_proj": rf"^{BLOCK}attn\.out_proj\.weight",
    "out_proj with bias": r"^visual\..*attn\.out_proj",
    "q, k and v in one block, out_proj in the other": r"resblocks\.0\.attn\.in_proj_weight|1\.attn\.out_proj\.weight",
    "mlp up": r"^visual\..*c_fc\.weight",
    "mlp down": r"^visual\..*c_proj\.weight",
    "mlp of one block": rf"^{BLOCK}mlp\.",
    "projection": r"^visual\.proj",
    "mlp and projection": r"^visual\.(proj|.*mlp)",
    "attention, mlp weights and projection": r"^visual\.(proj|.*(in_proj|c_fc|c_proj)_?\.?weight)",
    "weights": r"^visual\..*(in_proj_weight|out_proj\.weight|c_fc\.weight|c_proj\.weight)",
    "biases": r"^visual\..*(in_proj_bias|out_proj\.bias|c_fc\.bias|c_proj\.bias)",
    "one bias": rf"^{BLOCK}mlp\.c_fc\.bias",
    "q, k and v of the text tower": rf"^{TEXT_BLOCK}attn\.in_proj_weight",
    "out_proj of the text tower": rf"^{TEXT_BLOCK}attn\.out_proj",
    "mlp of the text tower": rf"^{TEXT_BLOCK}mlp",
    "mlp of both towers": r"mlp",
    "attention of both towers": r"attn\.",
    "linear layers of both towers": r"attn\.|mlp|^visual\.proj",
}
NOT_LINEAR = {
    "norms": r"\.ln_",
    "norms of the text tower": rf"^{TEXT_BLOCK}ln_|^ln_final",
    "the stem": r"^visual\.(conv1|ln_pre|class_embedding|positional_embedding)",
    "class token": r"^visual\.class_embedding",
    "text embeddings": r"^(token_embedding|positional_embedding)",
    "text projection": r"^text_projection",
    "logit scale": r"^logit_scale",
    "visual tower": r"^visual\.",
    "text tower": r"^(transformer|token_embedding|positional_embedding|ln_final|text_projection)",
    "all of it": r".",
}


@pytest.mark.parametrize("what", OPEN_CLIP)
def test_open_clip_by_what_changed(what: str, folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state = kind.state(base)
    names = matching(state, OPEN_CLIP[what])
    fitted = require_same(kind, base, tmp_path / "adapter", tuned(state, names))
    assert set(fitted.changes) == set(names)
    assert fitted.energy_kept == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("what", NOT_LINEAR)
def test_open_clip_everything_by_what_changed(what: str, folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state = kind.state(base)
    require_same(kind, base, tmp_path / "adapter", tuned(state, matching(state, NOT_LINEAR[what])), everything=True)


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_a_part_of_a_packed_matrix(part: str, folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state, start = kind.state(base), TOY.width * "qkv".index(part)
    names = [f"{BLOCK}attn.in_proj_weight"]
    changed = tuned(state, names, rows=slice(start, start + TOY.width), size=0.5)
    fitted = require_same(kind, base, tmp_path / "adapter", changed)
    assert fitted.routes.parameters == names, "held as factors"


CLIP = {
    "q": r"^vision.*q_proj\.weight",
    "q, k and v": r"^vision.*[qkv]_proj\.(weight|bias)",
    "out_proj": r"^vision.*out_proj\.weight",
    "mlp up": r"^vision.*fc1\.weight",
    "mlp down": r"^vision.*fc2",
    "projections": r"_projection",
    "visual projection and biases": r"^visual_projection|^vision.*layers.*proj\.bias",
    "weights": r"^vision.*(proj|fc\d)\.weight",
    "biases": r"^vision.*(proj|fc\d)\.bias",
    "text tower": r"^text.*(proj|fc\d)\.",
    "linear layers of both towers": r"(proj|fc\d|_projection)\.(weight|bias)$",
}


@pytest.mark.parametrize("what", CLIP)
def test_transformers_clip_by_what_changed(what: str, folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["transformers CLIP"], folders("transformers CLIP")
    state = kind.state(base)
    names = matching(state, CLIP[what])
    fitted = require_same(kind, base, tmp_path / "adapter", tuned(state, names))
    assert set(fitted.changes) == set(names)


@pytest.mark.parametrize("what", [r"norm", r"embedding", r"logit_scale", r"^vision|^visual", r"."])
def test_transformers_clip_everything_by_what_changed(what: str, folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["transformers CLIP"], folders("transformers CLIP")
    state = kind.state(base)
    require_same(kind, base, tmp_path / "adapter", tuned(state, matching(state, what)), everything=True)


@pytest.mark.parametrize(("what", "everything"), [("weight$", False), ("bias$", False), (".", False), (".", True)])
@pytest.mark.parametrize("name", GENERIC)
def test_other_models_by_what_changed(name: str, everything: bool, what: str, folders: Folders, tmp_path: Path) -> None:
    kind, base = GENERIC[name], folders(name)
    state = kind.state(base)
    if what == "bias$" and not any(key.endswith("bias") for key in state):
        pytest.skip("has no biases")
    fitted = require_same(kind, base, tmp_path / "adapter", tuned(state, matching(state, what)), everything)
    assert fitted.ranks or what == "bias$", "linear layers are held as factors"


def test_biases_of_some_layers_only_go_beside_the_factors(folders: Folders, tmp_path: Path) -> None:
    """Qwen2 has biases on q, k and v alone, which rules out peft's lora_bias."""
    kind, base = GENERIC["Qwen2"], folders("Qwen2")
    state = kind.state(base)
    fitted = require_same(kind, base, tmp_path / "adapter", tuned(state, matching(state, r"_proj\.(weight|bias)")))
    config = _config(tmp_path / "adapter")
    assert (config["bias"], config["lora_bias"]) == ("lora_only", False)
    assert not fitted.routes.whole


def test_conv1d_layers_are_written_the_right_way_round(folders: Folders, tmp_path: Path) -> None:
    kind, base = GENERIC["GPT-2"], folders("GPT-2")
    state = kind.state(base)
    # the square ones too, whose shape does not tell
    names = matching(state, r"c_(attn|proj|fc)\.weight")
    require_same(kind, base, tmp_path / "adapter", tuned(state, names))
    assert _config(tmp_path / "adapter")["fan_in_fan_out"] is True
    tensors = load_file(tmp_path / "adapter" / FILES[1])
    assert tensors["base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"].shape[0] == 48


@pytest.mark.parametrize("name", ["GPT-2", "Qwen2, tied", "T5", "BERT, masked"])
def test_a_tensor_that_stands_in_two_places_stays_one(name: str, folders: Folders, tmp_path: Path) -> None:
    kind, base = GENERIC[name], folders(name)
    state = kind.state(base)
    names = matching(state, r"wte|embed_tokens|shared|word_embeddings")
    fitted = require_same(kind, base, tmp_path / "adapter", tuned(state, names), everything=True)
    assert fitted.routes.replaced == names
    merged = loaded(kind.load(base, torch.float32), tmp_path / "adapter").merge_and_unload()
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    with pytest.raises(EmptyTaskVectorError):
        write(kind, base, tmp_path / "linear", tuned(state, names))


def test_the_doubled_out_proj_of_multihead_attention_never_reaches_a_user(folders: Folders, tmp_path: Path) -> None:
    """peft applies a LoRA of nn.MultiheadAttention's out_proj twice, or not at all before it is merged."""
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state = kind.state(base)
    for number, (what, everything) in enumerate([(r"out_proj\.weight", False), (r"attn\.", False), (r".", True)]):
        folder = tmp_path / str(number)
        changed = tuned(state, matching(state, what))
        require_same(kind, base, folder, changed, everything)
        tensors = load_file(folder / FILES[1])
        assert not [key for key in tensors if "out_proj.lora" in key]
        # as it shall be, not as a difference that could be added twice
        weights = [name for name in state if name.endswith("attn.out_proj.weight")]
        assert all(torch.equal(tensors[f"base_model.model.{name}"], changed[name]) for name in weights)
        adapted = [layer for layer in loaded(kind.load(base, torch.float32), folder).modules() if _is_lora(layer)]
        assert not [
            layer
            for layer in adapted
            if isinstance(layer.get_base_layer(), nn.MultiheadAttention) and not hasattr(layer, "parameter_name")
        ]


def test_an_attention_of_several_widths_is_not_given_to_lora(tmp_path: Path) -> None:
    """Without a packed matrix too, nn.MultiheadAttention never calls its out_proj as a module."""
    from hf_bico.models.adapters.writing import BaseName, fit_adapter, write_adapter

    model = _Pooler().eval()
    generator = torch.Generator().manual_seed(0)
    changes = {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    fitted = fit_adapter(TaskVector(changes), model, ())
    write_adapter(fitted, model, MemoryCheckpoint.of(model), BaseName("org/pooler"), tmp_path)
    full = copy.deepcopy(model)
    fitted.changes.apply_to(full)
    x = torch.randn(2, 3, 12, generator=generator)
    assert torch.allclose(loaded(model, tmp_path)(x), full(x), atol=1e-5)


class _Pooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, kdim=12, vdim=12, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.query = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.head(self.attn(self.query(x[:, :1]), x, x, need_weights=False)[0])
        return pooled


def _is_lora(module: nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer)


def _config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / FILES[0]).read_text())
    return content


# --- half precision


def ulps(a: Tensor, b: Tensor) -> int:
    """The greatest number of steps between neighbouring values of the dtype that lie between two tensors."""
    return int((_ordered(a) - _ordered(b)).abs().max())


def _ordered(tensor: Tensor) -> Tensor:
    """Whole numbers in the order of the values: neighbouring values are neighbours."""
    width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.contiguous().view(width).to(torch.int64)
    return torch.where(bits < 0, -(bits + 2 ** (8 * tensor.element_size() - 1)), bits)


def test_ulps_count_neighbours() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, 0.5], dtype=torch.bfloat16)
    assert ulps(one, one) == 0
    assert ulps(one, torch.tensor([1.0, -1.0078125, 0.0, 0.5], dtype=torch.bfloat16)) == 1
    assert ulps(torch.tensor([0.0], dtype=torch.float16), torch.tensor([-0.0], dtype=torch.float16)) == 0
    assert ulps(torch.tensor([2.0], dtype=torch.float16), torch.tensor([2.0 - 2**-9], dtype=torch.float16)) == 2


HALVES = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["open_clip", "transformers CLIP", "BERT", "GPT-2", "Qwen2"])
def test_half_precision_weights(
    name: str, dtype: torch.dtype, rank: int | None, folders: Folders, tmp_path: Path
) -> None:
    """The merged weights are those of the full form bit for bit: both add in float32 and round once."""
    kind, base = KINDS[name], folders(name, dtype)
    changed = {key: tensor.float() for key, tensor in kind.state(base).items()}
    changed = tuned(changed, matching(changed, r"(?<!logit_scale)$"))
    fitted = write(kind, base, tmp_path / "adapter", changed, rank, everything=True)
    found = compare(kind, base, tmp_path / "adapter", fitted, dtype)
    merged, meant = found.merged.state_dict(), found.full.state_dict()
    assert {tensor.dtype for tensor in merged.values() if tensor.is_floating_point()} == {dtype}
    apart = {key: ulps(merged[key], meant[key]) for key in meant if meant[key].is_floating_point()}
    assert max(apart.values()) <= (0 if rank is None else 1), apart
    with torch.no_grad():
        outputs = max(float(part.abs().max()) for part in kind.run(found.full))
    assert found.merged_error <= 20 * HALVES[dtype] * outputs
    assert found.unmerged_error <= 20 * HALVES[dtype] * outputs


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_factors_of_a_packed_matrix(dtype: torch.dtype, folders: Folders, tmp_path: Path) -> None:
    """Here peft rounds the change before it adds it: half a step of the greater of weight and change more."""
    kind, base = CLIPS["open_clip"], folders("open_clip", dtype)
    changed = {key: tensor.float() for key, tensor in kind.state(base).items()}
    names = matching(changed, r"^visual.*in_proj_weight")
    fitted = write(kind, base, tmp_path / "adapter", tuned(changed, names))
    assert fitted.routes.parameters == names
    found = compare(kind, base, tmp_path / "adapter", fitted, dtype)
    merged, meant, start = (model.state_dict() for model in (found.merged, found.full, found.base))
    for key in names:
        change = fitted.changes[key].abs()
        step = HALVES[dtype] * torch.maximum(meant[key].float().abs(), change)
        assert bool(((merged[key].float() - meant[key].float()).abs() <= 2 * step).all())
        clear = start[key].float().abs() > 2 * change
        assert ulps(merged[key][clear], meant[key][clear]) <= 1


# --- ranks


@pytest.mark.parametrize("rank", [1, 4, 0.5, 0.9])
@pytest.mark.parametrize("name", ["open_clip", "transformers CLIP", "GPT-2", "Qwen2"])
def test_what_a_rank_leaves_out_is_what_the_fit_says(
    name: str, rank: int | float, folders: Folders, tmp_path: Path
) -> None:
    kind, base = KINDS[name], folders(name)
    state = kind.state(base)
    changed = tuned(state, matching(state, r"."))
    fitted = write(kind, base, tmp_path / "adapter", changed, rank)
    found = compare(kind, base, tmp_path / "adapter", fitted, torch.float32)
    assert max(found.unmerged_error, found.merged_error) <= 2e-5, "all forms are the truncated model"
    assert found.weight_error() <= 1e-6
    merged, lost, whole = found.merged.state_dict(), 0.0, 0.0
    for key in fitted.vector:
        missing = energy(fitted.vector[key].double() - (merged[key].double() - state[key].double()))
        share = missing / energy(fitted.vector[key])
        assert 1 - share == pytest.approx(fitted.kept[key], abs=1e-5), key
        lost, whole = lost + missing, whole + energy(fitted.vector[key])
    assert 1 - lost / whole == pytest.approx(fitted.energy_kept, abs=1e-6)
    assert fitted.energy_kept < 1 - 1e-3
    for key, own in fitted.ranks.items():
        values = torch.linalg.svdvals(fitted.vector[key].double()).square()
        assert fitted.kept[key] == pytest.approx(float(values[:own].sum() / values.sum()), abs=1e-6)
        if isinstance(rank, int):
            assert own == min(rank, *fitted.vector[key].shape)
        else:
            assert float(values[: own - 1].sum() / values.sum()) < rank <= fitted.kept[key] + 1e-6


def test_ranks_that_differ_are_honoured_by_peft(folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state = kind.state(base)
    names = matching(state, r"^visual.*(in_proj_weight|c_fc\.weight|c_proj\.weight)|^transformer.*c_fc\.weight")
    fitted = write(kind, base, tmp_path / "adapter", tuned(state, names), 0.7)
    assert set(fitted.routes.low_rank) == set(names)
    assert len(set(fitted.ranks.values())) > 1
    config = _config(tmp_path / "adapter")
    assert config["rank_pattern"] == config["alpha_pattern"] != {}
    model = loaded(kind.load(base, torch.float32), tmp_path / "adapter")
    layers = [(key.removeprefix("base_model.model."), layer) for key, layer in model.named_modules()]
    for key, layer in [(key, layer) for key, layer in layers if _is_lora(layer)]:
        own = f"{key}.{getattr(layer, 'parameter_name', 'weight')}"
        assert layer.r["default"] == fitted.ranks[own]
        assert layer.scaling["default"] == 1.0
    require = compare(kind, base, tmp_path / "adapter", fitted, torch.float32)
    assert max(require.unmerged_error, require.merged_error) <= 2e-5


def test_one_rank_needs_no_patterns(folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["transformers CLIP"], folders("transformers CLIP")
    state = kind.state(base)
    write(kind, base, tmp_path / "adapter", tuned(state, matching(state, r"^vision.*fc\d\.weight")), 3)
    config = _config(tmp_path / "adapter")
    assert (config["r"], config["lora_alpha"], config["rank_pattern"], config["alpha_pattern"]) == (3, 3, {}, {})


@pytest.mark.parametrize("rank", [1.0, 0, -1, True, "16", float("nan"), 0.0, 1.5, -0.5, float("inf"), [4]])
def test_a_rank_that_is_none_is_refused(rank: Any, folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state = kind.state(base)
    with pytest.raises(RankError, match=re.escape(repr(rank))):
        write(kind, base, tmp_path / "adapter", tuned(state, [f"{BLOCK}mlp.c_fc.weight"]), rank)
    assert not (tmp_path / "adapter").exists()


# --- in and out again


@pytest.mark.parametrize(("rank", "everything"), [(None, True), (3, False), (0.8, True)])
@pytest.mark.parametrize("name", ["open_clip", "transformers CLIP", "GPT-2", "Qwen2", "T5", "ViT"])
def test_reading_back_gives_the_same_changes(
    name: str, rank: int | float | None, everything: bool, folders: Folders, tmp_path: Path
) -> None:
    kind, base = KINDS[name], folders(name)
    state = kind.state(base)
    changed = tuned(state, matching(state, r"."))
    fitted = write(kind, base, tmp_path / "adapter", changed, rank, everything)
    back = TaskVector.from_adapter(tmp_path / "adapter", base=base)
    # ViT's files have other names than its modules
    own = Model.open(base, "the base").layout.own_names
    by_own = {own.get(key, key): back.change(key) for key in back}
    assert set(by_own) == set(fitted.changes)
    assert greatest((dense(change) for change in by_own.values()), (fitted.changes[key] for key in by_own)) <= 1e-6
    for key, rank_there in fitted.ranks.items():
        change = by_own[key]
        assert isinstance(change, Factors)
        assert change.rank == rank_there


@pytest.mark.parametrize("name", ["transformers CLIP", "GPT-2", "Qwen2"])
def test_a_lora_keeps_its_ranks_and_its_bytes_of_factors(name: str, folders: Folders, tmp_path: Path) -> None:
    kind, base = KINDS[name], folders(name)
    state = kind.state(base)
    first = write(kind, base, tmp_path / "first", tuned(state, matching(state, r"weight$")), 0.8)
    vector = TaskVector.from_adapter(tmp_path / "first", base=base)
    again = vector.save_adapter(tmp_path / "again", base=base)
    assert again.ranks == first.ranks
    assert again.energy_kept == pytest.approx(1.0, abs=1e-9)
    one, other = (load_file(tmp_path / folder / FILES[1]) for folder in ("first", "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_sum_of_loras_has_the_sum_of_their_ranks(folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["transformers CLIP"], folders("transformers CLIP")
    state = kind.state(base)
    names = matching(state, r"^vision.*fc\d\.weight")
    write(kind, base, tmp_path / "one", tuned(state, names), 2)
    vector = TaskVector.from_adapter(tmp_path / "one", base=base)
    both = (0.5 * vector + vector).save_adapter(tmp_path / "both")
    assert set(both.ranks.values()) == {4}
    back = (0.5 * vector + vector).save_adapter(tmp_path / "back", rank=2)
    assert back.energy_kept == pytest.approx(1.0, abs=1e-6), "the sum is of rank 2 all the same"


# --- bases


def test_a_base_that_is_a_loaded_model(folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["transformers CLIP"], folders("transformers CLIP")
    state = kind.state(base)
    changed = tuned(state, matching(state, r"^vision"))
    module = kind.load(base, torch.float32)
    by_module = TaskVector.from_models(MemoryCheckpoint(changed), base=module)
    by_module.save_adapter(tmp_path / "module", 3)
    write(kind, base, tmp_path / "folder", changed, 3)
    one, other = (load_file(tmp_path / folder / FILES[1]) for folder in ("module", "folder"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert greatest(module.state_dict().values(), kind.load(base, torch.float32).state_dict().values()) == 0.0


def test_a_base_may_be_named_when_it_is_saved(folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state = kind.state(base)
    vector = TaskVector({f"{BLOCK}mlp.c_fc.weight": torch.ones(32, 16)})
    with pytest.raises(BaseUnknownError, match="base="):
        vector.save_adapter(tmp_path / "unknown")
    fitted = vector.save_adapter(tmp_path / "named", 1, base=base)
    assert fitted.ranks == {f"{BLOCK}mlp.c_fc.weight": 1}
    assert fitted.energy_kept == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(BaseMismatchError, match="no tensor 'elsewhere'"):
        TaskVector({"elsewhere": torch.ones(2)}).save_adapter(tmp_path / "other", base=base)
    assert state.keys() >= set(vector)


def test_nothing_to_hold_is_refused(folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state = kind.state(base)
    for changed in (state, tuned(state, ["visual.ln_post.weight"])):
        with pytest.raises(EmptyTaskVectorError):
            write(kind, base, tmp_path / "adapter", changed)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_is_left_out_counts_as_lost(folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state = kind.state(base)
    names = ["visual.ln_post.weight", f"{BLOCK}mlp.c_fc.weight"]
    fitted = write(kind, base, tmp_path / "adapter", tuned(state, names))
    assert fitted.routes.left == ["visual.ln_post.weight"]
    assert (fitted.kept["visual.ln_post.weight"], fitted.kept[names[1]]) == (0.0, 1.0)
    energies = [fitted.vector.energy(name) for name in names]
    assert fitted.energy_kept == pytest.approx(energies[1] / sum(energies))


# --- a merged LoRA found again


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("transformers CLIP", r"vision_model\..*(q_proj|k_proj|v_proj|out_proj|fc1|fc2)|visual_projection"),
        ("open_clip", r"visual\..*(c_fc|c_proj)"),
    ],
)
def test_the_lora_that_was_merged_is_found_again(name: str, targets: str, folders: Folders, tmp_path: Path) -> None:
    kind, base = WIDE[name], folders(name, wide=True)
    model = get_peft_model(kind.load(base, torch.float32), LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    generator = torch.Generator().manual_seed(4)
    meant: dict[str, Tensor] = {}
    for key, layer in model.named_modules():
        if _is_lora(layer):
            for half in (layer.lora_A["default"], layer.lora_B["default"]):
                half.weight.data = 0.05 * torch.randn(half.weight.shape, generator=generator)
            own = f"{key.removeprefix('base_model.model.')}.weight"
            meant[own] = layer.get_delta_weight("default").detach()
            assert meant[own].norm() >= 1e-2 * layer.get_base_layer().weight.norm()
    changed = {key: tensor.clone() for key, tensor in model.merge_and_unload().state_dict().items()}
    fitted = write(kind, base, tmp_path / "adapter", changed, 8)
    assert set(fitted.changes) == set(meant)
    assert set(fitted.ranks.values()) == {8}
    for key, product in meant.items():
        assert (fitted.changes[key] - product).norm() <= 1e-4 * product.norm(), key
    assert fitted.energy_kept > 1 - 1e-6
    found = compare(kind, base, tmp_path / "adapter", fitted, torch.float32)
    assert max(found.unmerged_error, found.merged_error) <= 1e-4


# --- what the files say


def test_the_configuration_names_the_base_and_its_revision(hub: Hub, folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["transformers CLIP"], folders("transformers CLIP")
    commit = upload(hub, "laion/base", base, BASE_CARD)
    state = kind.state(base)
    changed = MemoryCheckpoint(tuned(state, matching(state, r"^vision.*(proj|fc\d)\.weight")))
    vector = TaskVector.from_models(changed, base="laion/base")
    fitted = vector.save_adapter(tmp_path / "adapter", 4)
    config = PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert (config.base_model_name_or_path, config.revision) == ("laion/base", commit)
    assert (config.inference_mode, config.init_lora_weights, str(config.peft_type)) == (True, True, "PeftType.LORA")
    model = AutoPeftModel.from_pretrained(str(tmp_path / "adapter")).eval()
    full = kind.load(base, torch.float32)
    fitted.changes.apply_to(full)
    with torch.no_grad():
        assert greatest(kind.run(model), kind.run(full)) <= 2e-5
    back = TaskVector.from_adapter(tmp_path / "adapter")
    assert set(back) == set(fitted.changes), "by the base that the adapter names"
    saved = tmp_path / "again"
    model.save_pretrained(str(saved))
    one, other = (load_file(folder / FILES[1]) for folder in (tmp_path / "adapter", saved))
    assert all(torch.equal(one[key], other[key]) for key in one), "peft itself writes the same tensors"


def test_the_configuration_says_nothing_of_this_machine(folders: Folders, tmp_path: Path) -> None:
    kind, base = CLIPS["open_clip"], folders("open_clip")
    state = kind.state(base)
    write(kind, base, tmp_path / "adapter", tuned(state, [f"{BLOCK}mlp.c_fc.weight"]), 2)
    assert str(base.parent) not in (tmp_path / "adapter" / FILES[0]).read_text()
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == sorted(FILES)
