"""Put the recorded tables of `results/` into the built documentation, as `tables/`.

Pages link to `../results/FILE`, which is right in a checkout. The site has these files under another name, because
`results.md` is a page of its own.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDER = "tables"
RESULTS = Path(__file__).parent.parent / "results"
SUFFIXES = {".md", ".svg", ".txt"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the tables and their pictures."""
    for file in sorted(RESULTS.iterdir()):
        if file.suffix in SUFFIXES:
            files.append(File.generated(config, f"{FOLDER}/{file.name}", abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite ``](../results/FILE)`` to ``](tables/FILE)``."""
    return re.sub(r"\]\(\.\./results/", f"]({FOLDER}/", markdown)
