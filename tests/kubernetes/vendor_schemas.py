"""Writes schemas.json, the published schemas of what examples/kubernetes uses, from two packages of PyPI.

    pip install --target packages kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
    PYTHONPATH=packages python tests/kubernetes/vendor_schemas.py packages

Both packages are under the Apache License 2.0, and made from the definitions of the APIs of Kubernetes and of
Kubeflow Trainer. Descriptions are left out, and so is all that the roots do not refer to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KUBERNETES = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
ROOTS = ("batch.v1.Job", "core.v1.ConfigMap", "core.v1.PodTemplateSpec", "core.v1.Service")
NOTE = (
    "Copied from kubernetes-validate 1.37.0 (copyright 2018 Will Thames; schemas of Kubernetes v1.37.0, the "
    "Kubernetes Authors) and kubeflow-trainer-api 2.3.0 (the Kubeflow Authors), both from PyPI, under the "
    "Apache License 2.0 (https://www.apache.org/licenses/LICENSE-2.0). Changed: descriptions were removed."
)


def references(schema: Any) -> Iterator[str]:
    """Yields the names of the definitions that a schema refers to."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].rpartition("/")[2]
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


def stripped(schema: Any, names: dict[str, str], is_properties: bool = False) -> Any:
    """Returns a schema without descriptions and defaults; its references have the names given."""
    if isinstance(schema, list):
        return [stripped(one, names) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if not is_properties and (key in ("description", "title", "default") or key.startswith("x-")):
            continue
        if key == "$ref" and isinstance(value, str):
            name = value.rpartition("/")[2]
            kept[key] = f"#/definitions/{names.get(name, name)}"
        else:
            kept[key] = stripped(value, names, key in ("properties", "$defs") and not is_properties)
    if not is_properties and "properties" in kept:
        kept.setdefault("additionalProperties", False)
    return kept


def reached(roots: list[str], definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the definitions that the roots need."""
    found: dict[str, Any] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = definitions[name]
            waiting += references(definitions[name])
    return found


def main(packages: Path) -> None:
    definitions = json.loads((packages / KUBERNETES).read_text())["$defs"]
    definitions = {name: stripped(schema, {}) for name, schema in definitions.items()}

    from kubeflow_trainer_api import models  # type: ignore[import-not-found]

    plain = {name.replace(".", "").lower(): name for name in definitions}
    roots = [f"io.k8s.api.{name}" for name in ROOTS]
    for root in ("TrainerV1alpha1TrainJob", "TrainerV1alpha1TrainingRuntime"):
        schema = getattr(models, root).model_json_schema(by_alias=True)
        parts = {**schema.pop("$defs"), root: schema}
        names = {name: plain[name.lower()] for name in parts if name.lower() in plain}
        for name, part in parts.items():
            if name not in names:
                definitions[name] = stripped(part, names)
        roots.append(root)
    kept = dict(sorted(reached(roots, definitions).items()))
    file = Path(__file__).with_name("schemas.json")
    file.write_text(json.dumps({"$comment": NOTE, "definitions": kept}, separators=(",", ":")) + "\n")
    print(f"{file}: {len(kept)} definitions, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
