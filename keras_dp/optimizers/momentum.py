"""SGD whose momentum is 0.9 unless said otherwise, the optimizer of Kurakin et al. 2022."""

import keras


class Momentum(keras.optimizers.SGD):
    """``keras.optimizers.SGD`` with ``momentum=0.9`` by default."""

    def __init__(self, learning_rate=0.01, momentum=0.9, **kwargs):
        super().__init__(learning_rate, momentum, **kwargs)
