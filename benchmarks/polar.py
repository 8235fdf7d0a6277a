"""The polar factor beside `torch.linalg.svd` in float32, on covariances captured from real passes.

    python benchmarks/polar.py            # a CUDA device: 768x896, 3072x3584 and 4096x4096
    python benchmarks/polar.py --small    # the CPU: the same kinds of maps, a few times smaller

The pairs have random weights: CLIP ViT-B/16 to B/16-plus with 100 noise images, and two transformers of one width
on 16 x 512 random tokens. A block's maps of one shape are solved as one batch, as a port solves them. Both solvers are
timed on the same covariances in the same run, per map; the cut of 1e-6 is applied in ours. The reference for the other
columns is the float64 decomposition with the same cut:

    objective   <C, R> over the reference's, less one
    isometry    |W W - W| with W = R^T R
    far         |(R - reference) V| over the directions at least ten times above the cut
    space       peak memory of the solver over the batch's own bytes, CUDA only

Maps of 1,500 rows and columns or more, which may be solved in a small space, are also solved by both ways, `reduced`
and `iterated`, in turn; the ratio is the time of `iterated` over that of `reduced`. With --small, those of 500 or more.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, LlamaConfig, LlamaForCausalLM

from hf_bico.alignment.calibration_pass import pair_rows
from hf_bico.alignment.polar import LARGE, PartialIsometry, partial_isometries
from hf_bico.alignment.procrustes import CUT, OrthogonalMap, polar
from hf_bico.models.layout import Tokens

CLASSES = 10


@dataclass(frozen=True)
class Sizes:
    """Widths and samples of the pairs."""

    vision: tuple[int, int] = (768, 896)
    heads: tuple[int, int] = (12, 14)
    layers: int = 12
    blocks: tuple[int, ...] = (0, 6, 11)
    images: int = 100
    language: int = 4096
    sequences: int = 16
    repeats: int = 5
    large: int = LARGE
    """From which smaller side on both ways are timed."""


SMALL = Sizes((192, 224), (6, 7), 4, (0, 3), 20, 512, 4, 2, 500)


def captured(model: nn.Module, blocks: tuple[int, ...], loss: Callable[[], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The inputs and the gradients of the outputs of the linear layers in the blocks."""
    held: dict[str, tuple[Tensor, Tensor]] = {}

    def hold(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        held[name] = (inputs[0].detach(), output if output.requires_grad else output.requires_grad_())
        return output

    hooks = [
        module.register_forward_hook(partial(hold, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(f"layers.{block}." in name for block in blocks)
    ]
    gradients = torch.autograd.grad(loss(), [output for _, output in held.values()])
    for hook in hooks:
        hook.remove()
    return {name: (inputs, one) for (name, (inputs, _)), one in zip(held.items(), gradients, strict=True)}


def vision(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Covariances of ViT-B/16 to ViT-B/16-plus: names with the block first."""
    sides = []
    torch.manual_seed(5)
    images = F.interpolate(torch.randn(sizes.images, 3, 14, 14), size=(240, 240), mode="bicubic")
    images = (images + 0.3 * torch.randn_like(images)).to(device)
    labels = torch.arange(sizes.images, device=device) % CLASSES
    for seed, (width, heads, edge) in enumerate(zip(sizes.vision, sizes.heads, (224, 240), strict=True)):
        torch.manual_seed(seed)
        config = CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=heads,
            image_size=edge,
            patch_size=16,
            projection_dim=2 * width // 3,
        )
        model = CLIPVisionModelWithProjection(config).to(device).eval().requires_grad_(False)
        seen = F.interpolate(images, size=(edge, edge), mode="bilinear")
        prototypes = F.normalize(torch.randn(CLASSES, 2 * width // 3), dim=-1).to(device)

        def loss(model: nn.Module = model, seen: Tensor = seen, prototypes: Tensor = prototypes) -> Tensor:
            features = F.normalize(model(pixel_values=seen).image_embeds, dim=-1)
            return F.cross_entropy(100 * features @ prototypes.T, labels, reduction="sum")

        sides.append(captured(model, sizes.blocks, loss))
    grids = Tokens(1, (14, 14)), Tokens(1, (15, 15))
    for name, of_source in sides[0].items():
        for kind, one, other in zip(("input", "gradient"), of_source, sides[1][name], strict=True):
            if kind == "input" and name.endswith(("k_proj", "v_proj")):
                continue
            x, y = pair_rows(one, other, *grids)
            yield f"vision {name.split('layers.')[1]} {kind}", x.double().mT @ y.double()


def language(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Covariances of two transformers of one width."""
    sides = []
    width = sizes.language
    tokens = torch.randint(2000, (sizes.sequences, 512), generator=torch.Generator().manual_seed(7)).to(device)
    for seed in range(2):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=2000,
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=2,
            num_attention_heads=width // 128,
            num_key_value_heads=width // 128,
        )
        with device:
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
        sides.append(captured(model, (1,), lambda model=model: model(input_ids=tokens, labels=tokens).loss))
    for name, of_source in sides[0].items():
        for kind, one, other in zip(("input", "gradient"), of_source, sides[1][name], strict=True):
            if (kind == "input" and "q_proj" in name) or name.endswith(("o_proj", "down_proj")):
                pair = one.flatten(0, 1).double(), other.flatten(0, 1).double()
                yield f"language {name.split('layers.')[1]} {kind}", pair[0].mT @ pair[1]


def quickest(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Milliseconds of the quickest of several runs, after one that does not count."""
    spent = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    return 1000 * min(spent[1:])


def facts(covariance: Tensor, found: OrthogonalMap) -> tuple[str, ...]:
    left, values, right = torch.linalg.svd(covariance, full_matrices=False)
    kept = values > CUT * values[0]
    reference = (left * kept) @ right
    gram = found.seen.mT @ found.seen
    far = right[values > 10 * CUT * values[0]].mT
    return (
        f"{float((covariance * found.seen).sum() / values[kept].sum()) - 1:9.1e}",
        f"{float((gram @ gram - gram).norm()):8.1e}",
        f"{float(((found.seen - reference) @ far).norm()):8.1e}",
        f"{found.rank:5d} {int(kept.sum()):5d}",
        found.way,
    )


def report(maps: list[tuple[str, Tensor]], repeats: int) -> dict[str, str]:
    """Print one batch, and give its line of a table, with the worst of its maps."""
    device = maps[0][1].device
    covariances = [covariance for _, covariance in maps]
    bytes_of_batch = sum(8 * covariance.numel() for covariance in covariances)
    solve = partial(polar, covariances, [1.0] * len(maps))
    ours = quickest(solve, repeats, device) / len(maps)
    space = ""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        solve()
        space = f"{(torch.cuda.max_memory_allocated() - before) / bytes_of_batch:5.1f}"
    single = torch.stack(covariances).float()
    theirs = quickest(lambda: torch.linalg.svd(single, full_matrices=False), 1, device) / len(maps)
    shape = "x".join(str(size) for size in covariances[0].shape)
    print(f"{shape}: {len(maps)} in one batch, {ours:.2f} ms a map, svd {theirs:.1f} ms: {theirs / ours:.1f}x {space}")
    told = [facts(covariance, found) for (_, covariance), found in zip(maps, solve(), strict=True)]
    for (name, _), known in zip(maps, told, strict=True):
        print(f"    {name:45s}", *known, flush=True)
    objectives, isometries, distances = ([float(known[column]) for known in told] for column in range(3))
    ways = sorted({known[-1] for known in told})
    return {
        "maps": f"{maps[0][0]}{'' if len(maps) == 1 else f' and {len(maps) - 1} more'}",
        "shape": shape,
        "ours, ms a map": f"{ours:.2f}",
        "svd, ms a map": f"{theirs:.1f}",
        "times faster": f"{theirs / ours:.1f}",
        "objective - 1": f"{min(objectives):.0e}",
        "isometry": f"{max(isometries):.0e}",
        "far": f"{max(distances):.0e}",
        "way": ", ".join(ways),
    }


def report_ways(maps: list[tuple[str, Tensor]], repeats: int) -> None:
    """Print each map's time by the way in a small space, beside that of the iterations over all of it."""
    for name, covariance in maps:

        def solve(large: int, covariance: Tensor = covariance) -> PartialIsometry:
            return partial_isometries(covariance.double()[None].clone(), CUT, smallest=0, large=large)[0]

        limits = 0, sys.maxsize
        parts = [solve(large) for large in limits]
        times = [quickest(partial(solve, large), repeats, covariance.device) for large in limits]
        away = float((parts[0].matrix - parts[1].matrix).norm() / parts[1].matrix.norm())
        both = ", ".join(f"{part.way} {spent:.2f} ms" for part, spent in zip(parts, times, strict=True))
        print(f"    both ways {name:38s} {both}: {times[1] / times[0]:.2f}x, {away:.0e} apart", flush=True)


def measured(sizes: Sizes, device: torch.device) -> list[dict[str, str]]:
    """All batches of both pairs."""
    print("map, objective, isometry, far, rank and reference's, way; space after the ratio")
    lines = []
    for pairs in (vision, language):
        groups: dict[tuple[object, ...], list[tuple[str, Tensor]]] = {}
        for name, covariance in pairs(sizes, device):
            # large maps are solved one by one, so each gets its own line
            key = (covariance.shape, name.split(".")[0] if min(covariance.shape) < LARGE else name)
            groups.setdefault(key, []).append((name, covariance))
        for maps in groups.values():
            lines.append(report(maps, sizes.repeats))
            if min(maps[0][1].shape) >= sizes.large:
                report_ways(maps, sizes.repeats)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured(SMALL if arguments.small else Sizes(), device)


if __name__ == "__main__":
    main()
