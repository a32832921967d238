"""How Sphinx builds the documentation: ``sphinx-build -W docs docs/build`` from the project's root."""

import fastmha

project = "fastmha"
author = "The fastmha developers"
copyright = author
release = fastmha.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["build"]

html_theme = "furo"
html_title = f"fastmha {release}"
html_static_path = ["_static"]
html_css_files = ["pairs.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# A name in single backticks, as docstrings have it, links to its entry where there is one.
default_role = "py:obj"
autodoc_typehints = "none"  # numpydoc's sections say more
numpydoc_show_class_members = False  # the members themselves follow

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
