"""keras_dp against other libraries for private training, on the same models."""
