"""What people type for a repo: folder, Hub id, open_clip name.

Repo references: what people write to name a model or a data set, told apart into folders and Hub ids.

Knows names only: looks for folders on this machine, and asks nobody.

open_clip's own names of pretrained models, `ARCHITECTURE/TAG`, and the Hub repos that they stand for.

Whether a text is such a name is known without importing open_clip, which loads torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hf_bico.errors import RecordError, RepoNotFoundError
from hf_bico.utils.files import expanded
from hf_bico.utils.text import near

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_OWNER = r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_REVISION = r"(?!.*\.\.)[\w./-]+"
_HUB_ID = re.compile(rf"(?P<id>(?:{_OWNER}/)?{_PART})(?:@(?P<revision>{_REVISION}))?")
_HUB_ADDRESS = re.compile(
    rf"(?:https?://)?(?:huggingface\.co|hf\.co)/(?:datasets/)?"
    rf"(?P<id>(?:{_OWNER}/)?{_PART})(?:/tree/(?P<revision>{_REVISION}?))?/?"
)
_CACHED = re.compile(r"(?:models|datasets)--(?P<id>.+)/snapshots/(?P<revision>[0-9a-f]{40})")
_LONGEST = 96


RepoName = tuple[str, str]
"""The type and id of a Hub repo."""
REPO_TYPES = ("model", "dataset")
LOCAL: RepoName = ("local", "a local folder")
"""Stands for what never was on the Hub, as far as is known."""


@dataclass(frozen=True)
class HubReference:
    """A repo on the Hub, at a revision or at its main branch."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def parse(reference: str | Path, what: str, *, files: bool = False) -> Path | HubReference:
    """A folder of this machine (or a file, where `files` are taken), else a Hub id; `what` names it in errors.

    >>> str(parse("org/name@v2", "the model"))
    'org/name@v2'
    """
    text = str(reference)
    if not text:
        raise RepoNotFoundError(f"{what}: the reference is empty", "name a Hub repo or a folder")
    if isinstance(reference, Path) or text.startswith("local-dir:"):
        return _local(text.removeprefix("local-dir:"), what, files)
    if not text.startswith("hf-hub:") and os.path.exists(expanded(text)):
        return _local(text, what, files)
    return hub_reference(text.removeprefix("hf-hub:")) or _local(text, what, files)


def hub_reference(text: str) -> HubReference | None:
    """What a text means as an id or address of the Hub, if anything.

    >>> str(hub_reference("https://huggingface.co/org/name/tree/v2"))
    'org/name@v2'
    """
    named = _HUB_ADDRESS.fullmatch(text) or _HUB_ID.fullmatch(text)
    return HubReference(named["id"], named["revision"]) if named and is_repo_id(named["id"]) else None


def cached_repo(folder: Path) -> HubReference | None:
    """The repo and commit that a folder of the Hub's own cache holds."""
    found = _CACHED.fullmatch("/".join(folder.absolute().parts[-3:]))
    return HubReference(found["id"].replace("--", "/"), found["revision"]) if found else None


def is_hub_id(text: str) -> bool:
    """Whether a text could be the id of a repo on the Hub, owner and name."""
    return "/" in text and is_repo_id(text)


def is_repo_id(text: str) -> bool:
    """Whether it could be one, or one of the old ids of a single word."""
    named = _HUB_ID.fullmatch(text)
    if named is None or named["revision"] is not None or len(text) > _LONGEST:
        return False
    return "--" not in text and ".." not in text and not text.endswith(".git")


def recorded_folder(name: str) -> Path:
    """The folder that a record names, which must be here, or in a folder that is."""
    found: list[Path] = []
    if Path(name).name == name and name not in ("", ".."):  # a record holds names: a path in one leads nowhere
        beside = sorted(entry.name for entry in os.scandir() if entry.is_dir() and not entry.name.startswith("."))
        here = [Path(name)] if os.path.exists(name) else []
        found = here or [Path(folder, name) for folder in beside if os.path.isdir(os.path.join(folder, name))]
    if not found:
        raise RecordError(f"it was made from the local folder '{name}', which is not here", "run it beside that folder")
    if len(found) > 1:
        raise RecordError(
            f"it was made from the local folder '{name}', and there are '{found[0]}' and '{found[1]}'",
            "run it beside the right one",
        )
    return found[0]


def near_folder(text: str) -> str | None:
    """A folder on this machine whose path is like this one, part by part."""
    found = Path()
    for part in expanded(text).parts:
        if not os.path.isdir(found / part):
            names = [path.name for path in found.glob("*") if path.is_dir()]
            like = near(part, names)
            if like is None:
                return None
            part = like
        found /= part
    return str(found)


def _local(text: str, what: str, files: bool) -> Path:
    path = expanded(text)
    # os.path answers for names that are too long, where pathlib raises
    if os.path.isdir(path):
        return path.resolve()
    if files and os.path.isfile(path):
        return path.resolve()
    if os.path.isfile(path):
        raise RepoNotFoundError(f"{what}: '{text}' is a file", f"name its folder, '{path.parent}'")
    meant = near_folder(text)
    raise RepoNotFoundError(
        f"{what}: there is no folder '{text}'", f"did you mean '{meant}'?" if meant else "check the path"
    )


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
