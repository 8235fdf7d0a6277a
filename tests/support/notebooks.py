"""The notebooks, run headless on the small world of a loopback Hub; as a script, it stores their outputs again.

`python -m support.notebooks` leaves every cell's source as it is: the parameters of the small world are put in for the
run alone.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from support import ROOT, forks
from support.hub import Hub
from support.loopback import HUB, TOKEN
from support.measured import stamp
from support.transformers_world import LoraRecipe, as_transformers, train_lora

if TYPE_CHECKING:
    from hf_bico.experiments.demo.world import World

FOLDER = ROOT / "notebooks"
OWNER, TASK = "small-world", "inverted"
SOURCE, BASE, TARGET, DATA = f"{OWNER}/narrow-{TASK}", f"{OWNER}/narrow", f"{OWNER}/wide", f"{OWNER}/{TASK}"
LORA, LORA_BASE = f"{OWNER}/narrow-{TASK}-lora", f"{OWNER}/narrow-hf"
PUSHED, PUSHED_LORA, PUSHED_BEST = (f"{OWNER}/wide-{TASK}-{how}" for how in ("ported", "lora", "best"))
_FULL = {"SOURCE": SOURCE, "BASE": BASE, "TARGET": TARGET, "DATA": DATA}
PARAMETERS: dict[str, dict[str, Any]] = {
    "01_port_a_clip_finetune": {**_FULL, "PUSH_TO": PUSHED},
    "02_port_a_lora": {"LORA": LORA, "BASE": LORA_BASE, "TARGET": TARGET, "DATA": DATA, "PUSH_TO": PUSHED_LORA},
    "03_compare_and_diagnose": {**_FULL, "PUSH_TO": PUSHED_BEST},
}
"""What is put into the parameters cell of each notebook; what is not named stays as it stands."""
LANGUAGE = {"name": "python"}


def stored(name: str) -> NotebookNode:
    """A notebook as it is in the repository."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def parameters_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]


def with_parameters(notebook: NotebookNode, values: dict[str, Any]) -> NotebookNode:
    """The notebook with other values in its parameters cell; one that is not there is an error."""
    (cell,) = parameters_cells(notebook)
    for name, value in values.items():
        line = re.compile(rf"^{name} = .+?(?=  #|$)", re.MULTILINE)
        cell.source, found = line.subn(lambda _, said=f"{name} = {value!r}": said, cell.source)
        if found != 1:
            raise ValueError(f"the parameters cell sets {name} {found} times")
    return notebook


def execute(name: str, folder: Path, forked: bool = False) -> NotebookNode:
    """Run a notebook of the repository on the small world, in a kernel that works in `folder`; a cell must not fail.

    The kernel is new, or a fork, which has imported everything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    quiet = {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}  # bars are no result
    environment = {**os.environ, **quiet, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "hf-home")}
    kernel = ForkedKernel(folder, environment) if forked else None
    client = NotebookClient(
        with_parameters(stored(name), PARAMETERS[name]),
        km=kernel,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        return settled(client.execute(env=environment))
    finally:
        if kernel is not None:
            kernel.end()


class ForkedKernel(AsyncKernelManager):
    """A kernel that runs already when a client first asks for it."""

    CODE = """
import functools, matplotlib, warnings
from ipykernel.kernelapp import launch_new_instance
from tqdm.std import tqdm

# what they read of the environment they have read before
matplotlib.use("module://matplotlib_inline.backend_inline")
tqdm.__init__ = functools.partialmethod(tqdm.__init__, disable=True)
warnings.filterwarnings("ignore", "IProgress not found")
launch_new_instance()
"""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(connection_file=str(folder / "kernel.json"))
        self.write_connection_file()
        self._kernel = forks.start("-f", self.connection_file, code=self.CODE, cwd=folder, env=environment)

    @property
    def has_kernel(self) -> bool:
        return True

    async def _async_is_alive(self) -> bool:
        return self._kernel.poll() is None

    is_alive = _async_is_alive

    def end(self) -> None:
        self._kernel.kill()
        self._kernel.communicate()


def run_cells(name: str, folder: Path, **parameters: Any) -> None:
    """The same code in a process without a kernel, where nothing of what it shows is looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = with_parameters(stored(name), {**PARAMETERS[name], **parameters}).cells
    plain = TransformerManager().transform_cell  # without magic commands
    code = "\n".join(plain(cell.source) for cell in cells if cell.cell_type == "code")
    environment = {**os.environ, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "hf-home")}
    forks.run(code=f"from IPython.display import display\n{code}", cwd=folder, env=environment, check=True)


def settled(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what differs from run to run: counts of executions, the kernel's version."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    notebook.metadata.language_info = LANGUAGE
    return notebook


def publish(hub: Hub, world: World, folder: Path, lora: bool = True) -> None:
    """The small world as repos that say what they are: models in open_clip's layout, the narrow one also in
    transformers', a LoRA of that one's vision tower, and the data set."""
    from support.hub_scenes import upload

    hub.add_user(OWNER, TOKEN)
    bare = "---\nlicense: mit\n---\n"
    learnt = f"---\nlicense: mit\nbase_model: {{}}\ndatasets: [{DATA}]\n---\n"
    upload(hub, BASE, world.base("narrow"), bare)
    upload(hub, TARGET, world.base("wide"), bare)
    upload(hub, SOURCE, world.fine_tuned("narrow", TASK), learnt.format(BASE))
    upload(hub, DATA, world.data(TASK), "---\nlicense: cc0-1.0\n---\n", type="dataset")
    base = as_transformers(world.base("narrow"), folder / "narrow-hf")
    upload(hub, LORA_BASE, base, bare)
    if lora:
        trained = train_lora(base, folder / "lora", TASK, LoraRecipe(), base_id=LORA_BASE)
        upload(hub, LORA, trained, learnt.format(LORA_BASE))


def store(name: str, ran: NotebookNode) -> None:
    """Keep the outputs of a run; the sources stay."""
    notebook = settled(stored(name))
    notebook.metadata.made_on = stamp()
    for cell, done in zip(notebook.cells, ran.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs = done.outputs
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")


def main() -> None:
    from support.worlds import small_world

    with tempfile.TemporaryDirectory() as scratch:
        world = small_world(0)
        publish(HUB, world, Path(scratch))
        for name in PARAMETERS:
            store(name, execute(name, Path(scratch) / name))
            print(f"{name}: {(FOLDER / f'{name}.ipynb').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
