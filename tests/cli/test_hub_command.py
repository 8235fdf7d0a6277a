"""The command of the README, from three Hub ids to a new Hub repo, in processes of their own with empty caches."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from hf_bico.experiments.demo.world import World
from support import forks
from support.hub import Hub
from support.hub_scenes import BASE, DATA, SOURCE, TARGET, publish, publish_world

TOKEN = "hf_secretOfUser"
REPO = "user/vit-b16-plus-eurosat"
PORT = ["port", "user/vit-b16-eurosat", "--to", "laion/ViT-B-16-plus", "--push-to", "user/vit-b16-plus-eurosat"]

ACCURACY = """
import sys
import datasets, open_clip, torch

repo, data = sys.argv[1:]
model, _, preprocess = open_clip.create_model_and_transforms(f"hf-hub:{repo}")
tokenizer = open_clip.get_tokenizer(f"hf-hub:{repo}")
rows = datasets.load_dataset(data, split="test")
prompts = [f"a photo of a {name}." for name in rows.features["label"].names]
with torch.no_grad():
    words = model.eval().encode_text(tokenizer(prompts), normalize=True)
    images = torch.stack([preprocess(row["image"].convert("RGB")) for row in rows])
    found = (model.encode_image(images, normalize=True) @ words.T).argmax(-1)
print((found == torch.tensor(rows["label"])).double().mean().item())
"""


def somebody(hub: Hub, folder: Path) -> dict[str, Any]:
    """Where a process runs, with nothing of the Hub's in its environment but the endpoint, the token and a new home."""
    folder.mkdir()
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    environment |= {"HOME": str(folder / "home-of-somebody"), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    environment |= {"HF_HOME": str(folder / "hf-home")}
    return {"cwd": folder, "env": environment}


def test_from_three_hub_ids_to_a_repo_with_the_accuracy_that_its_card_states(
    hub: Hub, worlds: Callable[[int], World], tmp_path: Path
) -> None:
    publish_world(hub, worlds(0))
    command = [str(Path(sys.executable).parent / "hf-bico"), *PORT]
    ported = subprocess.run(command, **somebody(hub, tmp_path / "one"), capture_output=True, text=True, timeout=600)
    print(ported.stdout, ported.stderr)
    assert ported.returncode == 0, ported.stderr
    assert "Downloading" in ported.stderr
    assert f"Pushed to {hub.url}/{REPO} (public)" in ported.stdout
    card = hub.repo(REPO).read("README.md").decode()
    metadata = yaml.safe_load(card.split("---\n")[1])
    stated = metadata["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert metadata["base_model"] == TARGET
    assert metadata["datasets"] == [DATA]

    # another process, another cache, nobody's code but open_clip's
    measured = forks.run(REPO, DATA, code=ACCURACY, **somebody(hub, tmp_path / "two"))
    assert measured.returncode == 0, measured.stderr
    print(f"the card states {stated:.6f}, open_clip measures {measured.stdout.strip()}")
    assert round(float(measured.stdout), 4) == stated

    # and again, from the Hub id alone
    again = forks.run("rerun", REPO, **somebody(hub, tmp_path / "three"))
    print(again.stdout)
    assert (again.returncode, again.stdout) == (
        0,
        "Same: open_clip_model.safetensors (same SHA-256 as recorded).\n",
    )

    # nothing of this machine has left it
    record = json.loads(hub.repo(REPO).read("bico.json"))
    assert [record["source"]["id"], record["source"]["base"]["id"], record["target"]["id"]] == [SOURCE, BASE, TARGET]
    assert record["source"]["commit"] == hub.repo(SOURCE).head()
    assert record["data"]["commit"] == hub.repo(DATA, "dataset").head()
    secrets = [TOKEN, "home-of-somebody", str(tmp_path), str(Path.home())]
    outputs = [ported.stdout, ported.stderr, again.stdout, again.stderr]
    contents = [hub.repo(REPO).read(name) for name in hub.repo(REPO).files()]
    contents += [file.read_bytes() for file in (tmp_path / "one" / "vit-b16-eurosat-to-ViT-B-16-plus").iterdir()]
    for secret in secrets:
        assert all(secret not in output for output in outputs), secret
        assert all(secret.encode() not in content for content in contents), secret
    host = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
    texts = [hub.repo(REPO).read(name).decode() for name in ("README.md", "bico.json", "open_clip_config.json")]
    assert not any(host.search(text) for text in (*outputs, *texts))


def test_what_stops_a_push_stops_the_port_before_any_work(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path / "scene")
    hub.create(REPO).commit({"README.md": "# mine"})
    hub.clear_log()
    refused = forks.run(*PORT, **somebody(hub, tmp_path / "one"))
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        f"Error: there is a repo '{REPO}' already",
        "Remedy: replace its files with --overwrite, or open a --create-pr",
    ]
    assert not any("safetensors" in entry.path for entry in hub.log)
    assert [path.name for path in (tmp_path / "one").iterdir() if "home" not in path.name] == []


def test_a_worse_port_is_kept_and_not_pushed(hub: Hub, worlds: Callable[[int], World], tmp_path: Path) -> None:
    publish_world(hub, worlds(0))
    refused = forks.run(*PORT, "--alpha", "-2", **somebody(hub, tmp_path / "one"))
    assert refused.returncode == 1
    assert refused.stdout.startswith("Outlook: doubtful")
    assert refused.stdout.splitlines()[2].startswith("The port measured WORSE")
    line = f"hf-bico push vit-b16-eurosat-to-ViT-B-16-plus {REPO} --force"
    assert refused.stderr.splitlines()[-1] == f"Remedy: insist with: {line}"
    assert ("model", REPO) not in hub.repos
    assert (tmp_path / "one" / "vit-b16-eurosat-to-ViT-B-16-plus" / "bico.json").is_file()
