"""Runs the program on the page about several machines, as one of the workers."""

import json
import os
import pathlib
import pickle
import sys

import keras
import numpy as np

import keras_dp

ROOT = pathlib.Path(__file__).resolve().parents[2]
number = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
x = np.random.default_rng(0).normal(size=(2048, 5)).astype("float32")
y = (x[:, 0] > 0).astype("int32")


def build_model():
    """A small classifier."""
    layers = [keras.Input((5,)), keras.layers.Dense(2, activation="softmax")]
    return keras.Sequential(layers)


lines = (ROOT / "docs" / "multi_worker.md").read_text().splitlines()
page = {"keras": keras, "keras_dp": keras_dp, "x": x, "y": y, "build_model": build_model}
disk = pathlib.Path(sys.argv[1]) / f"disk{number}"
disk.mkdir()
os.chdir(disk)
exec("\n".join(line[4:] for line in lines if line.startswith("    ")), page)
found = {
    "updates": int(page["model"].optimizer.iterations.numpy()),
    "weights": [v.numpy().tolist() for v in page["model"].trainable_variables],
    "epsilon": page["callbacks"][0].epsilon,
    "files": sorted(p.name for p in disk.iterdir()),
}
(disk.parent / f"{number}.pickle").write_bytes(pickle.dumps(found))
