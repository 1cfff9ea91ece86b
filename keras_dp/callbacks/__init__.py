"""Keras callbacks that show, and limit, what training costs in privacy."""

from keras_dp.callbacks.epsilon_logger import EpsilonLogger
from keras_dp.callbacks.privacy_budget import PrivacyBudget

__all__ = ["EpsilonLogger", "PrivacyBudget"]
