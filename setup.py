"""The build of what pyproject.toml cannot describe: compiled extensions. There are none yet."""

from setuptools import setup

setup()
