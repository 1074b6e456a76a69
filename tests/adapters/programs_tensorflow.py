"""Programs that a test starts under hvdrun: `programs_tensorflow.py NAME FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import tensorflow as tf

import sirtaki.tensorflow as hvd

FOLDER = Path(sys.argv[2])


def a_rank_that_dies() -> None:
    """The other rank's operations fail, eagerly and in functions, and name it."""
    hvd.init()
    step = tf.function(lambda one: hvd.allreduce(one + 1.0))
    step(tf.constant(1.0))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hvdrun soon ends other ranks; this rank reports first
    for name, call in (("function", step), ("eager", hvd.allreduce)):
        try:
            call(tf.constant(1.0))
        except (tf.errors.AbortedError, tf.errors.UnknownError) as error:
            (FOLDER / name).write_text(f"{type(error).__name__}: {error}")


def averages_of_slices_after_a_join() -> None:
    """They divide as those of dense tensors do, eagerly and in functions, which may be traced before init."""

    def average(rank: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.fill([1, 2], 6.0 * (tf.cast(rank, tf.float32) + 1.0))
        rows = tf.IndexedSlices(values, tf.reshape(rank, [1]), [3, 2])
        slices, dense = hvd.grouped_allreduce([rows, tf.convert_to_tensor(rows)])
        return tf.convert_to_tensor(slices), dense

    early, step = tf.function(average), tf.function(average)
    early.get_concrete_function(tf.TensorSpec([], tf.int32))
    hvd.init()
    for _ in range(hvd.rank() + 1):  # rank r takes r + 1 steps
        for call in (average, early, step):
            slices, dense = call(tf.constant(hvd.rank()))
            assert (slices.numpy() == dense.numpy()).all(), (slices, dense)
    assert hvd.join() == hvd.size() - 1


def gpus_that_operations_do_not_use() -> None:
    """TensorFlow is made to say that it has a GPU."""
    tf.test.is_built_with_cuda = lambda: True
    tf.config.get_visible_devices = lambda kind: [kind]
    hvd.init()
    assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum).numpy() == hvd.size()


def a_rank_that_dies_in_a_training_session() -> None:
    """The session of the other rank ends, although MonitoredTrainingSession repeats some failures."""
    hvd.init()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with tf.Graph().as_default():
        variable = tf.compat.v1.Variable(1.0)
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        step = hvd.DistributedOptimizer(optimizer).minimize(variable * variable)
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        try:
            with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                session.run(step)
                if hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                while True:
                    session.run(step)
        except (hvd.HorovodInternalError, tf.errors.UnknownError) as error:
            (FOLDER / "session").write_text(str(error))


def sessions_without_tensorflow_2() -> None:
    """Its control flow and variables are then of other kinds, in the whole process."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from cases import cases_for

    tf.compat.v1.disable_v2_behavior()
    hvd.init()
    names = ("a_loop", "a_training_session", "adasum", "passes")
    chosen = [
        one
        for one in cases_for(2, ("tensorflow_session_training",))
        if one.name.partition(".")[2].startswith(names)
    ]
    for one in chosen:
        one.body()
    print(f"ran {len(chosen)} cases")


globals()[sys.argv[1]]()
