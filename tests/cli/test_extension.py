"""`hf bico ...`: the command as an extension of the Hub's own command line."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from support.hub import Hub
from support.hub_scenes import SOURCE, TARGET, publish

BIN = Path(sys.executable).parent


def test_hf_bico_plan_runs_as_an_extension(hub: Hub, tmp_path: Path) -> None:
    publish(hub, tmp_path / "scene")
    home = tmp_path / "home"
    installed = home / ".local" / "share" / "hf" / "extensions" / "hf-bico"
    installed.mkdir(parents=True)
    manifest = {
        "owner": "owner",
        "repo": "hf-bico",
        "repo_id": "owner/hf-bico",
        "short_name": "bico",
        "executable_path": str(BIN / "hf-bico"),
        "type": "python",
        "installed_at": datetime.now(UTC).isoformat(),
        "description": "Carry a fine-tuned model's task vector to another pretrained model, without training.",
    }
    (installed / "manifest.json").write_text(json.dumps(manifest))
    environment = {**hub.environment(tmp_path / "hf-home", "hf_secretOfUser"), "HOME": str(home)}
    command = [str(BIN / "hf"), "bico", "plan", SOURCE, "--to", TARGET]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert f"source      {SOURCE}" in result.stdout
    assert result.stdout.endswith(f"Next: hf-bico port {SOURCE} --to {TARGET}\n")
    typo = [*command[:3], "user/nothing", "--to", TARGET]
    wrong = subprocess.run(typo, env=environment, capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("Error: ")
