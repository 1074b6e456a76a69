"""A schema of MPIJob, kubeflow.org/v2beta1, written by hand from the API's documentation.

No package index has that of the MPI Operator. It covers the fields that a user writes; pod templates are
those of Kubernetes' own schema.
"""

from __future__ import annotations

from typing import Any


def _fields(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_NUMBER = {"type": "integer", "minimum": 0}
_REPLICAS = _fields(
    {
        "replicas": _NUMBER,
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {"$ref": "#/definitions/io.k8s.api.core.v1.PodTemplateSpec"},
    },
    "template",
)
_RUN_POLICY = _fields(
    {
        "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
        "ttlSecondsAfterFinished": _NUMBER,
        "activeDeadlineSeconds": _NUMBER,
        "backoffLimit": _NUMBER,
        "suspend": {"type": "boolean"},
    }
)
MPI_JOB = _fields(
    {
        "apiVersion": {"const": "kubeflow.org/v2beta1"},
        "kind": {"const": "MPIJob"},
        "metadata": {"$ref": "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"},
        "spec": _fields(
            {
                "slotsPerWorker": _NUMBER,
                "sshAuthMountPath": {"type": "string"},
                "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
                "runPolicy": _RUN_POLICY,
                "mpiReplicaSpecs": _fields({"Launcher": _REPLICAS, "Worker": _REPLICAS}, "Launcher"),
            },
            "mpiReplicaSpecs",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
