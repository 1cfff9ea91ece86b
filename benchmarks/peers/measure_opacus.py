"""Opacus on PyTorch, in an environment of its own; prints a line of JSON.

plain      PyTorch without privacy
hooks      PrivacyEngine.make_private, the default
functorch  the same with grad_sample_mode="functorch"
ghost      the same with grad_sample_mode="ghost": ghost and fast gradient clipping

PyTorch runs each step eagerly; --jit_compile changes nothing.
"""

import os

import opacus
import torch
from absl import app
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import clock
from benchmarks.peers import torch_models

FLAGS = clock.FLAGS
MODES = ("plain", "hooks", "functorch", "ghost")


def _measure(entry, batch_size, step_clock):
    torch.set_num_threads(os.cpu_count())  # as TensorFlow and JAX do
    private = FLAGS.mode != "plain"
    model = torch_models.build(FLAGS.model, private)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    parameters = sum(weight.numel() for weight in trained)
    optimizer = torch.optim.SGD(trained, lr=clock.LEARNING_RATE)
    criterion = torch.nn.CrossEntropyLoss()
    x, y = (torch.from_numpy(values) for values in entry.data(batch_size))
    x = x.long() if x.dtype == torch.int32 else x
    x = x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x
    y = y.long()
    if private:
        # Its data loader is made, but not used: the batch is in memory, as everywhere else.
        made = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=batch_size),
            noise_multiplier=clock.NOISE_MULTIPLIER,
            max_grad_norm=clock.L2_NORM_CLIP,
            poisson_sampling=False,
            grad_sample_mode=FLAGS.mode,
        )
        if FLAGS.mode == "ghost":
            model, optimizer, criterion, _ = made
        else:
            model, optimizer, _ = made

    def step():
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()

    step_clock.run(step)
    return parameters, f"Opacus {opacus.__version__} on PyTorch {torch.__version__.split('+')[0]}"


def main(argv):
    """Measures what the flags say."""
    del argv
    clock.report(_measure)


if __name__ == "__main__":
    clock.define_flags(MODES)
    app.run(main)
