"""Learns to read handwritten digits, on one device: nothing in it knows of ranks.

KERAS_BACKEND=torch python examples/auto/keras_digits.py
KERAS_BACKEND=torch hvdrun --auto -np 2 python examples/auto/keras_digits.py
"""

from __future__ import annotations

import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
digits = load_digits()
images = (digits.images / 16.0).astype(np.float32)[..., None]
train, test = slice(0, 1500), slice(1500, None)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(0.001), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    images[train],
    digits.target[train],
    batch_size=64,
    epochs=10,
    validation_data=(images[test], digits.target[test]),
    callbacks=[keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True)],
    verbose=2,
)
loss, accuracy = model.evaluate(images[test], digits.target[test], verbose=0)
print(f"test accuracy {accuracy:.2%}")
