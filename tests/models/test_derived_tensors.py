"""Buffers in old files, and heads that are saved beside the embeddings they are tied to: no weights of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_bico
from hf_bico.porting.recording import tensor_notices

pytestmark = pytest.mark.quick

State = dict[str, Tensor]
SMALL = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
POSITIONS = 16


def gpt2(width: int) -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=2, n_head=2, n_positions=POSITIONS, **SMALL))


def llama(width: int, tied: bool = False) -> PreTrainedModel:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied, max_position_embeddings=POSITIONS, **SMALL))


def bert(width: int) -> PreTrainedModel:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=POSITIONS, **SMALL))


def t5(width: int) -> PreTrainedModel:
    sizes = {"d_model": width, "d_ff": 2 * width, "d_kv": width // 2, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, **SMALL))


def masks(dtype: torch.dtype) -> State:
    mask = torch.ones(POSITIONS, POSITIONS).tril()[None, None].to(dtype)
    blocks = [f"transformer.h.{block}.attn." for block in range(2)]
    return {f"{name}bias": mask for name in blocks} | {f"{name}masked_bias": torch.tensor(-1e4) for name in blocks}


def frequencies() -> State:
    return {f"model.layers.{block}.self_attn.rotary_emb.inv_freq": torch.rand(4) for block in range(2)}


def head_of(embeddings: str, *names: str) -> Callable[[State], State]:
    return lambda state: dict.fromkeys(names or ("lm_head.weight",), state[embeddings])


MORE: dict[str, tuple[Callable[[int], PreTrainedModel], Callable[[State], State]]] = {
    "boolean masks": (gpt2, lambda _: masks(torch.bool)),
    "masks of bytes": (gpt2, lambda _: masks(torch.uint8)),
    "masks of floats": (gpt2, lambda _: masks(torch.float32)),
    "a tied head": (gpt2, head_of("transformer.wte.weight")),
    "a Llama's tied head": (lambda width: llama(width, tied=True), head_of("model.embed_tokens.weight")),
    "rotary frequencies": (llama, lambda _: frequencies()),
    "position ids": (bert, lambda _: {"bert.embeddings.position_ids": torch.arange(POSITIONS)[None]}),
    "a T5's shared embeddings": (t5, head_of("shared.weight", "encoder.embed_tokens.weight", "lm_head.weight")),
}


def stored(model: nn.Module) -> State:
    """The weights as transformers saves them: of tied ones, the first."""
    firsts: dict[int, str] = {}
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if firsts.setdefault(tensor.data_ptr(), name) == name
    }


def write(model: PreTrainedModel, state: State, folder: Path) -> Path:
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def tuned(state: State) -> State:
    return {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in state.items()}


def said_of(source: Path, base: Path, target: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """The lines of a plan about tensors that one side lacks, and the notices of a port, an extract or a card."""
    planned = hf_bico.plan(source, to=target, base=base)
    rows = [row for row in planned.rows() if row[0] in ("missing", "extra")]
    assert (list(planned.missing), list(planned.extra)) == ([], []) or rows
    return rows, tensor_notices(hf_bico.TaskVector.from_models(source, base=base).overlap)


@pytest.mark.parametrize("where", ["source", "base", "both"])
@pytest.mark.parametrize("more", MORE)
def test_what_is_no_weight_is_neither_missed_nor_left_behind(more: str, where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, added = MORE[more]
    model, other = make(16), make(24)
    before = stored(model)
    after = tuned(before)
    base = write(model, before | (added(before) if where != "source" else {}), tmp_path / "base")
    source = write(model, after | (added(after) if where != "base" else {}), tmp_path / "source")
    target = write(other, stored(other), tmp_path / "target")
    assert said_of(source, base, target) == ([], [])
    left = hf_bico.plan(source, to=target, base=base).left
    buffers = {name for name in added(before) if "lm_head" not in name and "embed_tokens" not in name}
    assert not buffers & left.keys()
    assert not buffers & set(hf_bico.TaskVector.from_models(source, base=base))


def test_real_tensors_that_one_side_lacks_are_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = gpt2(16), gpt2(24)
    before = stored(model)
    base = write(model, before, tmp_path / "base")
    source = write(model, tuned(before) | {"adapter.weight": torch.ones(4, 4)}, tmp_path / "source")
    rows, notices = said_of(source, base, write(other, stored(other), tmp_path / "target"))
    assert rows == [("extra", "1 tensors of the source are not in the base: adapter.weight")]
    assert notices == ["Tensors of the fine-tuned model that its base lacks, left behind: 1 (adapter.weight)."]


def test_an_untied_head_that_is_missing_is_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = llama(16), llama(24)
    before = stored(model)
    base = write(model, before, tmp_path / "base")
    headless = {name: tensor for name, tensor in tuned(before).items() if name != "lm_head.weight"}
    source = write(model, headless, tmp_path / "source")
    rows, notices = said_of(source, base, write(other, stored(other), tmp_path / "target"))
    assert [row[0] for row in rows] == ["missing"]
    assert "lm_head.weight" in notices[0]
