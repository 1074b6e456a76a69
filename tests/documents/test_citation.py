"""CITATION.cff names what pyproject.toml names."""

from __future__ import annotations

from importlib.metadata import metadata
from pathlib import Path

import yaml

CITATION = Path(__file__).parents[2] / "CITATION.cff"


def test_the_citation_names_this_version_and_license() -> None:
    citation, package = yaml.safe_load(CITATION.read_text()), metadata("sirtaki")
    assert citation["title"] == package["Name"]
    assert citation["version"] == package["Version"]
    assert citation["license"] == package["License-Expression"]
    assert citation["abstract"] == package["Summary"]
