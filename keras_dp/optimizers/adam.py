"""Adam and AdamW that can take the noise out of their second moment.

The noise of a private gradient adds its variance Phi = (sigma C / B)^2 to the second
moment, where it soon outweighs the signal, so that Adam turns into SGD with momentum.
Phi is public and can be subtracted (Tang et al. 2023, arXiv 2312.14334, Algorithm 1):

    update = lr * m_hat / sqrt(max(v_hat - Phi, floor))
"""

import keras
from keras import ops


def corrected_second_moment(v_hat, noise_variance, floor):
    """max(v_hat - Phi, floor): the second moment of the gradient without its noise."""
    return ops.maximum(v_hat - noise_variance, floor)


class NoiseBiasCorrection:
    """Adds ``noise_bias_correction`` to an Adam-like optimizer class.

    Args:
      noise_bias_correction: bool, default False. Subtract the variance of the noise
        from the second moment. Post-processing: epsilon stays the same.
      noise_bias_floor: float above 0, default 1e-8. The smallest second moment after the
        correction; gamma' of the paper. Takes the place of ``epsilon`` there.
    """

    def __init__(self, *args, noise_bias_correction=False, noise_bias_floor=1e-8, **kwargs):
        if not isinstance(noise_bias_correction, bool):
            raise ValueError(
                "noise_bias_correction must be True or False. "
                f"Received: noise_bias_correction={noise_bias_correction!r}"
            )
        if not 0 < noise_bias_floor < float("inf"):
            raise ValueError(
                "noise_bias_floor must be a finite number above 0. "
                f"Received: noise_bias_floor={noise_bias_floor!r}"
            )
        if noise_bias_correction and kwargs.get("amsgrad"):
            raise ValueError(
                "noise_bias_correction=True was given with amsgrad=True, whose running maximum "
                "has no known noise bias to subtract. Use one of the two."
            )
        super().__init__(*args, **kwargs)
        self._noise_bias = (noise_bias_correction, noise_bias_floor)

    @property
    def noise_bias_correction(self):
        """Whether the noise's variance is taken out of the second moment."""
        return self._noise_bias[0]

    @property
    def noise_bias_floor(self):
        """The smallest second moment after the correction."""
        return self._noise_bias[1]

    def direction(self, gradient, variable):
        """Advances both moments; returns m_hat / sqrt(v_hat), corrected if so asked."""
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        gradient = ops.cast(gradient, variable.dtype)
        step = ops.cast(self.iterations + 1, variable.dtype)
        self.assign_add(m, (gradient - m) * (1 - self.beta_1))
        self.assign_add(v, (ops.square(gradient) - v) * (1 - self.beta_2))
        m_hat = m / (1 - ops.power(ops.cast(self.beta_1, variable.dtype), step))
        v_hat = v / (1 - ops.power(ops.cast(self.beta_2, variable.dtype), step))
        if self.noise_bias_correction:
            variance = self.noise_stddev**2
            return m_hat / ops.sqrt(corrected_second_moment(v_hat, variance, self.noise_bias_floor))
        return m_hat / (ops.sqrt(v_hat) + self.epsilon)

    def get_config(self):
        """The config of the optimizer with the two arguments of the correction."""
        return super().get_config() | {
            "noise_bias_correction": self.noise_bias_correction,
            "noise_bias_floor": self.noise_bias_floor,
        }


class _AdamUpdate(NoiseBiasCorrection):
    def update_step(self, gradient, variable, learning_rate):
        """Keras's own update, or the corrected one."""
        if not self.noise_bias_correction:
            return super().update_step(gradient, variable, learning_rate)
        learning_rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, learning_rate * self.direction(gradient, variable))


class Adam(_AdamUpdate, keras.optimizers.Adam):
    """``keras.optimizers.Adam`` with the option ``noise_bias_correction``."""


class AdamW(_AdamUpdate, keras.optimizers.AdamW):
    """``keras.optimizers.AdamW`` with the option ``noise_bias_correction``."""
