"""CITATION.cff, the pages and the changelog name what pyproject.toml names."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.[my]*")]
VERSION = metadata("sirtaki")["Version"]


def test_the_citation_names_this_version_and_license() -> None:
    citation, package = yaml.safe_load((ROOT / "CITATION.cff").read_text()), metadata("sirtaki")
    assert citation["title"] == package["Name"]
    assert citation["version"] == VERSION
    assert citation["license"] == package["License-Expression"]
    assert citation["abstract"] == package["Summary"]


def test_pages_and_examples_name_this_version() -> None:
    found = {page: re.findall(r"\bsirtaki[ =:-]+v?(\d+\.\d+\.\d+)\b", page.read_text()) for page in PAGES}
    assert any(found.values())
    assert {page.name: versions for page, versions in found.items() if set(versions) - {VERSION}} == {}


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\](.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    version, date = headings[1]
    assert version == VERSION
    assert re.fullmatch(r" - \d{4}-\d{2}-\d{2}", date)
