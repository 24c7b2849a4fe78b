"""The notebooks for Colab: thin, without outputs, and each runs from its first cell to its last."""

import json
import re
import sys

import pytest

import fedjax_bn
import runs
from trees import write_tree

FOLDER = runs.ROOT / "colab"
NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.ipynb"))}
NAMES = tuple(NOTEBOOKS)
# What a test makes small: text of a cell -> text.
SMALLER = {
    "quickstart": {
        "--config.rounds=20": "--config.rounds=1 --config.model=MLP",
        "    rounds=20,\n": "    rounds=1,\n",
    },
    "unseen_client": {"DigitCNN": "SmallCNN", "range(20)": "range(1)"},
    "pacs_tpu": {
        'PLATFORM = "tpu"': 'PLATFORM = "cpu"',
        "/content/drive/MyDrive/PACS": "PACS",
        "--config.compute_dtype=bfloat16 --config.rounds=40": "--config.rounds=1 "
        "--config.model=ResNet10:width=4 --config.data.image_size=32 --config.local_steps=2 "
        "--config.local_selection=1 --config.batch_size=4 --config.data.cache= "
        "--config.adaptations=running --config.method=fedbn",
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_no_outputs_and_begins_with_the_install_cell_and_the_device(name):
    code = [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    install, device = ("".join(cell["source"]) for cell in code[:2])
    assert all(f'"{package}"' in install for package in ("jax", "jaxlib", "flax"))
    assert f"fedjax_bn-{fedjax_bn.__version__}-" in install
    assert re.search(r"assert .*platform == PLATFORM", device)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    nbclient, nbformat, _ = map(pytest.importorskip, ("nbclient", "nbformat", "ipykernel"))
    monkeypatch.setenv("PYTHONPATH", str(runs.ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    if name == "pacs_tpu":
        classes = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
        write_tree(tmp_path / "PACS", ("photo", "art_painting", "cartoon", "sketch"), classes, 5)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    for large, small in SMALLER.get(name, {}).items():
        assert any(large in cell.source for cell in notebook.cells), large
        for cell in notebook.cells:
            cell.source = cell.source.replace(large, small)
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3")
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable
    client.execute(cwd=str(tmp_path))
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output.output_type == "error"]
    if name == "unseen_client":
        assert "tsmobn" in "".join(output.get("text", "") for output in shown)
