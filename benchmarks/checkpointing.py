"""Our activation checkpointing beside `torch.utils.checkpoint`, in time and peak memory.

    python benchmarks/checkpointing.py            # sizes for the machine: a CUDA device, or the CPU
    python benchmarks/checkpointing.py --cpu      # the CPU in any case

Two transformers of random weights run forward and backward as in calibration: every linear layer of every block is
hooked, parameters have no gradients. Whole blocks are checkpointed, or their MLPs alone. Both ways are timed in turn,
on the same inputs, in one process; `none` keeps all activations. Columns:

    ms          the quickest of several passes; on the CPU, time of the process, whatever else the machine does
    peak        memory above that of the resting model, MB: of the allocator on CUDA, of the process (Linux) on the CPU
    time ratio, memory ratio   torch's way over ours: above one, ours is better
    difference  largest difference of the gradients between the two ways, over the largest gradient
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from hf_bico.models.families.decoders import Decoder
from hf_bico.models.families.live import LiveModel
from hf_bico.models.families.vit import Vit
from hf_bico.models.hooks import Stream
from hf_bico.models.layout import Site

WAYS = ("none", "torch", "ours")
PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Sizes:
    """Shapes of the models and of their batches."""

    width: int = 2048
    blocks: int = 12
    texts: int = 4
    tokens: int = 512
    image_width: int = 768
    images: int = 16
    repeats: int = 10


ON_CPU = Sizes(width=256, blocks=4, texts=4, tokens=128, image_width=192, images=4, repeats=5)


@dataclass(frozen=True)
class Measurement:
    """Seconds and bytes of one way, and the gradients that it found."""

    seconds: float
    peak: int
    gradients: dict[str, Tensor]


def language_model(sizes: Sizes, device: torch.device) -> tuple[LiveModel, Callable[[], Tensor]]:
    """Return a Llama and the loss of its next tokens."""
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=sizes.width,
        intermediate_size=4 * sizes.width,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.width // 128,
        num_key_value_heads=sizes.width // 128,
    )
    tokens = torch.randint(2000, (sizes.texts, sizes.tokens)).to(device)
    module = LlamaForCausalLM(config).to(device).eval()
    return Decoder().wrap(module), lambda: module(input_ids=tokens, labels=tokens).loss


def vision_model(sizes: Sizes, device: torch.device) -> tuple[LiveModel, Callable[[], Tensor]]:
    """Return a ViT and the loss of its classes."""
    config = ViTConfig(
        hidden_size=sizes.image_width,
        intermediate_size=4 * sizes.image_width,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.image_width // 64,
        num_labels=10,
    )
    images = torch.randn(sizes.images, 3, 224, 224, device=device)
    labels = torch.arange(sizes.images, device=device) % 10
    module = ViTForImageClassification(config).to(device).eval()
    return Vit().wrap(module), lambda: module(pixel_values=images, labels=labels).loss


MODELS = {"Llama": language_model, "ViT": vision_model}


@contextmanager
def hooked(model: LiveModel, way: str, whole_blocks: bool) -> Iterator[Stream]:
    """Hook the sites of all blocks, and checkpoint in this way."""
    stream = Stream()
    with model.observed([site for site in model.layout.sites if site.block is not None], stream):
        if way == "none":
            yield stream
            return
        # a loss that may look into blocks is left to torch
        with model.checkpointed(stream, whole_blocks, looked_into=way == "torch"):
            yield stream


def run_once(stream: Stream, loss: Callable[[], Tensor], gradients: Callable[[Site, Tensor], None]) -> None:
    stream.listen()
    stream.differentiate(loss(), gradients)


def measure(
    model: LiveModel, loss: Callable[[], Tensor], whole_blocks: bool, repeats: int, device: torch.device
) -> dict[str, Measurement]:
    """Measure every way; they take turns, so that other work on the machine strikes all of them."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks: dict[str, int] = {}
    gradients: dict[str, dict[str, Tensor]] = {}
    for repeat in range(repeats + 1):
        for way in WAYS:
            with hooked(model, way, whole_blocks) as stream:
                if repeat == 0:  # also warms up
                    found = gradients.setdefault(way, {})
                    run_once(stream, loss, lambda site, one, found=found: found.__setitem__(site.name, one.cpu()))
                    peaks[way] = peak_of(lambda stream=stream: run_once(stream, loss, lambda *_: None), device)
                    continue
                start = now(device)
                run_once(stream, loss, lambda *_: None)
                seconds[way].append(now(device) - start)
    return {way: Measurement(min(seconds[way]), peaks[way], gradients[way]) for way in WAYS}


def now(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_of(work: Callable[[], None], device: torch.device) -> int:
    """Return the bytes that the work takes at its peak, above those taken before; 0 where that is not known."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if not (PROCESS / "clear_refs").exists():
        work()
        return 0
    ctypes.CDLL(None).malloc_trim(0)
    (PROCESS / "clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    largest = max(float(gradient.abs().max()) for gradient in one.values())
    return max(float((gradient - other[name]).abs().max()) for name, gradient in one.items()) / largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU, even beside a CUDA device")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu")
    sizes = Sizes() if device.type == "cuda" else ON_CPU
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {sizes}\n")
    print("| model | checkpointed | none, ms | torch, ms | ours, ms | time ratio ", end="")
    print("| none, MB | torch, MB | ours, MB | memory ratio | difference |")
    print("| --- | --- |" + 9 * " ---: |")
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, loss = make(sizes, device)
        for whole_blocks in (True, False):
            found = measure(model, loss, whole_blocks, sizes.repeats, device)
            torchs, ours = found["torch"], found["ours"]
            cells = [title, "blocks" if whole_blocks else "MLPs"]
            cells += [f"{1000 * found[way].seconds:.1f}" for way in WAYS]
            cells.append(f"{torchs.seconds / ours.seconds:.3f}")
            cells += [f"{found[way].peak / 1e6:.0f}" for way in WAYS]
            cells.append(f"{torchs.peak / ours.peak:.3f}" if ours.peak else "")
            cells.append(f"{difference(torchs.gradients, ours.gradients):.0e}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
