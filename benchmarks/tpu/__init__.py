"""What a TPU would run: private steps compiled ahead of time, without a TPU, and what they cost."""
