"""open_clip's own names of pretrained models, `ARCHITECTURE/TAG`, and the Hub repos that they stand for.

Whether a text is such a name is known without importing open_clip, which loads torch.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hf_bico.errors import RepoNotFoundError
from hf_bico.hub.references import HubReference


def hub_repo(reference: HubReference, what: str) -> HubReference | None:
    """The Hub repo of `ViT-B-16/laion2b_s34b_b88k` and its like; None for what is no name of open_clip.

    >>> str(hub_repo(HubReference("ViT-B-16-plus-240/laion400m_e32"), "the target"))
    'timm/vit_base_patch16_plus_clip_240.laion400m_e31'
    """
    architecture, _, tag = reference.id.partition("/")
    if not tag or architecture not in _architectures():
        return None
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    entry = get_pretrained_cfg(architecture, tag)
    if not entry:
        tags = list_pretrained_tags_by_model(architecture)
        raise RepoNotFoundError(
            f"{what}: open_clip knows no '{tag}' of {architecture}",
            f"use one of: {', '.join(f'{architecture}/{known}' for known in tags)}"
            if tags
            else "name a Hub repo or a folder",
        )
    owner, _, rest = str(entry.get("hf_hub", "")).partition("/")
    if not rest:
        raise RepoNotFoundError(
            f"{what}: open_clip downloads '{reference.id}' from outside of the Hub",
            "download it, save it as safetensors and name the folder",
        )
    return HubReference(f"{owner}/{rest.partition('/')[0]}")


def near_open_clip(reference: HubReference) -> str | None:
    """A name of open_clip's whose architecture is like the last part of this id."""
    name = reference.id.rpartition("/")[2]
    if not get_close_matches(name, _architectures(), n=1, cutoff=0.8):
        return None
    from open_clip.pretrained import list_pretrained

    tags = dict(list_pretrained())  # the last tag of each architecture that has any
    found = get_close_matches(name, tags, n=1, cutoff=0.8)
    return f"{found[0]}/{tags[found[0]]}" if found else None


@cache
def _architectures() -> frozenset[str]:
    spec = find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(spec.submodule_search_locations[0]) / "model_configs"
    return frozenset(file.stem for file in folder.glob("*.json"))
