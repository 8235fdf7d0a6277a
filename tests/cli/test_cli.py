"""The command line: what it prints, how fast it starts, and two lines for every plain mistake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_bico.cli.main import main
from support import forks
from support.scenes import Scene, make_scene, write_images

HEAVY = ("torch", "transformers", "huggingface_hub", "open_clip", "datasets", "numpy")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def loaded_modules(code: str) -> set[str]:
    """The heavy packages that a fresh process has loaded after running `code`."""
    report = f"import sys\n{code}\nprint('LOADED', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], check=True, capture_output=True, text=True)
    return set(done.stdout.rpartition("LOADED")[2].split())


def calling(*commands: list[str]) -> str:
    """Code that runs these commands one after the other."""
    calls = f"for command in {commands!r}:\n    with suppress(SystemExit):\n        main(command)"
    return f"from contextlib import suppress\nfrom hf_bico.cli.main import main\n{calls}"


def test_help_and_version_load_nothing_heavy() -> None:
    helps = [[name, "--help"] for name in sorted(main.commands)]
    assert loaded_modules(calling(["--help"], ["--version"], *helps)) == set()


def test_a_typo_in_the_options_is_said_before_anything_heavy_is_loaded() -> None:
    typos = ["compare", "a", "--to", "b", "-n", "ten"], ["port", "a", "--to", "b", "--layers", "x"]
    assert "torch" not in loaded_modules(calling(*typos))


def test_core_loads_neither_transformers_nor_the_hub() -> None:
    core = "procrustes", "statistics", "matching", "methods"
    assert loaded_modules("import " + ", ".join(f"hf_bico.alignment.{name}" for name in core)) <= {"torch", "numpy"}


def test_import_of_the_package_loads_nothing_heavy() -> None:
    assert loaded_modules("import hf_bico\nhf_bico.BicoError, dir(hf_bico)") == set()


def test_plan_loads_no_torch_and_reads_no_weight(scene: Scene) -> None:
    arguments = ["plan", str(scene.tuned), "--base", str(scene.base), "--to", str(scene.target)]
    code = f"from hf_bico.cli.main import main\nmain({arguments!r}, standalone_mode=False)"
    assert "torch" not in loaded_modules(code)


def test_plan_names_what_is_carried_and_left(scene: Scene) -> None:
    paths = [str(scene.tuned), "--base", str(scene.base), "--to", str(scene.target)]
    text = run("plan", *paths).stdout
    assert "carried     13 sites" in text
    assert "4 x 4 -> 5 x 5 patches" in text
    assert "LayerNorm" in text
    assert text.endswith(f"Next: hf-bico port {' '.join(paths)} --data DATA\n"), "the line works as it stands"
    raw = json.loads(run("plan", *paths, "--json").stdout)
    assert len(raw["sites"]) == 13
    assert raw["layers"] == [0, 1]
    assert raw["fits"] is True
    dry = run("port", *paths, "--dry-run", "--seed", "4", "-k", "3").stdout
    typed = f"hf-bico port {scene.tuned} --to {scene.target} --base {scene.base} -k 3 --seed 4 --data DATA"
    assert dry.endswith(f"Next: {typed}\n")
    assert dry.splitlines()[:-1] == text.splitlines()[:-1]


def test_a_plan_that_does_not_fit_says_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_bico.porting.plan.machine_memory", lambda: 1000)
    text = run("plan", *scene.arguments[:-2]).stdout
    assert "does NOT fit this machine" in text
    assert "Not yet: the models do not fit this machine's memory." in text


def test_port_prints_and_writes(scene: Scene, tmp_path: Path) -> None:
    result = run(*scene.port_by_paper, "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "target, zero-shot" in result.stdout
    assert "Written to" in result.stdout
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names >= {"open_clip_model.safetensors", "open_clip_config.json", "bico.json", "README.md", "tokenizer.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no scratch folder stays"


def test_rounding_of_a_half_precision_target_is_said(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "scene", dtype=torch.bfloat16)
    result = run(*scene.port_by_paper, "-o", str(tmp_path / "out"), "--alpha", "0.02", "--no-eval")
    assert result.exit_code == 0, result.output
    assert "of the change is lost by rounding to the target's own precision; --format adapter" in result.stdout


def test_port_as_json_is_one_object(scene: Scene, tmp_path: Path) -> None:
    result = run(*scene.port_by_paper, "-o", str(tmp_path / "out"), "--json", "--format", "delta")
    raw = json.loads(result.stdout)
    assert raw["record"]["method"]["name"] == "bico"
    assert (tmp_path / "out" / "task_vector.safetensors").is_file()


def test_default_output_folder(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*scene.port_by_paper, "-q", "--no-eval")
    assert result.exit_code == 0
    assert result.output == ""
    assert (tmp_path / "tuned-to-target" / "bico.json").is_file()


def test_eval(scene: Scene) -> None:
    assert "accuracy" in run("eval", str(scene.target), "--data", str(scene.data)).stdout
    raw = json.loads(run("eval", str(scene.target), "--data", str(scene.data), "-n", "7", "--json").stdout)
    assert raw["n"] == 7
    assert raw["split"] == "test"
    assert 0 <= raw["value"] <= 1


def test_eval_measures_on_so_many_samples_by_either_name(scene: Scene) -> None:
    line = ("eval", str(scene.target), "--data", str(scene.data), "--json")
    assert run(*line, "--eval-samples", "7").stdout == run(*line, "-n", "7").stdout
    refused = run(*line, "--eval-samples", "0")
    assert "--eval-samples is 0" in refused.stderr


def test_templates_and_class_names_from_files(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "templates").write_text("the digit {}\n\nthis says {}\n")
    (tmp_path / "names").write_text("nine\neight\nseven\nsix\n", encoding="utf-8-sig")  # as some editors do
    files = ["--templates", str(tmp_path / "templates"), "--class-names", str(tmp_path / "names")]
    raw = json.loads(run(*scene.port_by_paper, "-o", str(tmp_path / "out"), "--json", *files).stdout)
    assert raw["record"]["objective"]["templates"] == ["the digit {}", "this says {}"]
    assert raw["record"]["data"]["class_names"] == ["nine", "eight", "seven", "six"]


def test_overwrite_replaces_only_what_is_ours(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*scene.port_by_paper, "-o", str(out), "-q").exit_code == 0
    (out / "stale").touch()
    assert run(*scene.port_by_paper, "-o", str(out), "-q", "--overwrite").exit_code == 0
    assert not (out / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / "bico.json").unlink()
    refused = run(*scene.port_by_paper, "-o", str(out), "-q", "--overwrite")
    assert refused.exit_code == 1
    assert "was not written by hf-bico" in refused.stderr
    assert (out / "README.md").is_file()


def replaced(arguments: list[str], option: str, value: str) -> list[str]:
    at = 0 if option == "source" else arguments.index(option) + 1
    return [*arguments[:at], value, *arguments[at + 1 :]]


def missing_folder(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--to", str(folder / "nowhere"))


def hub_id(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--to", "laion/ViT-B-16-plus")


def wrong_family(scene: Scene, folder: Path) -> list[str]:
    (folder / "bert").mkdir()
    save_file({"bert.encoder.weight": torch.ones(2, 2)}, folder / "bert" / "model.safetensors")
    return replaced(scene.arguments, "--to", str(folder / "bert"))


def no_base(scene: Scene, folder: Path) -> list[str]:
    at = scene.arguments.index("--base")
    return scene.arguments[:at] + scene.arguments[at + 2 :]


def other_base(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--base", str(scene.target))


def no_data(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--data", str(folder / "nothing"))


def no_label_column(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(write_images(folder / "images") / "train" / "one", folder / "unlabelled")
    return replaced(scene.arguments, "--data", str(folder / "unlabelled"))


def too_many_samples(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "-n", "5000")


def non_finite(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(scene.tuned, folder / "diverged")
    file = folder / "diverged" / "open_clip_model.safetensors"
    state = load_file(file)
    state["visual.proj"][0, 0] = float("inf")
    save_file(state, file)
    return replaced(scene.arguments, "source", str(folder / "diverged"))


def non_finite_target(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(scene.target, folder / "diverged")
    file = folder / "diverged" / "open_clip_model.safetensors"
    state = load_file(file)
    state["visual.conv1.weight"][0, 0] = float("nan")
    save_file(state, file)
    return replaced(scene.arguments, "--to", str(folder / "diverged"))


def pickled(scene: Scene, folder: Path) -> list[str]:
    (folder / "pickled").mkdir()
    torch.save({"weight": torch.ones(1)}, folder / "pickled" / "pytorch_model.bin")
    return replaced(scene.arguments, "--to", str(folder / "pickled"))


def truncated(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(scene.target, folder / "cut")
    file = folder / "cut" / "open_clip_model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    return replaced(scene.arguments, "--to", str(folder / "cut"))


def broken_image(scene: Scene, folder: Path) -> list[str]:
    write_images(folder / "broken")
    for image in (folder / "broken" / "train" / "one").iterdir():
        image.write_bytes(image.read_bytes()[:60])
    return replaced(scene.arguments, "--data", str(folder / "broken"))


def huge_image(scene: Scene, folder: Path) -> list[str]:
    write_images(folder / "bombs")
    huge = Image.new("1", (20000, 20000))
    huge.save(folder / "huge.png")
    for image in (folder / "bombs" / "train" / "one").iterdir():
        image.write_bytes((folder / "huge.png").read_bytes())
    return replaced(scene.arguments, "--data", str(folder / "bombs"))


def no_tokenizer(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(scene.target, folder / "mute")
    for file in (folder / "mute").glob("*token*"):
        file.unlink()
    return replaced(scene.arguments, "--to", str(folder / "mute"))


def labels_as_images(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--image-column", "label"]


def weights_file(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--to", str(scene.target / "open_clip_model.safetensors"))


def lfs_pointer(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(scene.target, folder / "pointer")
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "pointer" / "open_clip_model.safetensors").write_text(text)
    return replaced(scene.arguments, "--to", str(folder / "pointer"))


def mistyped_folder(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--to", str(scene.folder / "traget"))


def too_few_class_names(scene: Scene, folder: Path) -> list[str]:
    (folder / "names").write_text("zero\none\n")
    return [*scene.arguments, "--class-names", str(folder / "names")]


def no_gpu(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--device", "cuda:99"]


def empty_reference(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--to", "")


def adapter(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--to", str(an_adapter(folder)))


def adapter_of_another_kind(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "source", str(an_adapter(folder, peft_type="IA3")))


def adapter_with_something_new(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "source", str(an_adapter(folder, use_frobnication=True)))


def adapter_of_another_model(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "source", str(an_adapter(folder)))


def an_adapter(folder: Path, **config: object) -> Path:
    """A LoRA of a layer that no model has."""
    (folder / "lora").mkdir()
    (folder / "lora" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    factors = {
        "base_model.model.x.lora_A.weight": torch.ones(2, 3),
        "base_model.model.x.lora_B.weight": torch.ones(3, 2),
    }
    save_file(factors, folder / "lora" / "adapter_model.safetensors")
    return folder / "lora"


def rank_of_a_full_model(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--format", "full", "--rank", "4"]


def rank_that_means_two_things(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--rank", "1.0"]


def long_name(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--to", "x" * 300)


def unknown_user(scene: Scene, folder: Path) -> list[str]:
    return replaced(scene.arguments, "--to", "~nosuchuser/model")


def config_without_model(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(scene.target, folder / "bare")
    (folder / "bare" / "open_clip_config.json").write_text('{"model_cfg": null}')
    return replaced(scene.arguments, "--to", str(folder / "bare"))


def unknown_config_key(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(scene.target, folder / "newer")
    file = folder / "newer" / "open_clip_config.json"
    config = json.loads(file.read_text())
    config["model_cfg"]["vision_cfg"]["invented_later"] = 1
    file.write_text(json.dumps(config))
    return replaced(scene.arguments, "--to", str(folder / "newer"))


def text_tower_from_the_hub(scene: Scene, folder: Path) -> list[str]:
    """Offline, transformers explains this in many lines."""
    shutil.copytree(scene.target, folder / "hub-text")
    file = folder / "hub-text" / "open_clip_config.json"
    config = json.loads(file.read_text())
    config["model_cfg"]["text_cfg"] = {"hf_model_name": "xlm-roberta-base", "context_length": 16}
    file.write_text(json.dumps(config))
    return replaced(scene.arguments, "--to", str(folder / "hub-text"))


def broken_data_card(scene: Scene, folder: Path) -> list[str]:
    shutil.copytree(scene.data, folder / "data")
    (folder / "data" / "README.md").write_text("---\na: [\n---\n")
    return replaced(scene.arguments, "--data", str(folder / "data"))


def overflow(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--alpha", "1e42"]


def dry_run_of_nonsense(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--dry-run", "--alpha", "nan"]


def missing_split(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--split", "nope"]


def n_and_k(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "-k", "2"]


def other_architecture(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--method", "transfusion"]


def control_of_nothing(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--method", "naive", "--control"]


def too_few_layers(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--layers", "0"]


def layer_that_is_not(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--layers", "0,7"]


def one_class_too_small(scene: Scene, folder: Path) -> list[str]:
    return [*scene.arguments, "--sampling", "one-class"]


def pseudo_labels_per_class(scene: Scene, folder: Path) -> list[str]:
    at = scene.arguments.index("-n")
    return [*scene.arguments[:at], "-k", "2", "--labels", "pseudo"]


def checkpoint_that_is_a_file(scene: Scene, folder: Path) -> list[str]:
    (folder / "file").touch()
    return [*scene.arguments, "--method", "finetune", "--checkpoint", str(folder / "file")]


MISTAKES: list[tuple[Callable[[Scene, Path], list[str]], int, str, str]] = [
    (missing_folder, 1, "the target: there is no folder", "check the path"),
    (hub_id, 1, "the target 'laion/ViT-B-16-plus' is not on the Hub", "did you mean 'ViT-B-16-plus-240/laion400m_e32'"),
    (wrong_family, 1, "the target 'bert' does not belong to a known family", "open_clip ViT, transformers CLIP"),
    (no_base, 1, "does not say which model it was fine-tuned from", "--base"),
    (other_base, 1, "in the fine-tuned model and", "--base"),
    (no_data, 1, "the data set: there is no folder", "check the path"),
    (no_label_column, 1, "no column looks like the label column", "--label-column"),
    (
        too_many_samples,
        1,
        "5000 samples were asked for and split 'train' of 'pictures' has 48 with labels",
        "use -n 48 or less",
    ),
    (non_finite, 1, "'visual.proj' of the fine-tuned model holds NaN or infinite values", "checkpoint"),
    (non_finite_target, 1, "hold NaN or infinite values", "check the models' weights"),
    (pickled, 1, "'pickled' holds only pickled weights (pytorch_model.bin)", "safetensors"),
    (truncated, 1, "cannot be read as safetensors", "copy or download the file again"),
    (broken_image, 1, "cannot be decoded", "remove or replace the broken image"),
    (huge_image, 1, "could be decompression bomb", "remove or replace the broken image"),
    (no_tokenizer, 1, "'mute' has no tokenizer", "copy it"),
    (labels_as_images, 1, "the column 'label' holds class, not images", "--image-column"),
    (weights_file, 1, "is a file", "name its folder"),
    (lfs_pointer, 1, "cannot be read as safetensors", "git lfs pull"),
    (mistyped_folder, 1, "there is no folder", "did you mean"),
    (too_few_class_names, 1, "2 class names were given and the data set has 4 classes", "one name for each class"),
    (no_gpu, 1, "CUDA", "--device cpu"),
    (empty_reference, 1, "the target: the reference is empty", "name a Hub repo or a folder"),
    (adapter, 1, "is a PEFT adapter, not a model", "hf-bico apply"),
    (adapter_of_another_kind, 1, "'lora' is an adapter of the type IA3", "merge_and_unload"),
    (adapter_with_something_new, 1, "'lora' is a LoRA with 'use_frobnication'", "merge_and_unload"),
    (adapter_of_another_model, 1, "'lora' changes 'x' (1 of 1 layers), which its base lacks", "--base"),
    (rank_of_a_full_model, 2, "--rank was given with --format full", "--format adapter"),
    (rank_that_means_two_things, 2, "the rank is 1.0: the rank 1, or all of the energy?", "0.95"),
    (long_name, 1, "there is no folder", "check the path"),
    (unknown_user, 1, "there is no folder", "check the path"),
    (config_without_model, 1, "has no open_clip_config.json with a model_cfg", "open_clip"),
    (unknown_config_key, 1, "invented_later", "open_clip release"),
    (text_tower_from_the_hub, 1, "open_clip cannot build a model", "open_clip release"),
    (broken_data_card, 1, "cannot be read as a data set", "give a folder"),
    (overflow, 1, "beyond what torch.float32 holds", "--alpha"),
    (dry_run_of_nonsense, 2, "--alpha is nan", "finite"),
    (missing_split, 1, "'pictures' has no split 'nope'", "use one of: train, test"),
    (n_and_k, 2, "-n and -k were both given", "choose"),
    (other_architecture, 1, "transfusion matches models of one architecture alone", "--method bico"),
    (control_of_nothing, 1, "naive does not pair any", "leave --control out"),
    (too_few_layers, 2, "--layers", "one source block for each target block"),
    (layer_that_is_not, 2, "--layers", "0 to 1"),
    (one_class_too_small, 1, "24 samples of one class were asked for and the largest, 'one', has 12", "use -n 12"),
    (pseudo_labels_per_class, 2, "-k needs labels, and --labels pseudo does not look at them", "use -n"),
    (checkpoint_that_is_a_file, 1, "no checkpoint can be written into", "name another folder with --checkpoint"),
]


@pytest.mark.parametrize(("mistake", "code", "cause", "remedy"), MISTAKES, ids=[row[0].__name__ for row in MISTAKES])
def test_plain_mistakes_get_two_lines(
    mistake: Callable[[Scene, Path], list[str]], code: int, cause: str, remedy: str, scene: Scene, tmp_path: Path
) -> None:
    arguments = mistake(scene, tmp_path)
    before = sorted(tmp_path.iterdir())
    result = run("port", *arguments, "-o", str(tmp_path / "out"))
    assert result.exit_code == code, result.output
    first, second = result.stderr.splitlines()
    assert first.startswith("Error: ")
    assert cause in first
    assert second.startswith("Remedy: ")
    assert remedy in second
    assert sorted(tmp_path.iterdir()) == before, "nothing is left behind"


def test_existing_output_is_refused_before_any_work(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    result = run("port", *scene.arguments, "-o", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "exists and was not written by hf-bico" in result.stderr.splitlines()[0]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_filled(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run(*scene.port_by_paper, "-q", "--no-eval", "-o", str(tmp_path / "out")).exit_code == 0
    assert (tmp_path / "out" / "bico.json").is_file()


def test_place_that_cannot_be_written_is_refused_before_any_work(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("port", *scene.arguments, "-o", str(tmp_path / "file" / "out"))
    assert result.exit_code == 1
    assert "nothing can be written into" in result.stderr.splitlines()[0]


def test_home_is_expanded_in_the_output(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(*scene.port_by_paper, "-q", "--no-eval", "-o", "~/out").exit_code == 0
    assert (tmp_path / "out" / "bico.json").is_file()


def test_written_files_are_readable_by_others(scene: Scene, tmp_path: Path) -> None:
    for format_ in ("full", "delta"):
        out = tmp_path / format_
        run(*scene.port_by_paper, "-q", "--no-eval", "-o", str(out), "--format", format_)
        assert {oct(file.stat().st_mode & 0o777) for file in out.iterdir()} == {"0o644"}


def test_eval_of_a_delta_over_its_target(scene: Scene, tmp_path: Path) -> None:
    values = []
    for format_, extra in (("full", []), ("delta", ["--base", str(scene.target)])):
        out = tmp_path / format_
        run(*scene.port_by_paper, "-q", "--no-eval", "-o", str(out), "--format", format_)
        values.append(json.loads(run("eval", str(out), "--data", str(scene.data), "--json", *extra).stdout)["value"])
    assert values[0] == values[1]
    alone = run("eval", str(tmp_path / "delta"), "--data", str(scene.data))
    assert "this task vector lies over a local model" in alone.stderr


def test_interrupt_ends_in_one_line(scene: Scene, tmp_path: Path) -> None:
    """A real SIGINT, at a known moment: when calibration begins."""
    arguments = ["port", *scene.arguments, "-o", str(tmp_path / "out")]
    code = (
        "import signal, hf_bico.porting.calibration\nfrom hf_bico.cli.main import main\n"
        "hf_bico.porting.calibration.collect = lambda *_: signal.raise_signal(signal.SIGINT)\n"
        f"main({arguments!r})"
    )
    process = forks.run(code=code)
    assert process.returncode == 130
    assert process.stderr == "Interrupted: nothing was written.\n"
    assert list(tmp_path.iterdir()) == []


def test_python_dash_m_works() -> None:
    done = subprocess.run([sys.executable, "-m", "hf_bico", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("hf-bico, version ")
