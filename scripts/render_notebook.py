"""
Run ``examples/quick_start.ipynb`` and write it with its outputs as a page of the documentation, ``docs/notebook.md``.

With ``--check``, nothing is run, and the command fails if text or code on the page is not that of the notebook.
"""

import argparse
import base64
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quick_start.ipynb"
PAGE = ROOT / "docs" / "notebook.md"
PICTURES = ROOT / "docs" / "notebook"
NOT_RUN = "<!-- not run: the tests run the notebook -->\n"
LINK = (
    "This page is the notebook [quick_start.ipynb](../examples/quick_start.ipynb) with its outputs. "
    "To run it, open the file in\nJupyter, or in [Colab](https://colab.research.google.com): upload it, or "
    "replace `github.com` in its address on GitHub by\n`colab.research.google.com/github`."
)


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in a folder; their outputs are then in the notebook."""
    from nbclient import NotebookClient

    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()


def code_blocks(notebook: Any) -> list[str]:
    """The code of each cell as it is on the page, where lines of IPython are those of a shell."""
    return [_block(cell.source) for cell in notebook.cells if cell.cell_type == "code"]


def _block(source: str) -> str:
    if magic := re.search(r"^ *%(pip .*)$", source, re.MULTILINE):
        return f"```bash\n{magic[1]}\n```"
    return f"```python\n{source}\n```"


def page(notebook: Any, pictures: Path) -> str:
    """The page in Markdown; its pictures are written to a folder."""
    blocks, parts = iter(code_blocks(notebook)), []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            parts += [LINK] if number == 0 else []
        else:
            parts += [NOT_RUN + next(blocks), *_outputs(cell, number, pictures)]
    return "\n\n".join(parts) + "\n"


def _outputs(cell: Any, number: int, pictures: Path) -> Iterator[str]:
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            path = pictures / f"cell_{number}.png"
            path.write_bytes(base64.b64decode(data["image/png"]))
            yield f"![Output of the cell above]({pictures.name}/{path.name})"
        elif output.get("name") != "stderr" and (text := "".join(data.get("text/plain", output.get("text", ""))).strip("\n")):
            yield f"```text\n{text}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare the page with the notebook")
    check = parser.parse_args().check
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if check:
        text = PAGE.read_text(encoding="utf-8")
        prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
        missing = [part for part in [*prose, *code_blocks(notebook)] if part not in text]
        sys.exit(f"{PAGE} does not have:\n{missing[0]}" if missing else 0)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    PICTURES.mkdir(exist_ok=True)
    PAGE.write_text(page(notebook, PICTURES), encoding="utf-8")


if __name__ == "__main__":
    main()
