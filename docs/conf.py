"""Builds the pages of this folder into a site, without a network: `sphinx-build -W docs build/site`."""

import importlib.metadata
import pathlib
import re
import sys

from sphinx.ext.napoleon import Config
from sphinx.ext.napoleon.docstring import GoogleDocstring


HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))  # for flags.py

project = "mpjax"
release = importlib.metadata.version("mpjax")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton", "flags"]

html_theme = "furo"
html_title = f"mpjax {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_domain_indices = False
html_show_copyright = False
copybutton_selector = ".highlight-bash pre, .highlight-python pre, .highlight-toml pre"

myst_heading_anchors = 4  # links such as devices.md#the-mesh, as code hosts have them
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
default_role = "code"  # docstrings have single backticks, as in Markdown
python_maximum_signature_line_length = 110
python_use_unqualified_type_names = True


# Files above this folder that are pages of the site too.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def setup(app):
    """Connects what Sphinx does not do by itself."""
    app.connect("source-read", lambda app, name, text: link_pages(text))
    app.connect("include-read", lambda app, path, page, text: link_pages(text))
    app.connect("source-read", list_notebooks)
    app.connect("autodoc-process-docstring", read_sections)


def link_pages(text):
    """Lets links to the files of `PAGES` lead to their pages."""
    for file, page in PAGES.items():
        text[0] = re.sub(rf"\]\((\.\./)?{file}", f"]({page}", text[0])


def list_notebooks(app, name, text):
    """Adds the notebooks, if there are any, behind the tutorial: a pattern that matches none would be a warning."""
    if name == "index":
        found = sorted(path.stem for path in HERE.glob("notebooks/*.ipynb"))
        lines = "".join(f"notebooks/{stem}\n" for stem in found)
        text[0] = text[0].replace("\ntutorial\n", f"\ntutorial\n{lines}")


def read_sections(app, what, name, value, options, lines):
    """Reads `Args:` and the like. The extension napoleon would take a property's words before a colon for its type."""
    lines[:] = GoogleDocstring(list(lines), Config(napoleon_use_ivar=True)).lines()
