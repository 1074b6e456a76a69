"""Operations on values with sirtaki.keras, and broadcasts of variables."""

from __future__ import annotations

import keras
import numpy as np

import sirtaki.keras as hvd
from cases import case
from cases.keras_models import assert_alike, make_model, values_of


@case()
def values_in_values_out() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = size * (size - 1) // 2
    assert hvd.allreduce(float(rank)) == total / size
    assert hvd.allreduce(rank, average=False) == total
    assert hvd.allreduce(rank, op=hvd.Max, name="largest") == size - 1
    tensor = keras.ops.convert_to_tensor(np.full((2, 2), rank, np.float32))
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        found = hvd.allreduce(tensor, op=hvd.Sum, compression=compression, prescale_factor=2.0)
        np.testing.assert_array_equal(found, np.full((2, 2), 2 * total, np.float32), strict=True)
    variable = keras.Variable(np.full((1,), rank), dtype="int32", trainable=False)
    np.testing.assert_array_equal(hvd.allgather(variable), np.arange(size, dtype=np.int32), strict=True)
    rows = hvd.allgather(np.full((rank, 2), rank))
    assert rows.shape == (total, 2)
    assert hvd.broadcast(rank + 5, root_rank=size - 1) == size + 4
    own = hvd.reducescatter(np.arange(size, dtype=np.float32), op=hvd.Sum)
    np.testing.assert_array_equal(own, np.float32([rank * size]), strict=True)


@case(dtype=["float64", "float32", "bfloat16", "float16", "int64", "bool"])
def variables_of_any_dtype(dtype: str) -> None:
    first = keras.Variable(np.full((2, 3), hvd.rank() + 1), dtype=dtype, trainable=False)
    scalar = keras.Variable(np.array(hvd.rank()), dtype=dtype, trainable=False)
    hvd.broadcast_variables([first, scalar], root_rank=hvd.size() - 1)
    expected = np.array([hvd.size(), hvd.size() - 1]).astype(bool if dtype == "bool" else float)
    for variable, value in zip((first, scalar), expected, strict=True):
        found = keras.ops.convert_to_numpy(variable).astype(expected.dtype)
        np.testing.assert_array_equal(found, np.full(found.shape, value))


@case()
def a_model_and_its_optimizer() -> None:
    """Includes the optimizer's counter, learning rate and momentum, but not local variables."""
    model = make_model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * (1 + hvd.rank()), momentum=0.9)), "mse")
    model.optimizer.build(model.trainable_weights)
    for variable in model.optimizer.variables[2:]:
        variable.assign(np.full(variable.shape, hvd.rank() + 1.0))
    kept = model.weights[0]
    before = values_of([kept])[0]
    hvd.broadcast_model(model, root_rank=hvd.size() - 1, local_variables=[kept])
    assert_alike([*model.weights[1:], *model.optimizer.variables])
    np.testing.assert_array_equal(values_of([kept])[0], before)
    assert float(values_of([model.optimizer.variables[2]])[0].max()) == hvd.size()
