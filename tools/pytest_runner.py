"""The main program of every py_test in BUILD: runs pytest on the files named as arguments."""

import sys

import pytest

if __name__ == "__main__":
    # The empty expression takes back the `-m "not slow"` of pytest.ini.
    sys.exit(pytest.main(["-m", "", *sys.argv[1:]]))
