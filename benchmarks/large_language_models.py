"""Time and memory of a port between language models of real size: Qwen2.5-1.5B to 3B by their shapes, random weights.

A LoRA of rank 16 on the attention of the one is carried to the other with 32 samples of 512 tokens, in bfloat16. The
numbers say what a port costs, not how good it is. Needs a GPU and about 12 GB of disk:

    python benchmarks/large_language_models.py

`--small` does the same with tiny models, to see that it runs; `--modules` names the layers of the LoRA.
"""

from __future__ import annotations

import argparse
import random
import string
import tempfile
from pathlib import Path
from typing import Any

import torch

import hf_bico

WORDS = 40
SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
}
SMALL: dict[str, dict[str, Any]] = {
    "1.5B": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6},
    "3B": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8},
}


def tokenizer() -> Any:
    """Single characters: what the tokens are does not change what a port costs."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    tokens = ("<pad>", "<unk>", "</s>", *string.printable)
    made = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")


def write_model(folder: Path, shape: dict[str, Any], vocabulary: int, seed: int) -> Path:
    """A Qwen2 of this shape with random weights, in bfloat16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=vocabulary, num_key_value_heads=2, tie_word_embeddings=True, **shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.cpu().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_lora(folder: Path, base: Path, modules: list[str], rank: int) -> Path:
    """A LoRA whose both factors are random, small beside the weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16),
        LoraConfig(r=rank, lora_alpha=rank, target_modules=modules, task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=1e-3)
    model.save_pretrained(folder)
    return folder


def texts(count: int, length: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(WORDS)]
    return [{"text": " ".join(draw.choices(words, k=length))[:length]} for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--modules", default="q_proj,k_proj,v_proj,o_proj")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    options = parser.parse_args()
    shapes, vocabulary = (SMALL, 256) if options.small else (SHAPES, 151936)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        base = write_model(place / "qwen2.5-1.5b", shapes["1.5B"], vocabulary, seed=0)
        target = write_model(place / "qwen2.5-3b", shapes["3B"], vocabulary, seed=1)
        lora = write_lora(place / "lora", base, options.modules.split(","), rank=16)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ported = hf_bico.port(
            lora,
            to=target,
            base=base,
            data=texts(options.samples + 8, options.length),
            n=options.samples,
            max_length=options.length,
            batch_size=options.batch_size,
            dtype="bfloat16",
        )
        saved = ported.save(place / "ported")
        size = sum(file.stat().st_size for file in saved.iterdir())
    run = ported.record.run
    print(
        f"{options.samples} samples of {options.length} tokens, LoRA of rank 16 on {options.modules}, on {run.device}"
    )
    print(f"{len(ported.record.sites)} sites; {ported.form!r}; {size / 1e6:.1f} MB written")
    for stage, seconds in run.seconds.items():
        print(f"{stage:<10} {seconds:8.1f} s")
    print(f"{'in all':<10} {sum(run.seconds.values()):8.1f} s")
    print(f"peak memory {run.peak_memory / 1e9:.1f} GB in {run.dtype}, batches of {run.batch_size}")


if __name__ == "__main__":
    main()
