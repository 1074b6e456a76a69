"""Generates the pages of the documentation site that docs/ lacks: references, and files of the repository.

mkdocs calls the functions `on_…` when it builds the site that mkdocs.yml describes. A file outside docs/ to
which a page links, such as an example, becomes a page in `repository/`, and the link is rewritten.
"""

from __future__ import annotations

import argparse
import html
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from sirtaki.bindings.library import Knob, knobs
from sirtaki.runner.cli.knobs import add_knobs
from sirtaki.runner.cli.options import USAGE, hvdrun_parser
from sirtaki.runner.doctor.rules import RULES
from sirtaki.runner.doctor.rules import table as table_of_findings
from sirtaki.runner.trace.rules import TRACE_RULES

ROOT = Path(__file__).parents[1]
DOCS, REPOSITORY = "docs/", "repository/"
LINK_TARGET = re.compile(r"(?<=\]\()[^)\s#:]+")  # without an anchor; targets with a scheme do not match


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the anchors of headings, which mkdocs.yml cannot: it names no functions of this file."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_anchor
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and pages for all files of the repository that can be reached by links."""
    for uri, content in generated_pages((ROOT / "mkdocs.yml").read_text()):
        files.append(File.generated(config, uri, content=content))
    pages = list(files.documentation_pages())
    for page in pages:  # the list grows: pages of the repository link to further files
        for target in linked_files(page.src_uri, page.content_string):
            uri = uri_of(target)
            if files.get_file_from_path(uri) is None:
                added = File.generated(config, uri, content=content_of(ROOT / target))
                files.append(added)
                pages += [added] if added.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrites the links of a page to files of the repository."""
    uri = page.file.src_uri
    folder = posixpath.dirname(uri) or "."

    def relative(match: re.Match[str]) -> str:
        target = file_of(uri, match[0])
        return match[0] if target is None else posixpath.relpath(uri_of(target), folder)

    return LINK_TARGET.sub(relative, markdown)


def github_anchor(heading: str, separator: str) -> str:
    """Returns the anchor of a heading by GitHub's rule, because the links of the pages also work there."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


# ---- Files of the repository as pages ------------------------------------------------------------------


def linked_files(uri: str, markdown: str) -> set[str]:
    """Returns the paths in the repository to which a page links."""
    return {target for link in LINK_TARGET.findall(markdown) if (target := file_of(uri, link)) is not None}


def file_of(uri: str, link: str) -> str | None:
    """Returns the path in the repository to which a link of a page leads; None if there is no such file."""
    source = uri.removeprefix(REPOSITORY) if uri.startswith(REPOSITORY) else DOCS + uri
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (ROOT / target / "README.md").exists():
        target = posixpath.join(target, "README.md")
    is_inside = (ROOT / target).resolve().is_relative_to(ROOT.resolve())
    return target if source.endswith(".md") and is_inside and (ROOT / target).exists() else None


def uri_of(target: str) -> str:
    """Returns the page or picture of the site that shows a file of the repository."""
    if target.startswith(DOCS):
        return target.removeprefix(DOCS)
    return REPOSITORY + (target if target.endswith((".md", ".png")) else f"{target}.md")


def content_of(path: Path) -> str | bytes:
    """Returns a picture, or a page that shows a file; of a folder, all its files."""
    if path.suffix == ".png":
        return path.read_bytes()
    if path.suffix == ".md":
        return path.read_text()
    sources = sorted(path.iterdir()) if path.is_dir() else [path]
    page = f"# {path.relative_to(ROOT)}\n"
    for source in sources:
        page += f'\n````{source.suffix[1:]} title="{source.name}"\n{source.read_text().rstrip()}\n````\n'
    return page


# ---- References from the code --------------------------------------------------------------------------


HVDRUN_PAGE = f"""# Options of hvdrun

`{USAGE}`

Defaults are in brackets. The core's settings are also environment variables: [settings](settings.md).
"""
SETTINGS_PAGE = """# Settings of the core

Each setting is an environment variable, also with Horovod's prefix `HOROVOD_`, and an [option of
hvdrun](hvdrun.md#core-settings-the-same-on-all-ranks). Settings with a star must have the same value on all
ranks of a job.
"""
FINDINGS_PAGE = f"""# Findings of sirtaki doctor and sirtaki trace

A *problem* keeps jobs from running or was their end (exit code 1); a *warning* makes them slow or is likely
to be a mistake; a *note* explains something. Words in capitals stand for values.

## sirtaki doctor

{table_of_findings(RULES)}
## sirtaki trace report

{table_of_findings(TRACE_RULES)}"""


def generated_pages(configuration: str) -> Iterator[tuple[str, str]]:
    """Yields path and text of each generated page. The `nav` of mkdocs.yml lists the modules of the API."""
    yield "reference/hvdrun.md", hvdrun_page()
    rows = [(variable_of(knob), values_of(knob), plain(knob.help)) for knob in knobs()]
    yield "reference/settings.md", SETTINGS_PAGE + table(("variable", "values (default)", "meaning"), rows)
    yield "reference/findings.md", FINDINGS_PAGE
    for name in re.findall(r"reference/api/([\w.]+)\.md", configuration):
        module = "sirtaki" if name == "sirtaki" else f"sirtaki.{name}"
        yield f"reference/api/{name}.md", f"# {module}\n\n::: {module}\n"


def hvdrun_page() -> str:
    parser = hvdrun_parser()
    add_knobs(parser)
    page = HVDRUN_PAGE
    for group in parser._action_groups:  # argparse has no public list
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        rows = [(option_of(action), plain((action.help or "").replace("%%", "%"))) for action in shown]
        if rows:
            page += f"\n## {(group.title or '').capitalize()}\n" + table(("option", "meaning"), rows)
    return page


def option_of(action: argparse.Action) -> str:
    value = action.metavar or "|".join(map(str, action.choices or ()))
    return ", ".join(f"`{flag}`" for flag in action.option_strings) + (f" `{value}`" if value else "")


def variable_of(knob: Knob) -> str:
    return f"`SIRTAKI_{knob.name.upper()}`" + (" \\*" if knob.agreed else "")


def values_of(knob: Knob) -> str:
    values = ", ".join(f"`{choice}`" for choice in knob.choices) or knob.type
    return values + (f" (`{knob.default}`)" if knob.default else "")


def table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (titles, ("---",) * len(titles), *rows)]
    return "\n".join(["", *lines, ""])


def plain(text: str) -> str:
    """Returns a text of the code as a cell of a table, which shows it as it is."""
    return re.sub(r"([|*_\[\]])", r"\\\1", html.escape(text, quote=False))
