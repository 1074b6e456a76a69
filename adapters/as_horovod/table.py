"""The modules of Horovod, and the modules of sirtaki that replace them."""

from __future__ import annotations

VERSION = "0.28.1"  # of Horovod, whose calls these are

_TORCH, _TENSORFLOW, _KERAS = "sirtaki.torch", "sirtaki.tensorflow", "sirtaki.keras"
_HERE = "sirtaki.as_horovod"
_ELASTIC = ("sirtaki.common.elastic.state",)
# A module has the names of all of these; the first one that has a name provides it.
MODULES: dict[str, tuple[str, ...]] = {
    "horovod": (f"{_HERE}.launching",),
    "horovod.common": (),
    "horovod.common.basics": ("sirtaki.common.public",),
    "horovod.common.elastic": _ELASTIC,
    "horovod.common.exceptions": ("sirtaki.common.exceptions", f"{_HERE}.exceptions"),
    "horovod.common.process_sets": ("sirtaki.common.ops.process_sets",),
    "horovod.common.util": (f"{_HERE}.util",),
    "horovod.elastic": _ELASTIC,
    "horovod.keras": (_KERAS,),
    "horovod.keras.callbacks": (f"{_KERAS}.callbacks",),
    "horovod.keras.elastic": (f"{_KERAS}.elastic",),
    "horovod.runner": (f"{_HERE}.launching",),
    "horovod.runner.util": (),
    "horovod.runner.util.threads": (f"{_HERE}.threads",),
    "horovod.tensorflow": (_TENSORFLOW,),
    "horovod.tensorflow.compression": (f"{_TENSORFLOW}.ops.compression",),
    "horovod.tensorflow.elastic": (f"{_TENSORFLOW}.elastic",),
    "horovod.tensorflow.functions": (_TENSORFLOW,),
    "horovod.tensorflow.keras": (_KERAS,),
    "horovod.tensorflow.keras.callbacks": (f"{_KERAS}.callbacks",),
    "horovod.tensorflow.keras.elastic": (f"{_KERAS}.elastic",),
    "horovod.tensorflow.mpi_ops": (_TENSORFLOW,),
    "horovod.tensorflow.sync_batch_norm": (_TENSORFLOW,),
    "horovod.tensorflow.util": (f"{_HERE}.tensorflow_util",),
    "horovod.torch": (_TORCH,),
    "horovod.torch.compression": (f"{_TORCH}.ops.compression",),
    "horovod.torch.elastic": (f"{_TORCH}.elastic",),
    "horovod.torch.elastic.sampler": (f"{_TORCH}.elastic",),
    "horovod.torch.elastic.state": (f"{_TORCH}.elastic",),
    "horovod.torch.functions": (_TORCH,),
    "horovod.torch.mpi_ops": (_TORCH,),
    "horovod.torch.optimizer": (_TORCH,),
    "horovod.torch.sync_batch_norm": (_TORCH,),
}

_NO_GLOBAL_VARIABLES = (
    "Keras 3 has no list of all variables: use broadcast_model(model, root_rank=0), or "
    "callbacks.BroadcastGlobalVariablesCallback(0)"
)
# Names of Horovod that sirtaki has not, and what to do instead.
MISSING: dict[str, str] = {
    "horovod.common.basics.HorovodBasics": "nothing is built for one framework: call the module's functions",
    "horovod.keras.broadcast_global_variables": _NO_GLOBAL_VARIABLES,
    "horovod.mxnet": "MXNet is retired: use PyTorch, TensorFlow, Keras or JAX",
    "horovod.ray": "import sirtaki.ray, whose RayExecutor has the same calls (docs/operations/ray.md)",
    "horovod.runner.launch": "start the command hvdrun instead",
    "horovod.spark": "import sirtaki.spark, whose run takes the same arguments (docs/operations/spark.md)",
    "horovod.tensorflow.data": "give each rank its part of the data: sirtaki.keras.shard(dataset)",
    "horovod.tensorflow.keras.broadcast_global_variables": _NO_GLOBAL_VARIABLES,
}


def explain(name: str) -> str:
    """Returns the text of the error for a name that sirtaki does not have, and what to do."""
    parent, _, last = name.rpartition(".")
    advice = MISSING.get(name, "docs/guide/as_horovod.md lists the names that it has")
    return f"{parent} has no {last} here, because horovod stands for sirtaki: {advice}"
