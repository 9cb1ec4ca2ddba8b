"""The site: python -m sphinx -W -n docs build/docs. Fetches nothing; needs cupy-flash[docs,torch]."""

import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from cupy_flash.version import __version__  # noqa: E402

project = "cupy_flash"
author = "The cupy_flash authors"
copyright = author  # noqa: A001
release = version = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "numpydoc", "myst_parser", "sphinx_copybutton"]
# numpydoc: types are in the docstrings; methods of result tuples are the tuples'.
autodoc_typehints = "none"
autodoc_mock_imports = ["cupy", "jax", "transformers"]
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
default_role = "py:obj"  # `attention` in a docstring is a link, and must lead somewhere
add_module_names = False
nitpick_ignore_regex = [("py:obj", r"(jax|torch|transformers)\..*")]  # pages of others
# MyST: headings are anchors, as in the README.
myst_heading_anchors = 3
myst_enable_extensions = ["fieldlist"]

html_theme = "furo"
html_title = f"cupy_flash {release}"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
copybutton_exclude = ".linenos, .gp, .go"  # what is copied runs: no prompts, no output
pygments_style = "friendly"


# What is included here, and where.
PAGES = {
    (DOCS / match[1]).resolve(): page.name
    for page in DOCS.glob("*.md")
    for match in re.finditer(r"^```{include} (\S+)\n```$", page.read_text(encoding="utf-8"), re.MULTILINE)
}


def setup(app):
    """Included pages keep their links."""
    app.connect("include-read", links_from_here)


def links_from_here(_app, page, _parent, content):
    """Turn links that start from an included page's folder into links to what is here, or to the file."""

    def moved(link):
        target = ((DOCS / page).parent / link[1]).resolve()
        return f"]({PAGES.get(target, os.path.relpath(target, DOCS))}"

    content[0] = re.sub(r"\]\((?!https?:|#)([^)\s#]+)", moved, content[0])
