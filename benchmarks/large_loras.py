"""A LoRA over all linear layers, at the sizes of language models that people have: time by stage, and memory.

    python benchmarks/large_loras.py [--pair qwen|llama|small] [--memory 40GB] [--as-run] [--profile FILE]

32 samples of 512 tokens, bfloat16, random weights: what a port costs, not how good it is. By default the
paper's recipe; `--as-run` lets the samples choose the method and alpha, as `hf-bico port` does. `plan` says the peak of
memory before, and the run measures it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from pstats import SortKey, Stats
from typing import Any

import torch
from pairs import QWEN_1_5B, QWEN_3B, _write_lora, texts, tokenizer
from timing import PAPER, clean_up, enforced

import hf_bico
from hf_bico.alignment.memory import MemoryLimits
from hf_bico.runtime.environment import choose_device
from hf_bico.settings import read_size

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SAMPLES, LENGTH = 32, 512
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PAIRS = {
    "qwen": (
        "qwen2",
        QWEN_1_5B,
        QWEN_3B,
        {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "llama": ("llama", LLAMA_8B, LLAMA_8B, {"vocab_size": 128256, "num_key_value_heads": 8}),
    "small": ("llama", TINY, {**TINY, "hidden_size": 96}, {"vocab_size": 1000, "num_key_value_heads": 2}),
}


def write_model(folder: Path, kind: str, shape: dict[str, Any], seed: int, device: torch.device) -> Path:
    """A decoder in one file of bfloat16, whose weights are drawn on the device."""
    from accelerate import init_empty_weights
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **shape, bos_token_id=2, eos_token_id=3, pad_token_id=0)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    generator, tensors = torch.Generator(device).manual_seed(seed), dict[str, torch.Tensor]()
    for name, parameter in model.named_parameters():
        norm = parameter.ndim == 1
        drawn = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        tensors[name] = (drawn.fill_(1.0) if norm else drawn.normal_(0, 0.02, generator=generator)).cpu()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class Stages:
    """Prints when each stage begins, so that a run that is cut off has said how far it came."""

    def __init__(self, started: float) -> None:
        self.started, self.stage = started, ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self.stage:
            self.stage = stage
            print(f"{time.perf_counter() - self.started:7.1f} s: {stage}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", choices=PAIRS, default="qwen")
    parser.add_argument("--memory")
    parser.add_argument("--as-run", action="store_true")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder that keeps the models for another run")
    options = parser.parse_args()
    device = choose_device("auto")  # before anything else uses it, so that its memory comes in segments that grow
    kind, source, target, shared = PAIRS[options.pair]
    with tempfile.TemporaryDirectory() if options.keep is None else nullcontext(options.keep) as scratch:
        place = Path(scratch) / options.pair
        started = time.perf_counter()
        if not (place / "lora").is_dir():
            write_model(place / "base", kind, {**source, **shared}, 0, device)
            write_model(place / "target", kind, {**target, **shared}, 1, device)
            _write_lora(place / "lora", place / "base", MODULES)
        print(f"models made in {time.perf_counter() - started:.0f} s", flush=True)
        measure(place, device, options)


def measure(place: Path, device: torch.device, options: argparse.Namespace) -> None:
    rows = texts(SAMPLES, LENGTH, labelled=False)
    models = {"source": place / "lora", "to": place / "target", "base": place / "base", "data": rows}
    limit = None if options.memory is None else read_size(options.memory, "--memory")
    room = limit if limit or device.type == "cpu" else torch.cuda.mem_get_info()[0]
    planned = hf_bico.plan(**models).within(MemoryLimits(room, None, LENGTH, torch.bfloat16.itemsize))
    clean_up()
    recipe = {} if options.as_run else PAPER
    profiler = cProfile.Profile() if options.profile else None
    started = time.perf_counter()
    with enforced(options.memory), profiler or nullcontext():
        ported = hf_bico.port(
            **models,
            n=SAMPLES,
            max_length=LENGTH,
            dtype="bfloat16",
            memory=limit,
            evaluate=False,
            progress=Stages(started),
            **recipe,
        )
    whole = time.perf_counter() - started
    run = ported.record.run
    if not ported.held_back:
        ported.save(place.parent / f"ported {time.time():.0f}")
    estimate = planned.memory_estimate
    figures = {
        "pair": options.pair,
        "as run": options.as_run,
        "port, seconds": round(whole, 1),
        "with its files, seconds": round(time.perf_counter() - started, 1),
        "stages": run.seconds,
        "batch": run.batch_size,
        "layers": len(ported.record.sites),
        "peak, GB": round(run.peak_memory / 1e9, 2),
        "as plan said, GB": round(estimate.bytes / 1e9, 2),
        "off by": f"{estimate.bytes / run.peak_memory - 1:+.0%}",
        "passes": estimate.passes,
        "planned batch": estimate.batch_size,
        "method": ported.record.method.name,
    }
    print(json.dumps(figures, indent=1), flush=True)
    if profiler is not None:
        with options.profile.open("w") as file:
            stats = Stats(profiler, stream=file)
            stats.sort_stats(SortKey.TIME).print_stats(45)
            stats.sort_stats(SortKey.CUMULATIVE).print_stats(70)


if __name__ == "__main__":
    main()
