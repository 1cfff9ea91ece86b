"""The version of keras_dp: the one place that states it. setup.py reads this file as text."""

__version__ = "0.1.0"
