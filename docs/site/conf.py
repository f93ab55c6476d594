"""
The documentation site, built by ``make docs``.

Its source folder is the root of the repository, so that the pages of the site are the Markdown files that are read on GitHub,
with the same relative links. A new file in ``docs/`` is a page of the site as soon as ``docs/index.md`` lists it.
"""

import os
import re
from typing import Any

from docutils import nodes

import sb3_ppo_ext

project = "sb3_ppo_ext"
author = "The sb3_ppo_ext authors"
copyright = f"2026, {author}"
version = release = sb3_ppo_ext.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmark/*.md", "docs/*.md"]
exclude_patterns = [".*", "build", "dist", "logs", "demo"]

# Anchors are those of GitHub; a link to one that does not exist is a warning, and warnings are errors.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True

# The build needs no network: inventories of other projects are read only where one is there.
if os.environ.get("DOCS_ONLINE") == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "gymnasium": ("https://gymnasium.farama.org", None),
        "stable_baselines3": ("https://stable-baselines3.readthedocs.io/en/master", None),
        "sb3_contrib": ("https://sb3-contrib.readthedocs.io/en/master", None),
    }

html_theme = "furo"
html_title = f"sb3_ppo_ext {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
# The first page is `docs/index.html`; this one leads there.
html_extra_path = ["index.html"]
copybutton_exclude = ".linenos, .gp, .go"


def mark_sentences(app: Any, document: nodes.document) -> None:
    """Browsers squeeze sentences between columns of numbers, and break numbers at ±: `site.css` keeps them from it."""
    for cell in document.findall(nodes.entry):
        text = cell.astext()
        if len(text) > 40:
            cell["classes"].append("sentence")
        elif "±" in text:
            cell["classes"].append("number")


def drop_badges(app: Any, page: str, source: list[str]) -> None:
    """The badges of README lead to pages of GitHub, and are pictures from the network."""
    if page == "README":
        source[0] = re.sub(r"^\[!\[.*\n", "", source[0], flags=re.MULTILINE)


def setup(app: Any) -> None:
    app.connect("source-read", drop_badges)
    app.connect("doctree-read", mark_sentences)
