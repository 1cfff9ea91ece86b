"""Settings that every test shares."""

import os

# oneDNN computes some float32 products with an error near 1e-4 on CPUs with AVX-512; tests
# that compare to 1e-5 need the plain kernels. Set before TensorFlow is imported.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

# Devices for tests of several replicas; they can be made only before TensorFlow is used.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)

pytest.register_assert_rewrite("tests.fixtures.checks")


@pytest.fixture(autouse=True)
def _fresh_keras():
    keras.utils.set_random_seed(0)
    yield
    keras.backend.clear_session(free_memory=False)
